"""Pack a Python environment into the archive that EXECUTION_ENV_PATH names.

conda-pack packs conda environments. A venv only links to the interpreter that it was made from, and
venv-pack keeps these links, so that its archives need the same Python at the same place. Here the
archive has the interpreter, libpython and the standard library, too.

A venv with --system-site-packages is a layer of packages on those of its Python. Only the layer is
packed, and the server needs this Python at the same place.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from torch_py_backend.errors import PackError, join_names

SUFFIX = ".tar.gz"
# The packages that an instance imports, with the least version of each.
NEEDED: Mapping[str, str] = {"torch": "2.6", "numpy": "", "safetensors": "0.4.3"}
# Paths that are left out of a standard library, a layer and a venv. Bytecode files whose names end
# in a number are being written at the moment.
_NEEDLESS = re.compile(
    r"(site|dist)-packages|test|idlelib|turtledemo|tkinter|ensurepip|config-.*|libpython.*\.a"
    r"|.*\.pyc\.\d+"
)
_ACTIVATION = re.compile(r"bin/[Aa]ctivate.*")
_REPLACED = re.compile(r"bin/(python[\d.]*|[Aa]ctivate.*)|pyvenv\.cfg|lib64")
# As conda-pack. Higher levels take twice the time and hardly make libraries smaller.
_COMPRESSION = 4
_SECONDS = 120

# Run by the environment's Python.
_PROBE = """
import json, os, sys, sysconfig
from importlib import metadata
packages, editable = {}, []
for installed in metadata.distributions():
    name = (installed.metadata["Name"] or "").lower().replace("_", "-")
    packages.setdefault(name, installed.version)
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        editable.append(name)
own = (sys.prefix, sysconfig.get_path("stdlib"))
inside = tuple(os.path.realpath(folder) + "/" for folder in own)
outside = [
    folder
    for folder in sys.path
    if os.path.isdir(folder) and not (os.path.realpath(folder) + "/").startswith(inside)
]
libdir, multiarch = (sysconfig.get_config_var(name) or "" for name in ("LIBDIR", "MULTIARCH"))
folders = (libdir, os.path.join(libdir, multiarch), os.path.join(sys.base_prefix, "lib"))
name = "libpython%d.%d.so.1.0" % sys.version_info[:2]
libraries = [path for path in (os.path.join(folder, name) for folder in folders)
             if os.path.isfile(path)]
print(json.dumps({
    "python": "%d.%d" % sys.version_info[:2],
    "packages": packages,
    "editable": editable,
    "outside": outside,
    "base": sys.base_prefix,
    "executable": os.path.realpath(sys.executable),
    # The headers are for torch.compile; Debian's are a package of their own.
    "trees": [path for path in map(sysconfig.get_path, ("stdlib", "include"))
              if os.path.isdir(path)],
    "library": libraries[0] if libraries else None,
}))
"""

# Triton runs: bash -c "source bin/activate && exec env LD_LIBRARY_PATH=lib:... STUB ...". A stub
# for another Python is reported but started, because the load hangs if no stub starts.
_ACTIVATE = """\
# Sourced by Triton before it starts a stub in this environment. Written by torch-py-backend pack.
VIRTUAL_ENV="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export VIRTUAL_ENV
export PATH="$VIRTUAL_ENV/bin:$PATH"
# Triton removes its own entry again, and processes that a model starts need libpython, too.
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
    """The type of an environment."""

    VENV = "venv"
    LAYER = "layer"
    CONDA = "conda"


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python environment, as reported by its interpreter.

    Attributes:
        folder: the environment's folder.
        kind: its type.
        python: its Python version, as 3.12.
        packages: versions of the installed packages by name.
        editable: packages installed with pip's -e, whose files are elsewhere.
        outside: folders elsewhere on its import path.
        base: the folder of the base Python, from which the environment was made.
        executable: the base Python's interpreter.
        trees: the base Python's standard library and headers.
        library: the base Python's libpython; None if there is none.
    """

    folder: Path
    kind: Kind
    python: str
    packages: Mapping[str, str]
    editable: Sequence[str]
    outside: Sequence[str]
    base: str
    executable: str
    trees: Sequence[str]
    library: str | None


@dataclass(frozen=True, slots=True)
class Packed:
    """An archive, with its size packed and unpacked in bytes."""

    path: Path
    size: int
    unpacked: int


def inspect(folder: Path) -> Environment:
    """Return the environment in a folder, as reported by its interpreter.

    Raises:
        PackError: the folder is not an environment, or its Python does not run.
    """
    folder = folder.absolute()
    if (folder / "conda-meta").is_dir():
        kind = Kind.CONDA
    else:
        try:
            config = (folder / "pyvenv.cfg").read_text(encoding="utf-8")
        except OSError:
            raise PackError(
                f"{folder} is no environment: it has neither pyvenv.cfg nor conda-meta. Name the"
                " folder of a virtual or conda environment."
            ) from None
        layer = re.search(r"^include-system-site-packages\s*=\s*true", config, re.MULTILINE)
        kind = Kind.LAYER if layer else Kind.VENV
    python = folder / "bin" / "python"
    try:
        # Isolated as the stub: without PYTHONPATH and the user's site-packages.
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
        last = (error.stderr.strip().splitlines() or ["it printed no error"])[-1]
        raise PackError(f"{python} does not run: {last}") from None
    return Environment(folder, kind, **json.loads(done.stdout))


def check(environment: Environment, stub: str, *, numpy_1: bool) -> None:
    """Raise unless a server can run models in an environment.

    Args:
        environment: the environment.
        stub: the Python version of the server's stub.
        numpy_1: whether that stub garbles tensors of numpy 2.

    Raises:
        PackError: the server cannot run models in it.
    """
    folder, python = environment.folder, environment.python
    if python != stub:
        raise PackError(
            f"{folder} has Python {python}, and the server's stub runs Python {stub}. Make the"
            f" environment with python{stub}; or put a stub for Python {python}, named"
            f" triton_python_backend_stub, into the model's folder, and pass --python {python}."
        )
    for name, least in NEEDED.items():
        version = environment.packages.get(name)
        if version is None:
            reason = f"{folder} lacks {name}, which each instance of a model imports"
        elif _numbers(version) < _numbers(least):
            reason = f"{folder} has {name} {version}; expected {least} or newer"
        else:
            continue
        requirement = f"{name}>={least}" if least else name
        raise PackError(f"{reason}: {folder}/bin/python -m pip install '{requirement}'.")
    numpy = environment.packages["numpy"]
    if numpy_1 and _numbers(numpy) >= (2,):
        raise PackError(
            f"{folder} has numpy {numpy}, and the stub of this server garbles tensors of numpy 2:"
            f" {folder}/bin/python -m pip install 'numpy<2', or use a server of 24.11 or newer."
        )
    if environment.kind is Kind.LAYER:
        return
    if environment.editable:
        raise PackError(
            f"{folder} has packages installed with pip's -e, whose files lie"
            f" elsewhere: {join_names(environment.editable)}. Install them without -e."
        )
    if environment.outside:
        raise PackError(
            f"{folder} imports from folders outside itself:"
            f" {join_names(environment.outside)}. Install what is in them, or remove the .pth"
            " files that name them."
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return 2.13.0+cpu as (2, 13, 0)."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", version)[0])))


def write(environment: Environment, output: Path) -> Packed:
    """Write the whole archive, or nothing.

    Raises:
        PackError: the archive cannot be written, or the environment cannot be packed.
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
        import conda_pack  # noqa: PLC0415  in an extra
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
    return sum(path.lstat().st_size for path in environment.folder.rglob("*") if path.is_file())


def _pack_venv(environment: Environment, path: Path) -> int:
    python, library = environment.python, environment.library
    with tarfile.open(path, "w:gz", compresslevel=_COMPRESSION) as archive:
        _add_script(archive, "bin/activate", _ACTIVATE.replace("@PYTHON@", python).encode())
        if environment.kind is Kind.LAYER:
            _add_tree(archive, environment, environment.folder, "", _ACTIVATION)
        elif library is None:
            raise PackError(
                f"{environment.base} has no libpython{python}.so.1.0, which Triton's stub loads."
                f" Install it (Debian: libpython{python}), or make the environment with another"
                " Python."
            )
        else:
            _add_tree(archive, environment, environment.folder, "", _REPLACED)
            program = f"python{python}"
            _add(archive, Path(environment.executable), f"bin/{program}")
            for name in ("bin/python", "bin/python3"):
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, program
                archive.addfile(link)
            _add(archive, Path(library).resolve(), f"lib/{Path(library).name}")
            for tree in environment.trees:
                name = os.path.relpath(tree, environment.base)
                _add_tree(archive, environment, Path(tree), name, _NEEDLESS)
        return sum(member.size for member in archive.getmembers())


def _add_tree(
    archive: tarfile.TarFile,
    environment: Environment,
    folder: Path,
    name: str,
    excluded: re.Pattern[str],
) -> None:
    """Add a folder's files except those whose paths in the folder are excluded.

    Scripts start the Python beside them. Links that lead out of the environment are replaced by
    their files, except in a layer.
    """
    root = environment.folder.resolve()
    shebang = f"#!{environment.folder}/bin/python".encode()
    for parent, folders, files in os.walk(folder):
        within = Path(parent).relative_to(folder)
        folders[:] = [child for child in folders if not excluded.fullmatch(str(within / child))]
        links = [child for child in folders if Path(parent, child).is_symlink()]
        for child in sorted([*files, *links]):
            path, target = Path(parent, child), str(Path(name, within, child))
            if excluded.fullmatch(str(within / child)):
                continue
            if path.is_symlink():
                resolved = path.resolve()
                inside = resolved.is_relative_to(root) and not path.readlink().is_absolute()
                if inside or environment.kind is Kind.LAYER:
                    _add(archive, path, target)
                elif path.is_file():
                    _add(archive, resolved, target)
                else:
                    raise PackError(
                        f"{path} is a link to {resolved}, outside the environment. Replace it by"
                        " what it leads to."
                    )
            elif target.startswith("bin/") and path.read_bytes().startswith(shebang):
                _, _, rest = path.read_bytes().partition(b"\n")
                _add_script(archive, target, b"#!/usr/bin/env python3\n" + rest)
            else:
                _add(archive, path, target)


def _add(archive: tarfile.TarFile, path: Path, name: str) -> None:
    def without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    archive.add(path, name, recursive=False, filter=without_owner)


def _add_script(archive: tarfile.TarFile, name: str, text: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = len(text), 0o755, int(time.time())
    archive.addfile(entry, io.BytesIO(text))
