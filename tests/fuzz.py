"""Fuzzing with atheris, guided by coverage: `python tests/fuzz.py [--seconds N] [TARGET ...]`.

Each target of fuzzing.py runs in its own process, one after another. Inputs that break it are kept
in `fuzz/` under the working directory, with the corpus from which the next run starts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

_HERE = Path(__file__).parent
_TIMEOUT_S = 20
_MEMORY_MB = 1024
# Modules whose coverage guides the fuzzer.
_INSTRUMENTED = ["torch_py_backend", "zipfile", "json"]


def main(arguments: Sequence[str]) -> int:
    """Fuzz the targets and return how many of them broke."""
    import fuzzing

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(fuzzing.TARGETS))
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    options = parser.parse_args(arguments)
    broken = []
    for name in options.targets or fuzzing.TARGETS:
        corpus = Path("fuzz") / name
        corpus.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(fuzzing.SEEDS):
            (corpus / f"seed{number}").write_bytes(seed)
        limits = [f"-max_total_time={options.seconds}", f"-timeout={_TIMEOUT_S}"]
        limits += [f"-rss_limit_mb={_MEMORY_MB}", f"-artifact_prefix=fuzz/{name}-"]
        command = [sys.executable, __file__, "--one", name, str(corpus), *limits]
        print(f"--- {name}", flush=True)
        if subprocess.run(command, check=False).returncode:
            broken.append(name)
    print(f"broken: {', '.join(broken) or 'none'}")
    return len(broken)


def fuzz(name: str, arguments: Sequence[str]) -> None:
    """Fuzz one target until its time is over or it breaks."""
    import atheris

    with atheris.instrument_imports(include=_INSTRUMENTED):
        import fuzzing

    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:

        def test(data: bytes) -> None:
            fuzzing.TARGETS[name](Path(folder), data)

        atheris.Setup([sys.argv[0], *arguments], test)
        atheris.Fuzz()


if __name__ == "__main__":
    sys.path.insert(0, str(_HERE))
    if sys.argv[1:2] == ["--one"]:
        fuzz(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main(sys.argv[1:]))
