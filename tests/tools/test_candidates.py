"""The settings that are tried for a model, a machine and the user's limits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from torch_py_backend.artifacts.discovery import ArtifactType
from torch_py_backend.config import options
from torch_py_backend.tools import candidates
from torch_py_backend.tools.candidates import AS_CONFIGURED, Allowed, Candidate, Facts

_FACTS = Facts(ArtifactType.MODULE, images=False, gpu=False, batched=True, cores=4, memory_mb=1000)
_CURRENT = Candidate(AS_CONFIGURED, {})


def _screen(allowed: Allowed | None = None, **facts: Any) -> list[str]:
    known = dataclasses.replace(_FACTS, **facts)
    return [
        candidate.title for candidate in candidates.screen(known, allowed or Allowed(), _CURRENT)
    ]


@pytest.mark.parametrize(
    ("facts", "titles"),
    [
        pytest.param({}, ["eager", "compile", "compile + freeze", "compile, buckets"], id="module"),
        pytest.param(
            {"batched": False}, ["eager", "compile", "compile + freeze"], id="without-batches"
        ),
        pytest.param(
            {"images": True, "kind": ArtifactType.EXPORTED},
            [
                "eager",
                "channels_last",
                "compile",
                "compile + freeze",
                "compile + channels_last",
                "compile, buckets",
            ],
            id="images",
        ),
        pytest.param(
            {"kind": ArtifactType.TORCHSCRIPT, "images": True},
            ["TorchScript", "freeze", "freeze + channels_last"],
            id="torchscript",
        ),
        pytest.param(
            {"kind": ArtifactType.AOTI, "images": True, "gpu": True}, ["AOTInductor"], id="aoti"
        ),
        pytest.param(
            {"gpu": True},
            [
                "eager",
                "cuda_graphs",
                "compile",
                "compile + freeze",
                "compile, buckets",
                "compile + cuda_graphs",
            ],
            id="gpu",
        ),
    ],
)
def test_screened(facts: dict[str, Any], titles: list[str]) -> None:
    """The current settings come first, then every runtime of the artifact."""
    assert _screen(**facts) == [AS_CONFIGURED, *titles]


def test_divided_models_run_eagerly() -> None:
    """With DEVICE_MAP only eager is tried, because the config refuses the others."""
    tried = _screen(Allowed(reduced_precision=True), images=True, gpu=True, divided=True)
    assert tried == [AS_CONFIGURED, "eager"]


@pytest.mark.parametrize("kind", [ArtifactType.MODULE, ArtifactType.AOTI])
def test_reduced_precision_is_optional(kind: ArtifactType) -> None:
    """16-bit types are tried only if allowed, fp16 only on a GPU, none for AOTInductor."""
    assert not any("16" in title for title in _screen(kind=kind, gpu=True))
    on_cpu = _screen(Allowed(reduced_precision=True), kind=kind)
    on_gpu = _screen(Allowed(reduced_precision=True), kind=kind, gpu=True)
    assert any("bf16" in title for title in on_cpu) == (kind is not ArtifactType.AOTI)
    assert not any("fp16" in title.split() for title in on_cpu)
    assert ("fp16" in on_gpu) == (kind is not ArtifactType.AOTI)


def test_current_settings_under_their_own_name() -> None:
    """The current settings are tried once, under the title of their runtime if it has one."""
    current = Candidate(AS_CONFIGURED, {"NUM_THREADS": "2"})
    tried = candidates.screen(_FACTS, Allowed(), current)
    assert [candidate.title for candidate in tried].count("eager") == 1
    assert tried[0].title == "eager"


def test_values_are_accepted() -> None:
    """Every value of a candidate is valid for its parameter."""
    known = {row.key for row in options.TABLE}
    for kind in ArtifactType:
        facts = dataclasses.replace(_FACTS, kind=kind, gpu=True, images=True)
        for one in candidates.screen(facts, Allowed(reduced_precision=True), _CURRENT):
            given = {key: {"string_value": one.parameters[key]} for key in one.parameters}
            options.parse("digits", {key: given[key] for key in given.keys() & known})


@pytest.mark.parametrize(
    ("allowed", "facts", "shares"),
    [
        pytest.param(
            Allowed(), {}, [(4, 1), (2, 1), (2, 2), (1, 1), (1, 4)], id="halves-of-the-cores"
        ),
        pytest.param(Allowed(), {"cores": 1}, [(1, 1)], id="one-core"),
        pytest.param(Allowed(threads=(1, 3)), {}, [(1, 1), (1, 4), (3, 1)], id="threads"),
        pytest.param(Allowed(instances=(2, 3)), {}, [(2, 2), (1, 2), (1, 3)], id="instances"),
        pytest.param(Allowed(threads=(2,), instances=(2,)), {}, [(2, 2)], id="both"),
        pytest.param(Allowed(), {"gpu": True, "cores": 2}, [(2, 1), (1, 1), (1, 2)], id="gpu"),
        pytest.param(Allowed(), {"memory_mb": 250}, [(4, 1), (2, 1), (2, 2), (1, 1)], id="memory"),
    ],
)
def test_spread(allowed: Allowed, facts: dict[str, Any], shares: list[tuple[int, int]]) -> None:
    """Threads times instances do not exceed the cores, nor the instances the memory."""
    best = [Candidate("eager", {"NUM_THREADS": "4"})]
    tried = candidates.spread(dataclasses.replace(_FACTS, **facts), allowed, best, {"eager": 100.0})
    assert [(int(candidate.threads), candidate.instances) for candidate in tried] == shares


def test_only_the_best_two_are_spread() -> None:
    """Only the two best runtimes of the screening are tried further."""
    best = [
        Candidate("a", {"OPTIMIZE": "freeze", "NUM_THREADS": "1"}),
        Candidate("b", {"OPTIMIZE": "freeze", "NUM_THREADS": "2"}),
        Candidate("c", {}),
        Candidate("d", {"OPTIMIZE": "bf16"}),
    ]
    tried = candidates.spread(_FACTS, Allowed(threads=(2,), instances=(1,)), best, {})
    assert [candidate.title for candidate in tried] == ["a", "c"]


def test_simplest() -> None:
    """Fewer words in the parameters are simpler, then fewer instances."""
    eager = Candidate("eager", {"NUM_THREADS": "4"})
    more = Candidate("eager", {"NUM_THREADS": "1"}, 4)
    frozen = Candidate("freeze", {"OPTIMIZE": "freeze"})
    both = Candidate("both", {"OPTIMIZE": "freeze,bf16"})
    assert sorted([both, frozen, more, eager], key=lambda one: one.complexity) == [
        eager,
        more,
        frozen,
        both,
    ]
