"""The backend's files, and the tritonserver that runs them."""

from __future__ import annotations

import compileall
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

from torch_py_backend.errors import ToolError

NGC = Path("/opt/tritonserver")
PACKAGE = Path(__file__).parents[1]
_STUB = "triton_python_backend_stub"
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
# Characters that split a word of a shell, or change it.
_SHELL = re.compile(r"[\s\"'`$&;|<>()\\]")
# The same as backends/pytorch_py/model.py in the repository; a test compares them.
SHIM = '''"""What Triton loads for `backend: "pytorch_py"`; the code is in torch_py_backend."""

import os
import sys

# The package that `install` puts beside this file wins over one in site-packages.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from torch_py_backend.adapter import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def install(backends: Path, name: str) -> Path:
    """Write the backend folder `backends/name`, at once, and return its path.

    It replaces an earlier installation; ToolError if the folder holds other files.
    """
    if not backends.is_dir():
        raise ToolError(
            f"{backends} is not a folder; expected the backend directory of a tritonserver. Name it"
            " with --backend-dir."
        )
    with tempfile.TemporaryDirectory(prefix=f".{PACKAGE.name}-", dir=backends) as temporary:
        staged = Path(temporary, "staged")
        ignored = shutil.ignore_patterns("*.pyc.*")  # of processes that compile the package now
        shutil.copytree(PACKAGE, staged / PACKAGE.name, ignore=ignored)
        (staged / "model.py").write_text(SHIM, encoding="utf-8")
        # Else each instance compiles it, if it cannot write here or has PYTHONDONTWRITEBYTECODE.
        compileall.compile_dir(staged, quiet=2)  # prints no errors
        uninstall(backends, name)
        staged.rename(backends / name)
    return backends / name


def uninstall(backends: Path, name: str) -> bool:
    """Remove the backend folder `backends/name`; return whether it existed."""
    target = backends / name
    if not target.exists():
        return False
    if not (target / PACKAGE.name).is_dir():
        raise ToolError(
            f"{target} is not a folder of this backend. Choose another --name or --backend-dir, or"
            " remove it first."
        )
    shutil.rmtree(target)
    return True


def refuse_in_shell(path: str) -> None:
    """Raise ToolError for a path with characters of a shell.

    Triton 24.10 passes paths to a shell without quotes, and would wait forever.
    """
    if match := _SHELL.search(path):
        raise ToolError(
            f"'{path}' has the character {match[0]!r}; Triton starts processes through a shell,"
            " which splits or changes it. Rename it, or use a link."
        )


class TritonInstallation:
    """A tritonserver: `executable`, or one on PATH, in /opt/tritonserver, or in nvidia-pytriton.

    Raises:
        ToolError: none is installed, or it lacks its parts.

    Attributes:
        python_backend: the folder with libtriton_python.so and Triton's utilities.
        stub: the executable that runs Python models, built for this version of Python.
    """

    def __init__(self, executable: Path | None = None) -> None:
        if executable is None:
            folders = [os.environ.get("PATH", os.defpath), str(NGC / "bin")]
            wheel = importlib.util.find_spec("pytriton")  # not imported
            if wheel is not None and wheel.origin is not None:
                folders.append(str(Path(wheel.origin).parent / "tritonserver" / "bin"))
            found = shutil.which("tritonserver", path=":".join(folders))
            if found is None:
                raise ToolError(
                    "no tritonserver was found; install one with pip install"
                    " 'torch-py-backend[server]', or name it with --tritonserver."
                )
            executable = Path(found)
        self.executable = executable.absolute()  # it is started in another folder
        root = self.executable.resolve().parent.parent
        libpython = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
        self.libraries = (root.parent.parent / "nvidia_pytriton.libs", root / "lib", libpython)
        self.python_backend = root / "backends" / "python"
        # The wheel has a stub for each Python, NVIDIA's containers have one in the backend.
        self.stub = root / "python_backend_stubs" / _PYTHON / _STUB
        if not self.stub.is_file():
            self.stub = self.python_backend / _STUB
        for part in (self.executable, self.python_backend / "libtriton_python.so", self.stub):
            if not part.is_file():
                raise ToolError(
                    f"there is no {part}; expected a tritonserver with a Python backend for Python"
                    f" {_PYTHON}."
                )

    def populate_backends(self, backends: Path) -> None:
        """Fill a backend directory with Triton's Python backend and this backend.

        Files are copied: Triton refuses a library whose real path is outside its backend folder.
        """
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(self.python_backend, backends / "python", ignore=ignored)
        shutil.copy2(self.stub, backends / "python" / _STUB)
        ours = install(backends, "pytorch_py")
        # Serves repositories that were made for the LibTorch backend.
        shutil.copytree(ours, backends / "pytorch", copy_function=os.link)

    def environment(self) -> dict[str, str]:
        """Return the variables with which the server finds its libraries and this Python."""
        # Triton's stub runs the first python3 on PATH.
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        libraries = ":".join(map(str, self.libraries))
        if others := os.environ.get("LD_LIBRARY_PATH"):
            libraries = f"{libraries}:{others}"
        return os.environ | {"PATH": path, "LD_LIBRARY_PATH": libraries}
