"""`torch-py-backend init`: make a model folder from an artifact, with a commented config."""

from __future__ import annotations

import json
import shlex
import tempfile
import urllib.parse
from pathlib import Path
from typing import Annotated

import typer

from torch_py_backend.cli.check import print_report
from torch_py_backend.config import dtypes, pbtxt
from torch_py_backend.config.pbtxt import JsonObject
from torch_py_backend.errors import ToolError, about
from torch_py_backend.model_folders import artifact_files, creation

# In requests that Triton takes in binary form only.
_BINARY = ('"datatype": "FP16"', '"datatype": "BF16"', '{"base64": ')


def init(
    model_file: Annotated[
        Path,
        typer.Argument(
            help="TorchScript, a .pt2 file, a .py file, weights with a .py file of the same name"
            " beside them, a folder that save_pretrained wrote, or a TorchServe archive (.mar)."
        ),
    ],
    name: Annotated[str, typer.Option(help="The model's name; by default the file's.")] = "",
    repository: Annotated[
        Path | None,
        typer.Option(
            help="Where the model folder goes; by default this folder, for a folder of"
            " save_pretrained: models."
        ),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="NAME:TYPE:DIMS",
            help="An input, such as x:FP32:3x224x224: dims without the batch dimension, -1 for any"
            " size. Repeat it for each input.",
        ),
    ] = None,
    model_class: Annotated[
        str,
        typer.Option(
            "--class",
            metavar="NAME",
            help="The class of a .py file to serve; by default the only one, or the one whose"
            " state_dict has the keys of the weights.",
        ),
    ] = "",
    tensors: Annotated[
        bool,
        typer.Option(
            "--tensors",
            help="Take tensors for a Hugging Face classifier, although its folder has a tokenizer.",
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the model folder that is there.")
    ] = False,
) -> None:
    """Make a model folder from an artifact, if the model loads and runs."""
    entries = [_parse_input(text) for text in inputs or ()]
    absolute = model_file.absolute()
    name = name or (absolute.name if absolute.is_dir() else absolute.stem)
    parent = repository or Path("models" if model_file.is_dir() else "")
    target = parent.absolute() / name
    with about(name), tempfile.TemporaryDirectory(prefix="torch-py-backend-") as scratch:
        needs: JsonObject = {}
        if absolute.is_dir():
            files, needs = artifact_files.find_pretrained(
                absolute, tensors=tensors or bool(entries)
            )
        else:
            if absolute.suffix == ".mar":
                absolute, needs = artifact_files.unpack_archive(absolute, Path(scratch))
            files = artifact_files.find(absolute)
        if entries:
            needs["input"] = entries
        if model_class:
            needs["parameters"] = pbtxt.parameters({"MODEL_CLASS": model_class})
        creation.check_name(name)
        report = creation.create(target, files, needs, force=force)
    typer.echo(f"made {target}")
    print_report("OK", f"{name} 1", report)
    url = f"http://127.0.0.1:8000/v2/models/{urllib.parse.quote(name)}/infer"
    typer.echo(f"next: {shlex.join(['torch-py-backend', 'serve', str(parent)])}")
    inputs_of_request = report["request"]
    request = json.dumps({"inputs": inputs_of_request})
    if inputs_of_request and not any(word in request for word in _BINARY):
        typer.echo(f"then, with values: {shlex.join(['curl', url, '-d', request])}")


def _parse_input(text: str) -> JsonObject:
    """Return the entry of config.pbtxt for NAME:TYPE:DIMS."""
    try:
        name, datatype, dims = text.rsplit(":", 2)
        data_type = dtypes.from_triton(datatype.replace("STRING", "BYTES")).config
        sizes = [int(size) for size in dims.split("x") if size]
        if not name:
            raise ValueError("no name")
    except (ValueError, KeyError):
        types = ", ".join(dtype.triton for dtype in dtypes.TABLE)
        raise ToolError(
            f"--input is '{text}'; expected NAME:TYPE:DIMS such as x:FP32:3x224x224, with one of"
            f" the types {types}."
        ) from None
    return {"name": name, "data_type": data_type, **pbtxt.dims_entry(sizes)}
