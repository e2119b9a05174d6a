"""The vector instruction sets that inductor compiles for on the CPU.

Inductor tests each of them in a process of its own in every start (1 s of a start from a bundle of
the compile cache with torch 2.13 and AVX-512). The names that it finds are kept with the bundle.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch_py_backend.errors import summarize

log = logging.getLogger(__name__)


def detect(model: str) -> list[str]:
    """Return the instruction sets that inductor may use, and skip its further tests of them."""
    try:
        names = _names()
        restore(names)
    except Exception as error:  # another version of torch may have other internals
        log.info("model '%s': %s; inductor looks for them itself.", model, summarize(error))
        return []
    return names


def restore(names: Sequence[str]) -> bool:
    """Skip inductor's tests of instruction sets, if it would select these without them.

    Returns:
        Whether it selects these, or none are named.
    """
    from torch._inductor import config, cpu_vec_isa  # noqa: PLC0415  slow to import

    if not names:
        return True
    if config.cpp.vec_isa_ok is not None:  # the user has set TORCHINDUCTOR_VEC_ISA_OK
        return _names() == names
    clear_cache = cpu_vec_isa.valid_vec_isa_list.cache_clear
    config.cpp.vec_isa_ok = True
    clear_cache()
    if _names() == names:
        return True
    config.cpp.vec_isa_ok = None  # the compiler supports fewer than the processor
    clear_cache()
    return False


def _names() -> list[str]:
    from torch._inductor import cpu_vec_isa  # noqa: PLC0415

    return [str(isa) for isa in cpu_vec_isa.valid_vec_isa_list()]
