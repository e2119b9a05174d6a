"""Inductor's vector instruction sets are detected once."""

from __future__ import annotations

import functools

import pytest
from torch._inductor import config, cpu_vec_isa

from torch_py_backend.compile import vector_isa


@pytest.mark.parametrize(
    ("users", "compilers", "expected"),
    [
        pytest.param(None, ["avx512", "avx2"], True, id="all of the processor"),
        pytest.param(None, ["avx2"], None, id="a compiler that supports fewer"),
        pytest.param(False, ["avx512", "avx2"], False, id="TORCHINDUCTOR_VEC_ISA_OK=0"),
    ],
)
def test_vector_instructions(
    monkeypatch: pytest.MonkeyPatch, users: bool | None, compilers: list[str], expected: bool | None
) -> None:
    """Inductor uses all instruction sets of the processor without testing them."""

    @functools.cache
    def valid_instruction_sets() -> list[str]:
        return ["avx512", "avx2"] if config.cpp.vec_isa_ok else compilers

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", valid_instruction_sets)
    with config.patch({"cpp.vec_isa_ok": users}):
        assert vector_isa.detect("digits") == compilers
        assert config.cpp.vec_isa_ok is expected
        assert valid_instruction_sets() == compilers


def test_torch_with_other_internals(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a torch of other internals, the model is compiled without setting them."""
    monkeypatch.delattr(cpu_vec_isa, "valid_vec_isa_list")
    with config.patch({"cpp.vec_isa_ok": None}):
        assert vector_isa.detect("digits") == []
        vector_isa.restore([])
        assert config.cpp.vec_isa_ok is None
