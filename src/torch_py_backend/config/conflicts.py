"""Settings of config.pbtxt that are refused: a table of pairs."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from torch_py_backend.config.pbtxt import Document
from torch_py_backend.errors import ConfigError

if TYPE_CHECKING:
    from torch_py_backend.config.model_config import ModelConfig


def check(config: ModelConfig) -> None:
    """Raise ConfigError for the first pair of settings that a config has, of those that conflict.

    A setting is one key of a dict, with whether the config has it.
    """
    options = config.options
    no_batches = {"max_batch_size is 0": config.max_batch_size == 0}
    streams = {"the model is decoupled": config.decoupled}
    sequences = {"sequence_batching is set": config.sequencing is not None}
    free_states = {
        "a state of sequence_batching has dims of -1": any(
            -1 in state.dims for state in config.states
        )
    }
    pad = {"PAD is set": bool(options.pad)}
    of_batches = pad | {"BATCH_BUCKETS is set": bool(options.batch_buckets)}
    static = {"TORCH_COMPILE_OPTIONAL_PARAMETERS has dynamic: false": options.static_shapes}
    aoti = {"OPTIMIZE asks for aoti": "aoti" in options.optimize}
    not_packaged = {
        "TORCH_COMPILE_OPTIONAL_PARAMETERS is set": options.compilation is not None,
        "ENABLE_WEIGHT_SHARING shares the weights on the GPU": bool(options.enable_weight_sharing)
        and config.kind != "CPU",
    }
    of_calls = {
        **not_packaged,
        **aoti,
        "OPTIMIZE asks for freeze": "freeze" in options.optimize,
        "PROFILE_DIR is set": options.profile_dir is not None,
    }
    concatenated = {
        "config.pbtxt has batch_input": bool(config.batch_inputs),
        "config.pbtxt has batch_output": bool(config.batch_outputs),
    }
    # Settings each of which excludes each of the second ones, and what to do.
    exclusions = (
        (
            sequences,
            streams,
            "A stream keeps its own state between responses: remove one from config.pbtxt.",
        ),
        (
            {"MODEL_CLASS is set": options.model_class is not None},
            {"MODEL_FACTORY is set": options.model_factory is not None},
            "Both name what is served; keep one.",
        ),
        (
            pad,
            free_states,
            "Padding in a state cannot be recognized: give it fixed dims, or remove PAD.",
        ),
        (
            of_batches,
            no_batches,
            "It applies to batches: set max_batch_size, or remove it.",
        ),
        (
            aoti,
            not_packaged | {"instance_group has KIND_MODEL": config.kind == "MODEL"},
            "The whole module is compiled for one device; remove one of the two.",
        ),
        (
            of_batches | of_calls,
            streams,
            "Each request is a stream, with the model's code between its responses: remove it.",
        ),
        (
            of_batches | static | streams,
            concatenated,
            "Remove one of the two: sizes differ from batch to batch.",
        ),
    )
    for first, second, cure in exclusions:
        for (one, has_one), (other, has_other) in product(first.items(), second.items()):
            if has_one and has_other:
                raise ConfigError(f"{one}, and {other}", cure=cure)


def check_for_triton(document: Document) -> None:
    """Raise ConfigError for sizes that Triton refuses, before or after it completes the config."""
    rows = document["max_batch_size"]
    if rows < 0:
        raise ConfigError(f"max_batch_size is {rows}", expected="the largest number of rows, or 0")
    for role in ("input", "output"):
        for entry in document[role]:
            dims = entry["dims"]
            if not dims or any(size < 1 and size != -1 for size in dims):
                raise ConfigError(
                    f"{role} '{entry['name']}' has dims {dims}",
                    expected="sizes of at least 1, or -1 for any size",
                )
