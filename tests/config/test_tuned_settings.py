"""tuned.json: the results of tuning per machine, written atomically."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import build
import pytest

from torch_py_backend.config import tuned_settings
from torch_py_backend.errors import ConfigError, ToolError

_X86 = """processor\t: 0
model name\t: A Processor @ 2.0GHz
flags\t\t: fpu avx2 amx_bf16 fma sse2 avx512f

processor\t: 1
model name\t: Another
"""
_ARM = "processor\t: 0\nFeatures\t: fp asimd sve2 crc32\n"


def _entry(processor: str, **parameters: str) -> dict[str, Any]:
    chosen = {"parameters": parameters, "instances": 1} if parameters else None
    return {"machine": {"processor": processor}, "chosen": chosen}


@pytest.mark.parametrize(
    ("text", "instructions"),
    [(_X86, ["amx_bf16", "avx2", "avx512f", "fma"]), (_ARM, ["asimd", "sve2"]), ("", [])],
    ids=["x86", "arm", "nothing"],
)
def test_machine(tmp_path: Path, text: str, instructions: list[str]) -> None:
    """The facts of a machine decide which kernels are used; facts missing in /proc are omitted."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(text)
    gpu = tmp_path / "gpus" / "0000:01:00.0" / "information"
    gpu.parent.mkdir(parents=True)
    gpu.write_text("Model: \t\t A GPU\nIRQ: 1\n")
    facts = tuned_settings.machine_facts(cpuinfo, tmp_path / "gpus")
    assert facts["instructions"] == instructions
    assert facts["gpus"] == ["A GPU"]
    assert facts["cores"] >= 1
    assert facts["processor"]


def test_machines_side_by_side(tmp_path: Path) -> None:
    """Each machine reads its own entry; a new run replaces only that one."""
    assert tuned_settings.fingerprint({"a": 1, "b": 2}) == tuned_settings.fingerprint(
        {"b": 2, "a": 1}
    )
    tuned_settings.save(tmp_path, _entry("one", OPTIMIZE="freeze"))
    tuned_settings.save(tmp_path, _entry("two", NUM_THREADS="2"))
    tuned_settings.save(tmp_path, _entry("one", NUM_THREADS="4"))
    tuned_settings.save(tmp_path, _entry("three"))
    one, two, three = (
        tuned_settings.fingerprint({"processor": name}) for name in ("one", "two", "three")
    )
    assert tuned_settings.read_choice(tmp_path, one) == {"NUM_THREADS": "4"}
    assert tuned_settings.read_choice(tmp_path, two) == {"NUM_THREADS": "2"}
    assert tuned_settings.read_choice(tmp_path, three) is None
    assert tuned_settings.read_choice(tmp_path, "unknown") is None
    assert tuned_settings.read_choice(tmp_path / "nowhere", one) is None


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"machines": []}', '{"machines": {"a": 1}}'])
def test_damaged(tmp_path: Path, text: str) -> None:
    """A tuned.json that tune did not write is rejected, and not overwritten."""
    (tmp_path / tuned_settings.FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"tuned.json cannot be read.*Remove it"):
        tuned_settings.read_choice(tmp_path, "a")
    with pytest.raises(ConfigError, match="cannot be read"):
        tuned_settings.save(tmp_path, _entry("one"))
    assert (tmp_path / tuned_settings.FILE).read_text() == text


def test_save_keeps_a_link(tmp_path: Path) -> None:
    """A link stays a link, and its target keeps its permissions."""
    target = tmp_path / "target"
    target.write_text('{"machines": {}}')
    target.chmod(0o600)
    (tmp_path / tuned_settings.FILE).symlink_to(target)
    path = tuned_settings.save(tmp_path, _entry("one"))
    assert path.is_symlink()
    assert len(tuned_settings.entries(tmp_path)) == 1
    assert target.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ToolError, match=r"cannot write .*/tuned\.json: No such file"):
        tuned_settings.save(tmp_path / "nowhere", _entry("one"))


# --- OPTIMIZE: "auto" ----------------------------------------------------------------------------


def _here(folder: Path, **parameters: str) -> None:
    entry = {
        "machine": tuned_settings.machine_facts(),
        "chosen": {"parameters": parameters, "instances": 1},
    }
    tuned_settings.save(folder, entry)


def test_auto(tmp_path: Path) -> None:
    """Settings for this machine apply to OPTIMIZE auto; options that config.pbtxt sets stay."""
    _here(tmp_path, OPTIMIZE="freeze,bf16", NUM_THREADS="3", BATCH_BUCKETS="4")
    settings = build.config(tmp_path, optimize=("auto",), num_threads=1)
    options = tuned_settings.apply(settings).options
    assert options.optimize == ("bf16", "freeze")
    assert (options.batch_buckets, options.num_threads) == ((4,), 1)
    settings = build.config(tmp_path, optimize=("channels_last",))
    assert tuned_settings.apply(settings) is settings


def test_auto_without_a_choice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On a machine that was not tuned nothing is optimized, and the log says what to do."""
    tuned_settings.save(tmp_path, _entry("another", OPTIMIZE="freeze"))
    assert tuned_settings.apply(build.config(tmp_path, optimize=("auto",))).options.optimize == ()
    assert "Run torch-py-backend tune here" in caplog.text


def test_choice_that_conflicts_with_the_config(tmp_path: Path) -> None:
    """A choice that conflicts with the config is rejected, and so is a damaged one."""
    _here(tmp_path, BATCH_BUCKETS="16")
    settings = build.config(tmp_path, optimize=("auto",), max_batch_size=8)
    with pytest.raises(ConfigError, match="BATCH_BUCKETS holds 16"):
        tuned_settings.apply(settings)
    entry = {"machine": tuned_settings.machine_facts(), "chosen": {"instances": 1}}
    tuned_settings.save(tmp_path, entry)
    with pytest.raises(ConfigError, match="cannot be read: KeyError"):
        tuned_settings.apply(settings)
