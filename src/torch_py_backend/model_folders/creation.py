"""Write a model folder, if its model runs in a child process. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch_py_backend import autocomplete, files
from torch_py_backend.config import pbtxt, repository
from torch_py_backend.config.pbtxt import Document, JsonObject
from torch_py_backend.errors import ToolError
from torch_py_backend.loading import discovery
from torch_py_backend.processes import child_process

INSPECT = "torch_py_backend.model_folders.inspection:inspect"
# Further fields of the config that is written, with a comment for each.
_COMMENTS = {
    "dynamic_batching": "Requests that wait at the same time become one call.",
    "input": "What a client sends; dims without the batch dimension, -1 is any size.",
    "output": "What a client receives.",
    "instance_group": "Copies of the model, each in a process of its own, or on every GPU.",
    "parameters": "Options of the backend.",
}


def check_name(name: str) -> None:
    """Raise ToolError for a name that a model folder may not have."""
    if not re.fullmatch(r"[\w-][\w.-]*", name):
        raise ToolError(
            f"the model's name is '{name}'; expected letters, digits, _, - and ., not first a dot."
        )


def create(
    target: Path,
    files: Mapping[str, Path],
    needs: Document,
    *,
    force: bool = False,
) -> JsonObject:
    """Write a model folder, if its model runs; return the report of `inspection.inspect`."""
    with new_folder(target, force=force) as folder:
        for name, source in files.items():
            path = folder / "1" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)
        document = {**pbtxt.read(folder), **needs}
        if discovery.is_cuda_package(folder / "1" / next(iter(files))):
            document["instance_group"] = [{"kind": "KIND_GPU", "count": 1}]
        return write_config(folder, document, new=True)


def write_config(
    folder: Path,
    document: Document,
    **more: object,
) -> JsonObject:
    """Run `inspect`, with `more` arguments, for version 1; write the config; return the report."""
    # Without a max_batch_size in this file, the warm-up refuses rows that depend on each other.
    (folder / "config.pbtxt").write_text('backend: "pytorch_py"\n')
    arguments = pbtxt.arguments(folder, "1", document)
    if sys.stderr.isatty():
        print(f"loading {folder.name} in a process of its own ...", file=sys.stderr)  # noqa: T201
    report: JsonObject = child_process.run(
        INSPECT, {"arguments": arguments, **more}, autocomplete.LIMIT_S
    )
    config: JsonObject = report["config"]
    if config["max_batch_size"]:
        config.setdefault("dynamic_batching", {})
    if config["instance_group"][0]["kind"] == "KIND_GPU":
        config["parameters"] |= pbtxt.parameters({"FORCE_CPU_ONLY_INPUT_TENSORS": "no"})
    lines = [
        'backend: "pytorch_py"',
        "",
        "# The largest number of rows in one call; 0: requests are not batched.",
        f"max_batch_size: {config['max_batch_size']}",
    ]
    for field, comment in _COMMENTS.items():
        if entries := pbtxt.lines(field, config.get(field)):
            lines += ["", f"# {comment}", *entries]
    files.replace(folder / "config.pbtxt", "\n".join([*lines, ""]).encode())
    return report


@contextlib.contextmanager
def new_folder(target: Path, *, force: bool) -> Iterator[Path]:
    """Yield the path of a model folder to write, which replaces the target unless the block raises.

    A server that watches the repository never sees a part of it. Raises ToolError if it cannot be
    written, or the target exists: only `force` replaces a model folder with the version 1 alone.
    """
    is_model = (target / "config.pbtxt").is_file()
    is_replaced = force and is_model and repository.versions(target) in ([], ["1"])
    if os.path.lexists(target) and not is_replaced:
        raise ToolError(
            f"{target} exists already; choose another name. --force (in Python: overwrite=True)"
            " replaces a model folder that has the version 1 alone."
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".scratch-", dir=target.parent) as scratch:
            folder = Path(scratch) / target.name
            yield folder
            if os.path.lexists(target):
                target.rename(Path(scratch) / "replaced")
            folder.rename(target)
    except OSError as error:
        raise ToolError(f"cannot make {target}: {error}") from error
