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


_SCRIPT = {"kind": ArtifactType.TORCHSCRIPT, "images": True}
_AOTI = {"kind": ArtifactType.AOTI, "images": True, "gpu": True}
_PLAIN, _BUCKETS = "; compile + freeze; compile", "; compile, buckets"


@pytest.mark.parametrize(
    ("facts", "titles"),
    [
        ({}, "eager" + _PLAIN + _BUCKETS),
        ({"batched": False}, "eager" + _PLAIN),
        (
            {"images": True, "kind": ArtifactType.EXPORTED},
            "eager; channels_last" + _PLAIN + "; compile + channels_last" + _BUCKETS,
        ),
        (_SCRIPT, "TorchScript; freeze; freeze + channels_last"),
        (_AOTI, "AOTInductor"),
        (
            {"gpu": True},
            "eager; cuda_graphs; compile + cuda_graphs"
            + _PLAIN
            + _BUCKETS
            + "; compile, reduce-overhead; compile, max-autotune",
        ),
        # With DEVICE_MAP only eager is tried, because the config refuses the others.
        ({"images": True, "gpu": True, "divided": True}, "eager"),
    ],
    ids=["module", "without-batches", "images", "torchscript", "aoti", "gpu", "divided"],
)
def test_screened(facts: dict[str, Any], titles: str) -> None:
    """Every runtime of the artifact is tried; those that compile come last."""
    assert "; ".join(_screen(**facts)) == titles


@pytest.mark.parametrize("kind", [ArtifactType.MODULE, ArtifactType.AOTI])
def test_reduced_precision_is_optional(kind: ArtifactType) -> None:
    """16-bit types are tried only if allowed, fp16 and TF32 only on a GPU, none for AOTInductor."""
    assert not any(part in title for title in _screen(kind=kind, gpu=True) for part in ("16", "32"))
    on_cpu = _screen(Allowed(reduced_precision=True), kind=kind)
    on_gpu = _screen(Allowed(reduced_precision=True), kind=kind, gpu=True)
    assert any("bf16" in title for title in on_cpu) == (kind is not ArtifactType.AOTI)
    assert not any("fp16" in title.split() for title in on_cpu)
    assert not any("TF32" in title for title in on_cpu)
    assert ("fp16" in on_gpu) == ("TF32" in on_gpu) == (kind is not ArtifactType.AOTI)


@pytest.mark.parametrize(
    ("allowed", "counts"),
    [
        (Allowed(threads=(1, 2), instances=(2, 3)), ("2", 3)),
        (Allowed(threads=(1, 4, 8), instances=(1, 2)), ("4", 1)),
    ],
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


def test_settings() -> None:
    """Without NUM_THREADS, settings equal those with the default's count."""
    same = [Candidate("a", {"NUM_THREADS": "4"}), Candidate("b", {})]
    others = [Candidate("a", {"NUM_THREADS": "2"}), Candidate("a", {}, 2)]
    keys = [candidates.settings(_FACTS, candidate) for candidate in (*same, *others)]
    assert keys[0] == keys[1]
    assert len({*keys}) == 3


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
        (Allowed(), {}, [(4, 1), (2, 1), (2, 2), (1, 1), (1, 4)]),
        (Allowed(), {"cores": 1}, [(1, 1)]),
        (Allowed(threads=(1, 3)), {}, [(1, 1), (1, 4), (3, 1)]),
        (Allowed(instances=(2, 3)), {}, [(2, 2), (1, 2), (1, 3)]),
        (Allowed(), {"gpu": True, "cores": 16}, [(16, 1), (8, 2), (4, 4)]),
        (Allowed(), {"gpu": True, "cores": 2}, [(2, 1), (1, 2)]),
        (Allowed(threads=(1,)), {"gpu": True}, [(1, 1), (1, 4)]),
        (Allowed(instances=(3,)), {"gpu": True}, [(1, 3)]),
        (Allowed(keep_instances=8), {"gpu": True}, [(1, 8)]),
        (Allowed(keep_instances=3), {}, [(4, 3), (2, 3), (1, 3)]),
        (Allowed(quick=True), {"cores": 8}, [(8, 1), (4, 1), (4, 2), (1, 1), (1, 8)]),
        (Allowed(), {"memory_mb": 250}, [(4, 1), (2, 1), (2, 2), (1, 1)]),
    ],
    ids=[
        "halves",
        "one-core",
        "threads",
        "instances",
        "gpu",
        "gpu-two-cores",
        "gpu-threads",
        "gpu-instances",
        "gpu-configured",
        "configured",
        "quick",
        "memory",
    ],
)
def test_spread(allowed: Allowed, facts: dict[str, Any], shares: list[tuple[int, int]]) -> None:
    """Threads times instances do not exceed the cores, nor the instances the memory."""
    best = [(Candidate("eager", {"NUM_THREADS": "4"}), 100.0)]
    tried = candidates.spread(dataclasses.replace(_FACTS, **facts), allowed, best)
    assert [(int(candidate.threads), candidate.instances) for candidate in tried] == shares


@pytest.mark.parametrize(("quick", "titles"), [(False, ["a", "c"]), (True, ["a"])])
def test_only_the_best_are_spread(quick: bool, titles: list[str]) -> None:
    """Only the two best runtimes of the screening are tried further; one with --quick."""
    best = [
        Candidate("a", {"OPTIMIZE": "freeze", "NUM_THREADS": "1"}),
        Candidate("b", {"OPTIMIZE": "freeze", "NUM_THREADS": "2"}),
        Candidate("c", {}),
        Candidate("d", {"OPTIMIZE": "bf16"}),
    ]
    allowed = Allowed(threads=(2,), instances=(1,), quick=quick)
    tried = candidates.spread(_FACTS, allowed, [(candidate, 0.0) for candidate in best])
    assert [candidate.title for candidate in tried] == titles


def test_simplest() -> None:
    """Fewer words in the parameters are simpler, then fewer instances."""
    ranked = [
        Candidate("eager", {"NUM_THREADS": "4"}),
        Candidate("eager", {"NUM_THREADS": "1"}, 4),
        Candidate("freeze", {"OPTIMIZE": "freeze"}),
        Candidate("both", {"OPTIMIZE": "freeze,bf16"}),
    ]
    mixed = [ranked[number] for number in (3, 2, 1, 0)]
    assert sorted(mixed, key=lambda candidate: candidate.complexity) == ranked
