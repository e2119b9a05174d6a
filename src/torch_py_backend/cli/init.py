"""`torch-py-backend init`: a model folder made from an artifact, with a commented config."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from torch_py_backend import companions, completion, contents, isolation, pbtxt
from torch_py_backend.contents import Content
from torch_py_backend.errors import ArtifactError, BackendError, InstallError, LoadError, shown

_SERVED = {
    Content.TORCHSCRIPT: "model.pt",
    Content.EXPORTED: "model.pt2",
    Content.AOTI: "model.pt2",
}
_TIMEOUT_S = 600.0
_NAME = re.compile(r"[\w-][\w.\- ]*")


def init(
    model_file: Annotated[Path, typer.Argument(help="TorchScript, a .pt2 file, or a model.py.")],
    name: Annotated[str, typer.Option(help="The model's name; by default the file's.")] = "",
    repository: Annotated[Path, typer.Option(help="Where the model folder goes.")] = Path(),
    link: Annotated[bool, typer.Option(help="Link the file instead of copying it.")] = False,
) -> None:
    """Make a model folder from an artifact."""
    if not model_file.is_file():
        raise InstallError(f"{model_file} is not a file; expected the model's file.")
    name = name or model_file.absolute().stem
    kind, files = _files(name, model_file.absolute())
    if not _NAME.fullmatch(name):
        raise InstallError(f"--name is '{name}'; expected letters, digits, _, -, . and blanks.")
    target = repository.absolute() / name
    if os.path.lexists(target):
        raise InstallError(f"{target} exists already; choose another --name.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Made complete beside its place: a server that watches the repository sees it whole.
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as scratch:
            folder = Path(scratch) / name
            decided = _make(folder, kind, files, link=link)
            folder.rename(target)
    except OSError as error:
        raise InstallError(f"cannot make {target}: {error}") from error
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    console.print(f"made {target}")
    for line in decided:
        console.print(f"  {line}")


def _make(folder: Path, kind: str, files: Mapping[str, Path], *, link: bool) -> list[str]:
    version = folder / "1"
    version.mkdir(parents=True)
    for served, source in files.items():
        place = version / served
        place.parent.mkdir(parents=True, exist_ok=True)
        if link:
            place.symlink_to(source)
        else:
            shutil.copyfile(source, place)
    document = pbtxt.read(folder)
    try:
        completion.complete(pbtxt.arguments(folder, "1", document), document)
        told = "inputs and outputs: told by the model"
    except BackendError as error:
        document["input"] = document["output"] = []
        told = f"inputs and outputs: to be written by you ({error})"
    on_gpu = contents.built_for_gpu(next(iter(files.values())))
    text = _config(folder.name, kind, document, on_gpu=on_gpu)
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")
    batch = document["max_batch_size"] or "0: the model has no batch dimension that can be told"
    others = list(files)[1:]
    return [
        f"{next(iter(files.values())).name} is {kind}",
        *([f"with {shown(others)}"] if others else []),
        told,
        f"max_batch_size {batch}",
        *_checked(folder),
    ]


def _checked(folder: Path) -> Sequence[str]:
    """Whether the folder that was made can be served."""
    document = pbtxt.read(folder)
    if completion.needed(document):
        return ["next: complete config.pbtxt, then run `torch-py-backend check`"]
    given = pbtxt.arguments(folder, "1", document)
    try:
        isolation.run(
            folder.name, "torch_py_backend.inspection:inspect", {"arguments": given}, _TIMEOUT_S
        )
    except LoadError as error:
        return [f"does not load yet: {error}"]
    return ["loads and runs; next: torch-py-backend serve"]


def _files(model: str, model_file: Path) -> tuple[str, dict[str, Path]]:
    """What is served, and which files go where; the first is the model."""
    beside = model_file.with_name("example_inputs.safetensors")
    extra = {beside.name: beside} if beside.is_file() else {}
    if model_file.suffix == ".py":
        return "Python source and weights", companions.of_source(model, model_file) | extra
    found = contents.describe(model_file)
    if found not in _SERVED:
        raise ArtifactError(
            model,
            f"{model_file.name} is {found.value}",
            expected="TorchScript, a torch.export program, an AOTInductor package or Python source",
            cure=contents.cure(found, model_file),
        )
    return found.value, {_SERVED[found]: model_file} | extra


_INPUTS_ON_GPU = 'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }'


def _config(name: str, kind: str, document: Mapping[str, Any], *, on_gpu: bool) -> str:
    """A config.pbtxt for reading: every field with a word on what it is for."""
    batched = document["max_batch_size"] > 0
    lines = [
        f"# {name}: {kind}, served by PyTorch.",
        'backend: "pytorch_py"',
        "",
        "# Rows in one call of the model at most; 0: requests are never put together.",
        f"max_batch_size: {document['max_batch_size']}",
    ]
    if document.get("model_transaction_policy", {}).get("decoupled"):
        lines += [
            "# A request has any number of responses, as the model yields them.",
            "model_transaction_policy { decoupled: true }",
        ]
    elif batched:
        lines += ["# Requests that wait at the same time become one call.", "dynamic_batching { }"]
    lines += ["", *_tensors("input", document), "", *_tensors("output", document), ""]
    lines += [
        "# Copies of the model, each in a process of its own. KIND_GPU: one on every GPU.",
        f"instance_group [{{ kind: KIND_{'GPU' if on_gpu else 'CPU'} count: 1 }}]",
        "# With KIND_GPU, this leaves inputs that are on the GPU already there:",
        f"{'' if on_gpu else '# '}{_INPUTS_ON_GPU}",
    ]
    return "\n".join(lines) + "\n"


def _dims(sizes: Sequence[int]) -> str:
    return f"[ {', '.join(map(str, sizes))} ]" if sizes else "[ ]"


def _reshape(entry: Mapping[str, Any]) -> str:
    if "reshape" not in entry:
        return ""
    return f" reshape {{ shape: {_dims(entry['reshape']['shape'])} }}"


def _tensors(role: str, document: Mapping[str, Any]) -> list[str]:
    comment = {
        "input": "# What a client sends; dims without the batch dimension, -1 is any size.",
        "output": "# What it gets back.",
    }[role]
    entries = document[role]
    if not entries:
        return [f'# {role} [{{ name: "…" data_type: TYPE_FP32 dims: [ … ] }}]']
    lines = [
        f"  {{ name: {json.dumps(entry['name'])} data_type: {entry['data_type']}"
        f" dims: {_dims(entry['dims'])}{_reshape(entry)} }}"
        for entry in entries
    ]
    return [comment, f"{role} [", ",\n".join(lines), "]"]
