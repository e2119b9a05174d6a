"""`torch-py-backend init`: a model folder made from an artifact, with a commented config."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from torch_py_backend.artifacts import file_types, repository, source_dependencies
from torch_py_backend.artifacts.file_types import Content
from torch_py_backend.autocomplete import completion
from torch_py_backend.config import dtypes, pbtxt
from torch_py_backend.errors import ArtifactError, BackendError, InstallError, LoadError, shown
from torch_py_backend.processes import child_process

_SERVED = {
    Content.TORCHSCRIPT: "model.pt",
    Content.EXPORTED: "model.pt2",
    Content.AOTI: "model.pt2",
}
_WEIGHTS = (Content.STATE_DICT, Content.SAFETENSORS)
_SOURCE = "Python source and weights"
_EXAMPLE = "example_inputs.safetensors"
# What the refusal of a module without its weights says.
_NO_WEIGHTS = "there is no weights file beside"
_TIMEOUT_S = 600.0
_NAME = re.compile(r"[\w-][\w.\- ]*")
# NAME:TYPE:DIMS; DIMS are numbers between x.
_INPUT = re.compile(r"(?P<name>.+):(?:TYPE_)?(?P<type>\w+):(?P<dims>(?:-1|\d+)(?:x(?:-1|\d+))*)?")
# What is tried to find out whether the model takes several rows.
_BATCH_SIZE = 8
# What transformers adds to the weights that other frameworks read.
_FOREIGN = (".h5", ".msgpack", ".onnx", ".ot", ".tflite", ".gguf")


def init(
    model_file: Annotated[
        Path,
        typer.Argument(
            help="TorchScript, a .pt2 file, a .py file, weights with a .py file of the same name"
            " beside them, or a folder that save_pretrained wrote."
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
    link: Annotated[bool, typer.Option(help="Link the files instead of copying them.")] = False,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="NAME:TYPE:DIMS",
            help="What a request holds, such as x:FP32:3x224x224: dims without the batch dimension,"
            " -1 for any size. Repeat it for each input.",
        ),
    ] = None,
    example: Annotated[
        Path | None,
        typer.Option(
            help="Valid inputs by name, in safetensors, with the batch dimension if there is one."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the model folder that is there.")
    ] = False,
) -> None:
    """Make a model folder from an artifact. The exit code is 0 if the model loads and runs."""
    if not model_file.exists():
        raise InstallError(f"{model_file} is not there; expected the model's file or folder.")
    if example is not None and not example.is_file():
        raise InstallError(f"--example is {example}; expected a file of safetensors.")
    if example is not None and inputs:
        raise InstallError("--input and --example both say what the inputs are; give one of them.")
    wished = [_input(text) for text in inputs or ()]
    name = name or _own_name(model_file)
    origin = _origin(name, model_file.absolute(), example)
    if not _NAME.fullmatch(name):
        raise InstallError(f"--name is '{name}'; expected letters, digits, _, -, . and blanks.")
    place = repository or Path("models" if model_file.is_dir() else "")
    target = place.absolute() / name
    _refuse_target(target, [*origin.files.values()] if link else [], force=force)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Made complete beside its place: a server that watches the repository sees it whole.
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as scratch:
            made = _make(Path(scratch) / name, origin, wished, link=link)
            if os.path.lexists(target):
                target.rename(Path(scratch) / "replaced")
            (Path(scratch) / name).rename(target)
    except OSError as error:
        raise InstallError(f"cannot make {target}: {error}") from error
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    console.print(f"made {target}")
    for line in made.lines:
        console.print(f"  {line}")
    for line in _next(made, _again(model_file, place, name, inputs or (), example), place / name):
        console.print(line)
    if not made.loads:
        raise typer.Exit(1)


def _own_name(path: Path) -> str:
    return path.absolute().name if path.is_dir() else path.absolute().stem


def _input(text: str) -> dict[str, Any]:
    """An input as config.pbtxt has it, of NAME:TYPE:DIMS."""
    match = _INPUT.fullmatch(text)
    kind = match["type"].upper() if match else ""
    known = {one.config.removeprefix("TYPE_"): one for one in dtypes.TABLE}
    known |= {one.triton: one for one in dtypes.TABLE}
    if match is None or kind not in known:
        raise InstallError(
            f"--input is '{text}'; expected NAME:TYPE:DIMS such as x:FP32:3x224x224, with one of"
            f" the types {', '.join(one.triton for one in dtypes.TABLE)}."
        )
    dims = [int(size) for size in match["dims"].split("x")] if match["dims"] else []
    entry = {"name": match["name"], "data_type": known[kind].config, "dims": dims}
    # One value a row: Triton wants a dimension, which the model does not see.
    return entry if dims else entry | {"dims": [1], "reshape": {"shape": []}}


def _refuse_target(target: Path, linked: Sequence[Path], *, force: bool) -> None:
    """Leave alone what lies where the model folder goes, unless it may be replaced."""
    if not os.path.lexists(target):
        return
    if not force:
        raise InstallError(
            f"{target} exists already; choose another --name, or replace it with --force."
        )
    folder = not target.is_symlink() and (target / "config.pbtxt").is_file()
    if not folder or repository.versions(target) not in ([], ["1"]):
        raise InstallError(
            f"{target} is not a model folder with the version 1 alone, and --force replaces no"
            " other; choose another --name."
        )
    if any(path.is_relative_to(target.resolve()) for path in linked):
        raise InstallError(f"--link would link to files in {target}, which --force replaces.")


# --- what is served --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a model folder is made of.

    Attributes:
        kind: what it is, in words.
        title: what it is called there.
        files: what goes into the version folder, by the names that it has there; the model first.
        parameters: the options that it needs.
        pretrained: the contents of a config.json of transformers; empty for other artifacts.
    """

    kind: str
    title: str
    files: Mapping[str, Path]
    parameters: Mapping[str, str] = field(default_factory=dict)
    pretrained: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lacks_weights(self) -> bool:
        """Whether it is a source, and no file of weights goes with it."""
        return self.kind == _SOURCE and not any(
            name.startswith("model.") and name != "model.py" for name in self.files
        )


def _origin(model: str, path: Path, example: Path | None) -> _Origin:
    beside = example or path.parent / _EXAMPLE
    extra = {_EXAMPLE: beside.absolute()} if beside.is_file() else {}
    if path.is_dir():
        return _pretrained(model, path, {} if example is None else extra)
    if path.suffix == ".py":
        return _Origin(_SOURCE, path.name, source_dependencies.of_source(model, path) | extra)
    found = file_types.describe(path)
    source = path.with_suffix(".py")
    if found in _WEIGHTS and source.is_file():
        files = source_dependencies.of_source(model, source, path)
        return _Origin(_SOURCE, source.name, files | extra)
    if found not in _SERVED:
        cure = file_types.cure(found, path)
        if found in _WEIGHTS:
            cure = (
                f"Write {source.name} beside it, with the class that it belongs to, and run this"
                " command again with --input NAME:TYPE:DIMS, such as --input x:FP32:3x224x224."
            )
        raise ArtifactError(
            model,
            f"{path.name} is {found.value}",
            expected="TorchScript, a torch.export program, an AOTInductor package or Python source",
            cure=cure,
        )
    return _Origin(found.value, path.name, {_SERVED[found]: path} | extra)


def _pretrained(model: str, folder: Path, extra: Mapping[str, Path]) -> _Origin:
    """What `save_pretrained` of transformers wrote: weights, and a config.json with their class."""
    try:
        settings = json.loads((folder / "config.json").read_bytes())
        (architecture, *_) = settings.get("architectures") or ["AutoModel"]
        # A path of attributes would lead out of the package: `transformers:os.system`.
        if not str(architecture).isidentifier():
            raise ValueError(architecture)
    except (OSError, ValueError, AttributeError, TypeError):
        raise ArtifactError(
            model,
            f"{folder} is a folder without a config.json of transformers",
            expected="a model's file, or a folder that save_pretrained wrote",
        ) from None
    files = {
        path.name: path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix not in _FOREIGN and not path.name.startswith(".")
    }
    if any(name.endswith(".safetensors") for name in files):
        files = {name: path for name, path in files.items() if not name.endswith(".bin")}
    return _Origin(
        f"a Hugging Face folder of {architecture}",
        folder.name,
        {**files, **extra},
        {"MODEL_FACTORY": f"transformers:{architecture}"},
        settings,
    )


def _pretrained_inputs(
    settings: Mapping[str, Any], arguments: Sequence[str]
) -> list[dict[str, Any]]:
    """The inputs of a model of transformers: tokens or an image; none where it takes others."""
    if "input_ids" in arguments:
        optional = ["attention_mask"]
        if settings.get("type_vocab_size", 0) > 1:
            optional.append("token_type_ids")
        needed = ["input_ids"]
        if settings.get("is_encoder_decoder"):
            needed.append("decoder_input_ids")
        return [
            {"name": name, "data_type": "TYPE_INT64", "dims": [-1]}
            | ({"optional": True} if name in optional else {})
            for name in (*needed, *optional)
            if name in arguments
        ]
    size = settings.get("image_size")
    if "pixel_values" in arguments and isinstance(size, int):
        dims = [settings.get("num_channels", 3), size, size]
        return [{"name": "pixel_values", "data_type": "TYPE_FP32", "dims": dims}]
    return []


# --- the folder ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Made:
    """What a folder became.

    Attributes:
        lines: what there is to say of it.
        loads: whether the model loads and runs.
        missing: what `--input` could say; empty where the inputs are known, or nothing names them.
        weights: the file that its weights are expected in; empty where it is not they that lack.
    """

    lines: Sequence[str]
    loads: bool = False
    missing: Sequence[Mapping[str, Any]] = ()
    weights: str = ""


def _make(
    folder: Path, origin: _Origin, wished: Sequence[Mapping[str, Any]], *, link: bool
) -> _Made:
    version = folder / "1"
    version.mkdir(parents=True)
    for served, source in origin.files.items():
        place = version / served
        place.parent.mkdir(parents=True, exist_ok=True)
        if link:
            place.symlink_to(source)
        else:
            shutil.copyfile(source, place)
    document = pbtxt.read(folder)
    document["input"] = list(wished)
    document["parameters"] = {
        key: {"string_value": value} for key, value in origin.parameters.items()
    }
    signature: Mapping[str, Any] = {}
    if origin.pretrained:
        with contextlib.suppress(LoadError):  # `_complete` says it again
            signature = _signature(folder, document)
        arguments = signature.get("arguments", ())
        if "past_key_values" in arguments:  # an object of its own, which is no output
            document["parameters"]["MODEL_KWARGS"] = {"string_value": '{"use_cache": false}'}
        if not wished and _EXAMPLE not in origin.files:
            document["input"] = _pretrained_inputs(origin.pretrained, arguments)
    others = list(origin.files)[1:]
    lines = [f"{origin.title} is {origin.kind}"]
    lines += [f"with {shown(others)}"] if others and not origin.pretrained else []
    asked = _weightless(document) if origin.lacks_weights else document
    try:
        _complete(folder, document, asked)
    except BackendError as error:
        made, signature = _incomplete(folder, origin, document, error)
    else:
        made = _Made([_told("inputs", document), _told("outputs", document), _batch(document)])
    config = "\n".join(_config(folder.name, origin, document, signature)) + "\n"
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    if not completion.needed(document):
        made = _checked(folder, origin, made)
    return dataclasses.replace(made, lines=[*lines, *made.lines])


def _incomplete(
    folder: Path, origin: _Origin, document: Mapping[str, Any], error: BackendError
) -> tuple[_Made, Mapping[str, Any]]:
    """What is missing in a config that the model could not complete; and what the model takes."""
    problem, weights = "", ""
    try:
        signature = _signature(folder, document)
    except LoadError as refusal:
        problem, signature = str(refusal), {}
        weights = _missing_weights(origin, refusal)
        if weights:
            with contextlib.suppress(LoadError):
                signature = _signature(folder, _weightless(document))
    if not signature:
        return _Made([f"does not load: {problem}"]), signature
    missing = signature["inputs"] if _tells_nothing(folder, document) else []
    names = shown(one["name"] for one in missing)
    reason = f"nothing tells the types and sizes of {names}" if missing else str(error)
    lines = [f"takes    {signature['signature']}", f"not complete: {reason}"]
    lines += [f"does not load: {problem}"] if problem else []
    return _Made(lines, missing=missing, weights=weights), signature


def _tells_nothing(folder: Path, document: Mapping[str, Any]) -> bool:
    """Whether neither the config nor an example says what the inputs are."""
    if document["input"] or (folder / "1" / _EXAMPLE).exists():
        return False
    source = folder / "1" / "model.py"
    return not source.is_file() or b"def example_inputs" not in source.read_bytes()


def _signature(folder: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    """What the model's function takes.

    Raises:
        LoadError: the model does not load.
    """
    found: dict[str, Any] = child_process.run(
        folder.name,
        "torch_py_backend.autocomplete.schema:takes",
        {"arguments": pbtxt.arguments(folder, "1", document)},
        _TIMEOUT_S,
    )
    return found


def _weightless(document: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a model whose weights do not matter: for its names and shapes."""
    parameters = {**document["parameters"], "WEIGHTS": {"string_value": "none"}}
    return {**document, "parameters": parameters}


def _complete(folder: Path, document: dict[str, Any], asked: dict[str, Any]) -> None:
    """Fill in what the model tells.

    Where the inputs are known, a batch dimension is tried first: does the model take several rows,
    and return as many?

    Args:
        folder: the model's folder.
        document: its config, which is filled in.
        asked: the config that the model is asked with.
    """

    def describe(rows: int) -> dict[str, Any]:
        given = {**asked, "max_batch_size": rows}
        return completion.describe(pbtxt.arguments(folder, "1", given), given)

    if not document["input"]:
        completion.fill(folder.name, document, describe(0))
        return
    rows, refusal = _BATCH_SIZE, None
    try:
        schema = describe(rows)
    except BackendError as error:
        schema, refusal = {"max_batch_size": 0}, error
    if not schema["max_batch_size"]:
        rows = 0
        try:
            schema = describe(rows)
        except BackendError as error:
            raise refusal or error from None
    document["max_batch_size"] = min(rows, schema["max_batch_size"]) if rows else 0
    completion.fill(folder.name, document, schema)


def _checked(folder: Path, origin: _Origin, made: _Made) -> _Made:
    """Whether the folder that was made can be served, and what there is to say of that."""
    given = pbtxt.arguments(folder, "1", pbtxt.read(folder))
    try:
        report: dict[str, Any] = child_process.run(
            folder.name,
            "torch_py_backend.tools.inspection:inspect",
            {"arguments": given},
            _TIMEOUT_S,
        )
    except LoadError as error:
        lines = [*made.lines, f"does not load: {error}"]
        return _Made(lines, weights=_missing_weights(origin, error))
    notes = [f"note     {sentence}" for sentence in report["warnings"]]
    return _Made([*made.lines, *notes, "loads and runs"], loads=True)


def _told(role: str, document: Mapping[str, Any]) -> str:
    """The tensors as `check` prints them."""
    texts = []
    for entry in document[role.removesuffix("s")]:
        kind = dtypes.from_config(entry["data_type"])
        dims = ", ".join(map(str, entry.get("reshape", {"shape": entry["dims"]})["shape"]))
        texts.append(f"{entry['name']} {kind.triton if kind else ''} [{dims}]")
    return f"{role:9}{', '.join(texts)}"


_INPUTS_ON_GPU = 'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }'


def _batch(document: Mapping[str, Any]) -> str:
    rows = document["max_batch_size"]
    return f"batch    at most {rows}" if rows else "batch    none; each request is one call"


def _missing_weights(origin: _Origin, refusal: LoadError) -> str:
    """The file that a source's weights are expected in; empty where it is not they that lack."""
    lacks = origin.lacks_weights and _NO_WEIGHTS in str(refusal)
    return Path(origin.title).with_suffix(".pt").name if lacks else ""


# --- what to do next -------------------------------------------------------------------------


def _again(
    model_file: Path, place: Path, name: str, inputs: Sequence[str], example: Path | None
) -> list[str]:
    """The command that makes the folder anew."""
    words = ["torch-py-backend", "init", str(model_file), "--force"]
    words += ["--name", name] if name != _own_name(model_file) else []
    words += ["--repository", str(place)] if place != Path() else []
    words += [word for text in inputs for word in ("--input", text)]
    return [*words, "--example", str(example)] if example is not None else words


def _next(made: _Made, again: Sequence[str], folder: Path) -> Iterator[str]:
    """What to do now, as commands."""
    if made.loads:
        yield f"next: {shlex.join(['torch-py-backend', 'serve', str(folder.parent)])}"
        return
    if made.weights:
        source = Path(again[2])
        file = source.with_name(made.weights)
        yield f"next: save the weights as {file}: torch.save(module.state_dict(), {str(file)!r})"
    elif not made.missing:
        yield "next: correct that"
    words = [*again, *(word for one in made.missing for word in ("--input", _wish(one)))]
    first = "next:" if made.missing and not made.weights else "then:"
    yield f"{first} {shlex.join(words)}"
    if made.missing:
        yield "      (types and sizes are examples; without the batch dimension; or --example FILE)"
    check = shlex.join(["torch-py-backend", "check", str(folder)])
    yield f"or:   edit {folder / 'config.pbtxt'}, then {check}"


def _wish(argument: Mapping[str, Any]) -> str:
    if "data_type" not in argument:
        return f"{argument['name']}:FP32:3x224x224"
    dims = [] if "reshape" in argument else argument["dims"]
    kind = argument["data_type"].removeprefix("TYPE_")
    return f"{argument['name']}:{kind}:{'x'.join(map(str, dims))}"


# --- config.pbtxt ----------------------------------------------------------------------------


def _config(
    name: str, origin: _Origin, document: Mapping[str, Any], signature: Mapping[str, Any]
) -> Iterator[str]:
    """A config.pbtxt for reading: every field with a word on what it is for."""
    yield f"# {name}: {origin.kind}, served by PyTorch."
    yield 'backend: "pytorch_py"'
    yield ""
    told = not completion.needed(document)
    if told or document["input"]:
        yield "# Rows in one call of the model at most; 0: requests are never put together."
        yield f"max_batch_size: {document['max_batch_size']}"
    else:
        yield "# Rows in one call of the model at most. If you write inputs below, write this, too;"
        yield "# 0: the model has no batch dimension. Without inputs, an example tells it."
        yield f"# max_batch_size: {_BATCH_SIZE}"
    if document.get("model_transaction_policy", {}).get("decoupled"):
        yield "# A request has any number of responses, as the model yields them."
        yield "model_transaction_policy { decoupled: true }"
    elif document["max_batch_size"] > 0:
        yield "# Requests that wait at the same time become one call."
        yield "dynamic_batching { }"
    yield ""
    yield from _tensors("input", document, signature)
    yield ""
    yield from _tensors("output", document, {})
    yield ""
    yield "# Copies of the model, each in a process of its own. KIND_GPU: one on every GPU."
    on_gpu = file_types.built_for_gpu(next(iter(origin.files.values())))
    yield f"instance_group [{{ kind: KIND_{'GPU' if on_gpu else 'CPU'} count: 1 }}]"
    yield "# With KIND_GPU, this leaves inputs that are on the GPU already there:"
    yield f"{'' if on_gpu else '# '}{_INPUTS_ON_GPU}"
    for key, entry in document["parameters"].items():
        value = json.dumps(entry["string_value"])
        yield f"parameters {{ key: {json.dumps(key)} value {{ string_value: {value} }} }}"


def _dims(sizes: Sequence[int]) -> str:
    return f"[ {', '.join(map(str, sizes))} ]" if sizes else "[ ]"


def _reshape(entry: Mapping[str, Any]) -> str:
    if "reshape" not in entry:
        return ""
    return f" reshape {{ shape: {_dims(entry['reshape']['shape'])} }}"


def _tensors(role: str, document: Mapping[str, Any], signature: Mapping[str, Any]) -> Iterator[str]:
    entries = document[role]
    if not entries:
        if signature:
            yield f"# {signature['signature']}"
        for one in signature.get("inputs") or [{"name": "…"}]:
            kind = one.get("data_type", "TYPE_FP32")
            dims = _dims(one["dims"]) if "dims" in one else "[ … ]"
            name = json.dumps(one["name"], ensure_ascii=False)
            yield f"# {role} [{{ name: {name} data_type: {kind} dims: {dims}{_reshape(one)} }}]"
        return
    yield {
        "input": "# What a client sends; dims without the batch dimension, -1 is any size.",
        "output": "# What it gets back.",
    }[role]
    yield f"{role} ["
    yield ",\n".join(
        f"  {{ name: {json.dumps(entry['name'])} data_type: {entry['data_type']}"
        f" dims: {_dims(entry['dims'])}{_reshape(entry)}"
        f"{' optional: true' if entry.get('optional') else ''} }}"
        for entry in entries
    )
    yield "]"
