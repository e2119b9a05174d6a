"""A Python environment becomes the archive that EXECUTION_ENV_PATH names.

conda-pack writes those of conda. A venv has no interpreter of its own, only links to the one that
it was made from, and venv-pack (no release since 2018) and its fork leave it at that: what they
write runs only where the same Python lies at the same place. Here the interpreter goes into the
archive, with its library and standard library, laid out as any installation is.

A venv made with --system-site-packages is a layer: packages upon those of the Python that it was
made from. It is packed as that, and does want this Python at its place on the server.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from torch_py_backend.errors import PackError, shown

SUFFIX = ".tar.gz"
# What an instance imports, and from which version on; the other dependencies are the commands'.
NEEDED: Mapping[str, str] = {"torch": "2.6", "numpy": "", "safetensors": "0.4.3"}
# What is left out: of a Python's standard library, of a layer, and of a venv that takes its Python
# along. Bytecode whose name ends in a number is just being written, by whoever imports it first.
_NEEDLESS = re.compile(
    r"(site|dist)-packages|test|idlelib|turtledemo|tkinter|ensurepip|config-.*|libpython.*\.a"
    r"|.*\.pyc\.\d+"
)
_ACTIVATION = re.compile(r"bin/[Aa]ctivate.*")
_REPLACED = re.compile(r"bin/(python[\d.]*|[Aa]ctivate.*)|pyvenv\.cfg|lib64")
# Libraries hardly get smaller for twice the time; conda-pack's own choice, too.
_COMPRESSION = 4
_SECONDS = 120

# Run by the environment's Python.
_PROBE = """
import json, os, sys, sysconfig
from importlib import metadata
packages, editable = {}, []
for one in metadata.distributions():
    name = (one.metadata["Name"] or "").lower().replace("_", "-")
    packages.setdefault(name, one.version)
    origin = json.loads(one.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        editable.append(name)
inside = [os.path.realpath(one) + "/" for one in (sys.prefix, sysconfig.get_path("stdlib"))]
outside = [
    one
    for one in sys.path
    if os.path.isdir(one) and not (os.path.realpath(one) + "/").startswith(tuple(inside))
]
folders = [sysconfig.get_config_var(name) or "" for name in ("LIBDIR", "MULTIARCH")]
print(json.dumps({
    "python": "%d.%d" % sys.version_info[:2],
    "packages": packages,
    "editable": editable,
    "outside": outside,
    "base": sys.base_prefix,
    "executable": os.path.realpath(sys.executable),
    "modules": sysconfig.get_path("stdlib"),
    "headers": sysconfig.get_path("include"),
    "libraries": [folders[0], os.path.join(*folders), os.path.join(sys.base_prefix, "lib")],
}))
"""

# Triton runs: bash -c "source bin/activate && exec env LD_LIBRARY_PATH=lib:... STUB ..."; a stub
# that never starts would hang the load, so that a wrong one is only called by its name.
_ACTIVATE = """\
# Sourced by Triton before it starts a stub in this environment; by torch-py-backend pack.
VIRTUAL_ENV="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export VIRTUAL_ENV
export PATH="$VIRTUAL_ENV/bin:$PATH"
# Triton takes its own lib/ off again, and processes that a model starts need libpython, too.
export LD_LIBRARY_PATH="$VIRTUAL_ENV/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
unset PYTHONHOME
for word in $BASH_EXECUTION_STRING; do
    case "$word" in
        */triton_python_backend_stub)
            grep -q 'libpython@PYTHON@\\.so' "$word" ||
                echo "EXECUTION_ENV_PATH names an environment for Python @PYTHON@, and $word" \\
                    "is built for another: nothing in the environment will be found." >&2
            ;;
    esac
done
"""


class Kind(Enum):
    """How an environment was made."""

    VENV = "venv"
    LAYER = "layer"
    CONDA = "conda"


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python environment, as its own Python tells it.

    Attributes:
        folder: where it lies.
        kind: how it was made.
        python: its version, as 3.12.
        packages: the versions of what can be imported, by name.
        editable: packages that pip installed with -e: their files lie elsewhere.
        outside: folders elsewhere that it imports from.
        base: the folder of the Python that it was made from.
        executable: that Python's program.
        modules: that Python's standard library.
        headers: that Python's headers, which torch.compile includes.
        libraries: where that Python's libpython may lie.
    """

    folder: Path
    kind: Kind
    python: str
    packages: Mapping[str, str]
    editable: tuple[str, ...]
    outside: tuple[str, ...]
    base: Path
    executable: Path
    modules: Path
    headers: Path
    libraries: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Packed:
    """An archive, and the bytes that it has, packed and unpacked."""

    path: Path
    size: int
    unpacked: int


def look(folder: Path) -> Environment:
    """What an environment is made of, told by its Python.

    Raises:
        PackError: this is no environment, or its Python does not run.
    """
    folder = folder.absolute()
    kind = _kind(folder)
    told = _ask(folder / "bin" / "python")
    return Environment(
        folder=folder,
        kind=kind,
        python=told["python"],
        packages=told["packages"],
        editable=tuple(told["editable"]),
        outside=tuple(told["outside"]),
        base=Path(told["base"]),
        executable=Path(told["executable"]),
        modules=Path(told["modules"]),
        headers=Path(told["headers"]),
        libraries=tuple(map(Path, told["libraries"])),
    )


def _kind(folder: Path) -> Kind:
    if (folder / "conda-meta").is_dir():
        return Kind.CONDA
    try:
        written = (folder / "pyvenv.cfg").read_text(encoding="utf-8")
    except OSError:
        raise PackError(
            f"{folder} is no environment: it has neither pyvenv.cfg nor conda-meta. Name the"
            " folder of a virtual or conda environment."
        ) from None
    layer = re.search(r"^include-system-site-packages\s*=\s*true", written, re.MULTILINE)
    return Kind.LAYER if layer else Kind.VENV


def _ask(python: Path) -> dict[str, Any]:
    try:
        # Isolated, as the stub is: neither PYTHONPATH nor what the user installed counts.
        done = subprocess.run(  # noqa: S603  the environment's own
            [python, "-I", "-c", _PROBE],
            capture_output=True,
            text=True,
            check=True,
            timeout=_SECONDS,
        )
    except OSError as error:
        raise PackError(f"{python} does not run: {error.strerror}.") from None
    except subprocess.TimeoutExpired:
        raise PackError(f"{python} did not answer within {_SECONDS} seconds.") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise PackError(f"{python} does not run: {last}") from None
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def check(environment: Environment, stub: str, *, numpy_1: bool) -> None:
    """Whether a server can run models in an environment.

    Args:
        environment: what was found.
        stub: the Python that the server's stub is built for.
        numpy_1: whether that stub garbles the tensors of numpy 2.

    Raises:
        PackError: it cannot; the sentence says what to change.
    """
    folder, python = environment.folder, environment.python
    if python != stub:
        raise PackError(
            f"{folder} has Python {python}, and the server's stub runs Python {stub}. Make the"
            f" environment with python{stub}; or put a stub for Python {python}, named"
            f" triton_python_backend_stub, into the model's folder, and say --python {python}."
        )
    _check_packages(environment)
    numpy = environment.packages["numpy"]
    if numpy_1 and _numbers(numpy) >= (2,):
        raise PackError(
            f"{folder} has numpy {numpy}, and the stub of this server garbles tensors of numpy 2:"
            f" {folder}/bin/python -m pip install 'numpy<2', or take a server of 24.11 or newer."
        )
    if environment.kind is not Kind.LAYER:
        _check_complete(environment)


def _check_packages(environment: Environment) -> None:
    for name, least in NEEDED.items():
        found = environment.packages.get(name)
        wanted = f"{name}>={least}" if least else name
        if found is None:
            lacks = f"{environment.folder} lacks {name}, which each instance of a model imports"
        elif _numbers(found) < _numbers(least):
            lacks = f"{environment.folder} has {name} {found}; expected {least} or newer"
        else:
            continue
        raise PackError(f"{lacks}: {environment.folder}/bin/python -m pip install '{wanted}'.")


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu as (2, 13, 0)."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", version)[0])))


def _check_complete(environment: Environment) -> None:
    """Refuse what imports from elsewhere: the server has no such folder."""
    if environment.editable:
        raise PackError(
            f"{environment.folder} has packages installed with pip's -e, whose files lie"
            f" elsewhere: {shown(environment.editable)}. Install them without -e."
        )
    if environment.outside:
        raise PackError(
            f"{environment.folder} imports from folders outside itself:"
            f" {shown(environment.outside)}. Install what is in them, or take out the .pth files"
            " that name them."
        )


def write(environment: Environment, output: Path) -> Packed:
    """Write the archive: whole, or not at all.

    Raises:
        PackError: it cannot be written, or the environment cannot be packed as it is.
    """
    output = output.absolute()
    if not output.name.endswith(SUFFIX):
        raise PackError(f"{output} is no {SUFFIX} file, and Triton unpacks no other.")
    if environment.folder in output.parents:
        raise PackError(f"{output} lies in the environment; write it to another folder.")
    try:
        descriptor, name = tempfile.mkstemp(suffix=SUFFIX, prefix=".", dir=output.parent)
        os.close(descriptor)
        staged = Path(name)
        try:
            pack = _pack_conda if environment.kind is Kind.CONDA else _pack_venv
            unpacked = pack(environment, staged)
            size = staged.stat().st_size
            staged.chmod(0o644)  # the server may run as another user
            staged.replace(output)
        finally:
            staged.unlink(missing_ok=True)
    except OSError as error:
        raise PackError(f"cannot write {output}: {error}.") from None
    return Packed(output, size, unpacked)


def _pack_conda(environment: Environment, path: Path) -> int:
    try:
        import conda_pack  # noqa: PLC0415  not everywhere
    except ImportError as error:
        raise PackError(
            f"conda-pack, which packs environments of conda, cannot be imported ({error}):"
            " pip install 'torch-py-backend[pack]'."
        ) from None
    try:
        conda_pack.pack(
            prefix=str(environment.folder),
            output=str(path),
            format="tar.gz",
            force=True,
            compress_level=_COMPRESSION,
        )
    except conda_pack.CondaPackException as error:
        raise PackError(f"conda-pack: {' '.join(str(error).split())}") from None
    return sum(one.lstat().st_size for one in environment.folder.rglob("*") if one.is_file())


def _pack_venv(environment: Environment, path: Path) -> int:
    with tarfile.open(path, "w:gz", compresslevel=_COMPRESSION) as archive:
        contents = _Contents(archive, environment)
        activate = _ACTIVATE.replace("@PYTHON@", environment.python)
        contents.add_text("bin/activate", activate.encode())
        if environment.kind is Kind.LAYER:
            contents.add_tree(environment.folder, "", _ACTIVATION)
        else:
            library = _library(environment)
            contents.add_tree(environment.folder, "", _REPLACED)
            _add_interpreter(environment, library, contents)
    return contents.size


def _library(environment: Environment) -> Path:
    """The libpython of the Python that the environment was made from."""
    library = f"libpython{environment.python}.so.1.0"
    found = [folder / library for folder in environment.libraries if (folder / library).is_file()]
    if not found:
        raise PackError(
            f"{environment.base} has no {library}, which Triton's stub loads. Install it (Debian:"
            f" libpython{environment.python}), or make the environment with another Python."
        )
    return found[0]


def _add_interpreter(environment: Environment, library: Path, contents: _Contents) -> None:
    """The Python that the environment was made from, laid out so that it finds its parts."""
    program = f"python{environment.python}"
    contents.add(environment.executable, f"bin/{program}")
    contents.add_link("bin/python", program)
    contents.add_link("bin/python3", program)
    contents.add(library.resolve(), f"lib/{library.name}")
    for part in (environment.modules, environment.headers):
        if part.is_dir():  # Debian's headers are a package of their own
            contents.add_tree(part, str(part.relative_to(environment.base)), _NEEDLESS)


class _Contents:
    """An archive that is being filled, by names in it.

    Attributes:
        size: the bytes of what is in it.
    """

    def __init__(self, archive: tarfile.TarFile, environment: Environment) -> None:
        self._archive = archive
        self._folder = environment.folder.resolve()
        self._moves = environment.kind is not Kind.LAYER
        self._shebang = f"#!{environment.folder}/bin/python".encode()
        self.size = 0

    def add_tree(self, folder: Path, name: str, left_out: re.Pattern[str]) -> None:
        """Everything in a folder but what is left out, told by its path in that folder."""
        for parent, folders, files in os.walk(folder):
            within = Path(parent).relative_to(folder)
            folders[:] = [one for one in folders if not left_out.fullmatch(str(within / one))]
            links = [one for one in folders if (Path(parent) / one).is_symlink()]
            for one in sorted([*files, *links]):
                if not left_out.fullmatch(str(within / one)):
                    self.add(Path(parent, one), str(Path(name, within, one)))

    def add(self, path: Path, name: str) -> None:
        """A file or a link; of a link that leads out of the environment, what it leads to."""
        if path.is_symlink() and self._moves and not self._stays(path):
            if not path.is_file():
                raise PackError(
                    f"{path} is a link to {path.resolve()}, outside the environment. Replace it by"
                    " what it leads to."
                )
            path = path.resolve()
        elif path.is_file() and not path.is_symlink() and name.startswith("bin/"):
            with path.open("rb") as file:
                script = file.read(len(self._shebang)) == self._shebang
            if script:
                _, _, rest = path.read_bytes().partition(b"\n")
                self.add_text(name, b"#!/usr/bin/env python3\n" + rest)
                return
        self._write(self._archive.gettarinfo(path, name), path)

    def _stays(self, link: Path) -> bool:
        leads = link.readlink()
        return not leads.is_absolute() and link.resolve().is_relative_to(self._folder)

    def add_text(self, name: str, text: bytes) -> None:
        """A program of our own making."""
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode, entry.mtime = len(text), 0o755, int(time.time())
        self.size += entry.size
        self._archive.addfile(entry, io.BytesIO(text))

    def add_link(self, name: str, target: str) -> None:
        """A link to what lies beside it."""
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = tarfile.SYMTYPE, target
        self._archive.addfile(entry)

    def _write(self, entry: tarfile.TarInfo, path: Path) -> None:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""  # whoever packed it
        if not entry.isreg():
            self._archive.addfile(entry)
            return
        self.size += entry.size
        with path.open("rb") as file:
            self._archive.addfile(entry, file)
