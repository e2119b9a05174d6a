"""The settings that are tried for a model, a machine and the user's limits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from torch_py_backend.artifacts.discovery import ArtifactType
from torch_py_backend.config import options
from torch_py_backend.tools import candidates
from torch_py_backend.tools.candidates import AS_CONFIGURED, Allowed, Candidate, Facts

_FACTS = Facts(
    ArtifactType.MODULE, images=False, gpu=False, batched=True, cores=4, threads=4, memory_mb=1000
)
_CURRENT = Candidate(AS_CONFIGURED, {})


def _screen(allowed: Allowed | None = None, **facts: Any) -> list[str]:
    """The titles of all runtimes, those that compile last."""
    known = dataclasses.replace(_FACTS, **facts)
    return [
        candidate.title
        for compiled in (False, True)
        for candidate in candidates.screen(known, allowed or Allowed(), _CURRENT, compiled=compiled)
    ]


@pytest.mark.parametrize(
    ("facts", "titles"),
    [
        pytest.param({}, ["eager", "compile + freeze", "compile", "compile, buckets"], id="module"),
        pytest.param(
            {"batched": False}, ["eager", "compile + freeze", "compile"], id="without-batches"
        ),
        pytest.param(
            {"images": True, "kind": ArtifactType.EXPORTED},
            [
                "eager",
                "channels_last",
                "compile + freeze",
                "compile",
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
                "compile + cuda_graphs",
                "compile + freeze",
                "compile",
                "compile, buckets",
            ],
            id="gpu",
        ),
    ],
)
def test_screened(facts: dict[str, Any], titles: list[str]) -> None:
    """Every runtime of the artifact is tried; those that compile come last."""
    assert _screen(**facts) == titles


def test_divided_models_run_eagerly() -> None:
    """With DEVICE_MAP only eager is tried, because the config refuses the others."""
    tried = _screen(Allowed(reduced_precision=True), images=True, gpu=True, divided=True)
    assert tried == ["eager"]


@pytest.mark.parametrize("kind", [ArtifactType.MODULE, ArtifactType.AOTI])
def test_reduced_precision_is_optional(kind: ArtifactType) -> None:
    """16-bit types are tried only if allowed, fp16 only on a GPU, none for AOTInductor."""
    assert not any("16" in title for title in _screen(kind=kind, gpu=True))
    on_cpu = _screen(Allowed(reduced_precision=True), kind=kind)
    on_gpu = _screen(Allowed(reduced_precision=True), kind=kind, gpu=True)
    assert any("bf16" in title for title in on_cpu) == (kind is not ArtifactType.AOTI)
    assert not any("fp16" in title.split() for title in on_cpu)
    assert ("fp16" in on_gpu) == (kind is not ArtifactType.AOTI)


@pytest.mark.parametrize(
    ("allowed", "counts"),
    [
        (Allowed(), ("2", 3)),
        (Allowed(threads=(1, 2), instances=(2, 3)), ("2", 3)),
        (Allowed(threads=(1, 4, 8), instances=(1, 2)), ("4", 1)),
    ],
    ids=["configured", "allowed", "not-allowed"],
)
def test_counts_of_runtimes(allowed: Allowed, counts: tuple[str, int]) -> None:
    """Runtimes are tried with the base's counts of threads and instances, if they are allowed."""
    base = Candidate("eager", {"NUM_THREADS": "2"}, 3)
    for candidate in candidates.screen(_FACTS, allowed, base, compiled=False):
        assert (candidate.threads, candidate.instances) == counts


def test_configured() -> None:
    """The current settings have the title of their runtime, if it has one."""
    for parameters, title in (
        ({"NUM_THREADS": "2"}, "eager"),
        ({"OPTIMIZE": "bf16"}, "bf16"),
        ({"OPTIMIZE": "bf16,channels_last"}, AS_CONFIGURED),
    ):
        assert candidates.configured(_FACTS, parameters, 2) == Candidate(title, parameters, 2)


def test_unmeasured() -> None:
    """Settings are tried once; without NUM_THREADS they equal those with the default's count."""
    tried = [Candidate("a", {"NUM_THREADS": "4"}), *[Candidate("b", {"NUM_THREADS": "2"})] * 2]
    (left,) = candidates.unmeasured(_FACTS, tried, [_CURRENT])
    assert left.title == "b"


def test_values_are_accepted() -> None:
    """Every value of a candidate is valid for its parameter."""
    known = {row.key for row in options.TABLE}
    for kind in ArtifactType:
        facts = dataclasses.replace(_FACTS, kind=kind, gpu=True, images=True)
        for compiled in (False, True):
            for candidate in candidates.screen(
                facts, Allowed(reduced_precision=True), _CURRENT, compiled=compiled
            ):
                parameters = candidate.parameters
                given = {key: {"string_value": parameters[key]} for key in parameters}
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
        pytest.param(
            Allowed(keep_instances=3), {}, [(4, 3), (2, 3), (1, 3)], id="configured-instances"
        ),
        pytest.param(
            Allowed(quick=True), {"cores": 8}, [(8, 1), (4, 1), (4, 2), (1, 1), (1, 8)], id="quick"
        ),
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
    (quick,) = candidates.spread(
        _FACTS, Allowed(threads=(2,), instances=(1,), quick=True), best, {}
    )
    assert quick.title == "a"


def test_simplest() -> None:
    """Fewer words in the parameters are simpler, then fewer instances."""
    eager = Candidate("eager", {"NUM_THREADS": "4"})
    more = Candidate("eager", {"NUM_THREADS": "1"}, 4)
    frozen = Candidate("freeze", {"OPTIMIZE": "freeze"})
    both = Candidate("both", {"OPTIMIZE": "freeze,bf16"})
    assert sorted([both, frozen, more, eager], key=lambda candidate: candidate.complexity) == [
        eager,
        more,
        frozen,
        both,
    ]
