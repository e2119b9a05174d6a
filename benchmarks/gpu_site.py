"""Pack what `make gpu` needs on a bare machine with torch and pytest: a tritonserver and clients.

    python -m benchmarks.gpu_site [--python 3.12]

Wheels from PyPI for x86-64 Linux, without what a run does not load, as gpu-site-3.12.tar.xz. `make
gpu` unpacks it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from packaging.requirements import Requirement

_ROOT = Path(__file__).parents[1]
# What tests and benchmarks import beside the package's own requirements.
TESTS = ("numpy<2", "ml_dtypes", "tritonclient[grpc,http]")
# Without: only its server is packed.
SERVER = "nvidia-pytriton>=0.7,<0.8"
_PLATFORMS = ("manylinux_2_35", "manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux1")
_LIBRARIES = "nvidia_pytriton.libs"
_UNUSED = ("**/__pycache__", "**/tests", "bin", "**/*.pyi", "**/*.pyx", "**/*.c", "**/*.h")
MOST_BYTES = 60 * 1000 * 1000


def own_requirements() -> list[str]:
    """Return what this package and its command line require, but torch."""
    required = map(Requirement, importlib.metadata.requires("torch-py-backend") or ())
    return [
        str(one).partition(";")[0]
        for one in required
        if one.name != "torch" and (one.marker is None or one.marker.evaluate({"extra": "serve"}))
    ]


def install(site: Path, python: str) -> None:
    """Install the packages for a version of Python, such as 3.12, into a folder."""
    words = ["--quiet", "--target", str(site), "--constraint", str(_ROOT / "constraints.txt")]
    words += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    words += [f"--platform={platform}_x86_64" for platform in _PLATFORMS]
    for packages in ((*TESTS, *own_requirements()), ("--no-deps", SERVER)):
        command = [sys.executable, "-m", "pip", "install", *words, *packages]
        subprocess.run(command, check=True)  # noqa: S603  this Python


def strip(site: Path, python: str) -> None:
    """Remove what no run loads: the stubs of other Pythons, PyTriton's own code, unused libraries.

    Raises:
        SystemExit: the server has no stub for this version of Python.
    """
    package = site / "pytriton"
    server = package / "tritonserver"
    stubs = server / "python_backend_stubs"
    if not (stubs / python).is_dir():
        present = ", ".join(sorted(path.name for path in stubs.iterdir()))
        raise SystemExit(f"the server has no stub for Python {python}; expected one of {present}.")
    for path in stubs.iterdir():
        if path.name != python:
            shutil.rmtree(path)
    for path in package.iterdir():
        if path != server:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (package / "__init__.py").write_text("")  # the package is looked for, but not imported
    for pattern in _UNUSED:
        for path in list(site.glob(pattern)):
            if path.is_relative_to(server) or not path.exists():
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    _strip_libraries(server, site / _LIBRARIES)


def _strip_libraries(server: Path, libraries: Path) -> None:
    """Remove the libraries that neither the server nor its other libraries name."""
    kept: set[Path] = set()
    seen = [path for path in server.rglob("*") if path.is_file()]
    while seen:
        content = seen.pop().read_bytes()
        named = {path for path in libraries.iterdir() if path.name.encode() in content} - kept
        kept |= named
        seen += named
    for path in libraries.iterdir():
        if path not in kept:
            path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default="3.12", help="of the machine with a GPU")
    arguments = parser.parse_args()
    output = _ROOT / f"gpu-site-{arguments.python}.tar.xz"
    with tempfile.TemporaryDirectory(prefix="gpu-site-") as folder:
        site = Path(folder)
        install(site, arguments.python)
        strip(site, arguments.python)
        with tarfile.open(output, "w:xz") as archive:
            archive.add(site, ".")
    size = output.stat().st_size
    print(f"{output.name}: {size / 1e6:.1f} MB for Python {arguments.python}")
    if size > MOST_BYTES:
        raise SystemExit(f"the archive is larger than {MOST_BYTES / 1e6:.0f} MB.")


if __name__ == "__main__":
    main()
