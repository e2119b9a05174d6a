"""An installed tritonserver: its paths, and what it needs to run this backend."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from torch_py_backend.errors import ToolError
from torch_py_backend.server import installation

NGC = Path("/opt/tritonserver")
_STUB = "triton_python_backend_stub"
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
# Characters that split a word of a shell, or change it.
_SHELL = re.compile(r"[\s\"'`$&;|<>()\\]")


@dataclass(frozen=True, slots=True)
class TritonInstallation:
    """The paths of an installed tritonserver.

    Attributes:
        python_backend: the folder with libtriton_python.so and Triton's utilities.
        stub: the executable that runs Python models, built for this version of Python.
        libraries: the folders with its shared libraries.
    """

    executable: Path
    python_backend: Path
    stub: Path
    libraries: tuple[Path, ...]

    def refuse_in_shell(self, path: str) -> None:
        """Refuse a path that a stub would not get as it is: Triton would wait for it forever.

        Raises:
            ToolError: it has a space or another character that a shell interprets, and this server
                starts stubs through a shell without quotes, as Triton 24.10 does.
        """
        match = _SHELL.search(path)
        if match and b"\0bash\0" in (self.python_backend / "libtriton_python.so").read_bytes():
            raise ToolError(
                f"'{path}' has the character {match[0]!r}; Triton starts processes through a shell,"
                " which splits or changes it. Rename it, or use a link."
            )


def find(executable: Path | None = None) -> TritonInstallation:
    """Find a tritonserver: on PATH, in /opt/tritonserver, or in the wheel nvidia-pytriton.

    Args:
        executable: the tritonserver to use instead.

    Raises:
        ToolError: no tritonserver is installed, or it lacks the Python backend or a stub for this
            Python.
    """
    if executable is None:
        folders = [os.environ.get("PATH", os.defpath), NGC / "bin"]
        wheel = importlib.util.find_spec("pytriton")  # not imported
        if wheel is not None and wheel.origin is not None:
            folders.append(Path(wheel.origin).parent / "tritonserver" / "bin")
        path = shutil.which("tritonserver", path=os.pathsep.join(map(str, folders)))
        if path is None:
            raise ToolError(
                f"no tritonserver was found on PATH, in {NGC} or in a wheel. Install one with"
                " pip install 'torch-py-backend[server]', or name it with --tritonserver."
            )
        executable = Path(path)
    if not executable.is_file():
        raise ToolError(f"{executable} is not a file; expected a tritonserver executable.")
    executable = executable.absolute()  # it is started in another folder
    root = executable.resolve().parent.parent
    backend = root / "backends" / "python"
    # NVIDIA's containers have one stub, in the backend; the wheel has one for each Python.
    stubs = (root / "python_backend_stubs" / _PYTHON / _STUB, backend / _STUB)
    stub = next((path for path in stubs if path.is_file()), stubs[-1])
    for part in (backend / "libtriton_python.so", stub):
        if not part.is_file():
            raise ToolError(
                f"{executable} comes without {part}: its Python backend does not support Python"
                f" {_PYTHON}, or is not installed."
            )
    libpython = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
    libraries = (root.parent.parent / "nvidia_pytriton.libs", root / "lib", libpython)
    return TritonInstallation(executable, backend, stub, libraries)


def populate_backends(triton: TritonInstallation, backends: Path) -> None:
    """Fill a backend directory with Triton's Python backend and this backend.

    Files are copied: Triton refuses a library whose real path is outside its backend folder.
    """
    python = backends / "python"
    shutil.copytree(triton.python_backend, python, ignore=shutil.ignore_patterns("__pycache__"))
    if not (python / _STUB).exists():
        shutil.copy2(triton.stub, python / _STUB)
    ours = installation.install(backends, "pytorch_py")
    # Serves repositories that were made for the LibTorch backend.
    shutil.copytree(ours, backends / "pytorch", copy_function=os.link)


def environment(triton: TritonInstallation) -> dict[str, str]:
    """Return the environment variables with which a server finds its libraries and this Python.

    Raises:
        ToolError: there is no `python3` beside this interpreter that is the same interpreter.
    """
    folder = Path(sys.executable).parent
    python3 = folder / "python3"
    if not python3.exists() or python3.resolve() != Path(sys.executable).resolve():
        raise ToolError(
            f"Triton's stub runs the first python3 on PATH, and {python3} is not this Python"
            f" ({sys.executable}). Run from a virtual environment: python -m venv .venv."
        )
    values = dict(os.environ)
    for name, paths in (("LD_LIBRARY_PATH", triton.libraries), ("PATH", (folder,))):
        values[name] = os.pathsep.join(filter(None, [*map(str, paths), values.get(name, "")]))
    return values
