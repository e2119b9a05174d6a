"""Settings of config.pbtxt that are refused: a table of pairs."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from torch_py_backend.config.pbtxt import Document
from torch_py_backend.errors import ConfigError

if TYPE_CHECKING:
    from torch_py_backend.config.model_config import ModelConfig

_OF_BATCHES = ("PAD is set", "BATCH_BUCKETS is set")
_STATIC = "TORCH_COMPILE_OPTIONAL_PARAMETERS has dynamic: false"
_STREAMS = "the model is decoupled"
# Settings each of which excludes each of the second ones, and what to do.
_EXCLUSIONS = (
    (
        ("sequence_batching is set",),
        (_STREAMS,),
        "A stream keeps its own state between responses: remove one from config.pbtxt.",
    ),
    (("MODEL_CLASS is set",), ("MODEL_FACTORY is set",), "Both name what is served; keep one."),
    (
        ("PAD is set",),
        ("a state of sequence_batching has dims of -1",),
        "Padding in a state cannot be recognized: give it fixed dims, or remove PAD.",
    ),
    (
        _OF_BATCHES,
        ("max_batch_size is 0",),
        "It applies to batches: set max_batch_size, or remove it.",
    ),
    (
        (
            *_OF_BATCHES,
            "TORCH_COMPILE_OPTIONAL_PARAMETERS is set",
            "OPTIMIZE asks for freeze",
            "ENABLE_WEIGHT_SHARING shares the weights on the GPU",
        ),
        (_STREAMS,),
        "Each request is a stream, with the model's code between its responses: remove it.",
    ),
    (
        (*_OF_BATCHES, _STATIC, _STREAMS),
        ("config.pbtxt has batch_input", "config.pbtxt has batch_output"),
        "Remove one of the two: sizes differ from batch to batch.",
    ),
)


def _settings(config: ModelConfig) -> dict[str, bool]:
    """Return whether a config has each setting of the pairs."""
    options = config.options
    return {
        "PAD is set": bool(options.pad),
        "BATCH_BUCKETS is set": bool(options.batch_buckets),
        "MODEL_CLASS is set": options.model_class is not None,
        "MODEL_FACTORY is set": options.model_factory is not None,
        "OPTIMIZE asks for freeze": "freeze" in options.optimize,
        "TORCH_COMPILE_OPTIONAL_PARAMETERS is set": options.compilation is not None,
        _STATIC: options.static_shapes,
        "ENABLE_WEIGHT_SHARING shares the weights on the GPU": bool(options.enable_weight_sharing)
        and config.kind != "CPU",
        "max_batch_size is 0": config.max_batch_size == 0,
        _STREAMS: config.decoupled,
        "sequence_batching is set": config.sequencing is not None,
        "a state of sequence_batching has dims of -1": any(
            -1 in state.dims for state in config.states
        ),
        "config.pbtxt has batch_input": bool(config.batch_inputs),
        "config.pbtxt has batch_output": bool(config.batch_outputs),
    }


def check(config: ModelConfig) -> None:
    """Raise ConfigError for the first pair of settings that a config has."""
    settings = _settings(config)
    for first, second, cure in _EXCLUSIONS:
        for pair in product(first, second):
            if all(map(settings.get, pair)):
                raise ConfigError(", and ".join(pair), cure=cure)


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
