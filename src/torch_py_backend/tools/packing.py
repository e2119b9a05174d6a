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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch_py_backend.errors import ToolError, join_names

SUFFIX = ".tar.gz"
# The packages that an instance imports, with the oldest version of each.
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
    "outside": editable + outside,
    "base": sys.base_prefix,
    "executable": os.path.realpath(sys.executable),
    # The headers are for torch.compile; Debian's are a package of their own.
    "trees": [path for path in map(sysconfig.get_path, ("stdlib", "include"))
              if os.path.isdir(path)],
    "library": libraries[0] if libraries else None,
}))
"""

# Packages of conda put them there. Triton up to 25.07 sources bin/activate, which runs them.
CONDA_SCRIPTS = "etc/conda/activate.d/*.sh"
# Triton runs: bash -c "source bin/activate && exec env LD_LIBRARY_PATH=lib:... STUB ...".
_ACTIVATE = b"""\
# Sourced by Triton before it starts a stub in this environment. Written by torch-py-backend pack.
VIRTUAL_ENV="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export VIRTUAL_ENV
export PATH="$VIRTUAL_ENV/bin:$PATH"
# Triton removes its own entry again, and processes that a model starts need libpython, too.
export LD_LIBRARY_PATH="$VIRTUAL_ENV/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
unset PYTHONHOME
"""


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python environment, as reported by its interpreter.

    Attributes:
        folder: the environment's folder.
        kind: its type.
        python: its Python version, as 3.12.
        packages: versions of the installed packages by name.
        outside: packages installed with pip's -e, and folders elsewhere on its import path.
        base: the folder of the base Python, from which the environment was made.
        executable: the base Python's interpreter.
        trees: the base Python's standard library and headers.
        library: the base Python's libpython; None if there is none.
    """

    folder: Path
    kind: Literal["venv", "layer", "conda"]
    python: str
    packages: Mapping[str, str]
    outside: Sequence[str]
    base: str
    executable: str
    trees: Sequence[str]
    library: str | None


def inspect(folder: Path) -> Environment:
    """Return the environment in a folder, as reported by its interpreter.

    Raises:
        ToolError: the folder is not an environment, or its Python does not run.
    """
    folder = folder.absolute()
    config = folder / "pyvenv.cfg"
    kind: Literal["venv", "layer", "conda"] = "conda"
    if not (folder / "conda-meta").is_dir():
        if not config.is_file():
            raise ToolError(
                f"{folder} is no environment: it has neither pyvenv.cfg nor conda-meta. Name the"
                " folder of a virtual or conda environment."
            )
        layered = re.search(r"include-system-site-packages\s*=\s*true", config.read_text("utf-8"))
        kind = "layer" if layered else "venv"
    python = folder / "bin" / "python"
    try:
        # Isolated as the stub: without PYTHONPATH and the user's site-packages.
        done = subprocess.run(  # noqa: S603  the environment's own
            [python, "-I", "-c", _PROBE], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise ToolError(f"{python} does not run: {error.strerror}.") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed no error"])[-1]
        raise ToolError(f"{python} does not run: {last}")
    return Environment(folder, kind, **json.loads(done.stdout))


def check(environment: Environment, stub: str, *, numpy_1: bool) -> None:
    """Raise unless a server can run models in an environment.

    Args:
        environment: the environment.
        stub: the Python version of the server's stub.
        numpy_1: whether that stub garbles tensors of numpy 2.

    Raises:
        ToolError: the server cannot run models in it.
    """
    folder, python = environment.folder, environment.python
    if python != stub:
        raise ToolError(
            f"{folder} has Python {python}, and the server's stub runs Python {stub}. Make the"
            f" environment with python{stub}; or put a stub for Python {python}, named"
            f" triton_python_backend_stub, into the model's folder, and pass --python {python}."
        )
    pip = f"{folder}/bin/python -m pip install"
    for name, oldest in NEEDED.items():
        version = environment.packages.get(name)
        requirement = f"{name}>={oldest}" if oldest else name
        if version is None or _numbers(version) < _numbers(oldest):
            raise ToolError(
                f"{folder} has {name} {version or 'not'}; each instance of a model imports"
                f" {requirement}: {pip} '{requirement}'."
            )
    numpy = environment.packages["numpy"]
    if numpy_1 and _numbers(numpy) >= (2,):
        raise ToolError(
            f"{folder} has numpy {numpy}, and the stub of this server garbles tensors of numpy 2:"
            f" {pip} 'numpy<2', or use a server of 24.11 or newer."
        )
    if environment.outside and environment.kind != "layer":
        raise ToolError(
            f"{folder} imports from outside itself: {join_names(environment.outside)}. Install"
            " these packages without pip's -e, and remove .pth files that name folders."
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return 2.13.0+cpu as (2, 13, 0)."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", version)[0])))


def write(environment: Environment, output: Path) -> None:
    """Write the whole archive, or nothing.

    Raises:
        ToolError: the archive cannot be written, or the environment cannot be packed.
    """
    output = output.absolute()
    if not output.name.endswith(SUFFIX):
        raise ToolError(f"{output} is no {SUFFIX} file, and Triton unpacks no other.")
    if environment.folder in output.parents:
        raise ToolError(f"{output} lies in the environment; write it to another folder.")
    pack = _pack_conda if environment.kind == "conda" else _pack_venv
    try:
        with tempfile.TemporaryDirectory(prefix=".", dir=output.parent) as scratch:
            staged = Path(scratch) / output.name
            pack(environment, staged)
            staged.replace(output)
    except OSError as error:
        raise ToolError(f"cannot write {output}: {error}.") from None


def _pack_conda(environment: Environment, path: Path) -> None:
    try:
        import conda_pack  # noqa: PLC0415  in an extra
    except ImportError as error:
        raise ToolError(
            f"conda-pack, which packs environments of conda, cannot be imported ({error}):"
            " pip install 'torch-py-backend[pack]'."
        ) from None
    try:
        conda_pack.pack(
            prefix=str(environment.folder), output=str(path), compress_level=_COMPRESSION
        )
    except conda_pack.CondaPackException as error:
        raise ToolError(f"conda-pack: {' '.join(str(error).split())}") from None


def _pack_venv(environment: Environment, path: Path) -> None:
    python, library = environment.python, environment.library
    layer = environment.kind == "layer"
    # Links are replaced by their files, which may be in uv's cache. A layer's Python stays a link.
    with tarfile.open(path, "w:gz", compresslevel=_COMPRESSION, dereference=not layer) as archive:
        _add_script(archive, "bin/activate", _ACTIVATE)
        _add_tree(archive, environment.folder, "", _ACTIVATION if layer else _REPLACED)
        if layer:
            return
        if library is None:
            raise ToolError(
                f"{environment.base} has no libpython{python}.so.1.0, which Triton's stub loads."
                f" Install it (Debian: libpython{python}), or make the environment with another"
                " Python."
            )
        archive.add(environment.executable, f"bin/python{python}", filter=_without_owner)
        for name in ("bin/python", "bin/python3"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"python{python}"
            archive.addfile(link)
        archive.add(library, f"lib/{Path(library).name}", filter=_without_owner)
        for tree in map(Path, environment.trees):
            _add_tree(archive, tree, f"{os.path.relpath(tree, environment.base)}/", _NEEDLESS)


def _add_tree(
    archive: tarfile.TarFile, folder: Path, prefix: str, excluded: re.Pattern[str]
) -> None:
    """Add a folder except the paths in it that are excluded.

    Scripts of an environment start the Python beside them.
    """
    shebang = f"#!{folder}/bin/python".encode()

    def adapt(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        name = entry.name.removeprefix(prefix)
        if excluded.fullmatch(name):
            return None
        if entry.isdir() and (folder / name).is_symlink():  # it may lead to a folder around it
            raise ToolError(
                f"{folder / name} is a link to a folder. Replace it by what it leads to."
            )
        if entry.isreg() and name.startswith("bin/"):
            content = (folder / name).read_bytes()
            if content.startswith(shebang):
                _, _, rest = content.partition(b"\n")
                _add_script(archive, entry.name, b"#!/usr/bin/env python3\n" + rest)
                return None
        return _without_owner(entry)

    for child in sorted(folder.iterdir()):
        archive.add(child, f"{prefix}{child.name}", filter=adapt)


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def _add_script(archive: tarfile.TarFile, name: str, text: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(text), 0o755
    archive.addfile(entry, io.BytesIO(text))
