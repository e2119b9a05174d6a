"""Settings of config.pbtxt that are refused: a table of pairs."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from torch_py_backend.errors import ConfigError

if TYPE_CHECKING:
    from torch_py_backend.config.model_config import ModelConfig

# Settings, others each of which excludes each of the first ones, and what to do.
_EXCLUSIONS = (
    ("sequences", "streams", "A stream keeps its own state between responses: remove one."),
    ("class", "factory", "Both name what is served; keep one."),
    ("bf16", "fp16", "Weights have one type; keep one."),
    ("pad", "states", "Padding in a state cannot be recognized: give it fixed dims."),
    ("pad buckets", "unbatched", "It applies to batches: set max_batch_size, or remove it."),
    ("aoti", "compiled shared placed", "The whole module is compiled for one device; remove one."),
    (
        "pad buckets compiled shared aoti freeze profile",
        "streams",
        "Each request is a stream, with the model's code between its responses: remove it.",
    ),
    ("pad buckets static streams", "ragged", "Sizes differ from batch to batch; remove one."),
    ("hooks", "pad sequences streams ragged", "Hooks are for independent requests; remove one."),
)


def check(config: ModelConfig) -> None:
    """Raise ConfigError for the first two settings of a config that exclude each other."""
    options = config.options
    shared = options.enable_weight_sharing and config.kind != "CPU"
    settings = {
        "sequences": ("sequence_batching is set", config.sequencing),
        "streams": ("the model is decoupled", config.decoupled),
        "class": ("MODEL_CLASS is set", options.model_class),
        "factory": ("MODEL_FACTORY is set", options.model_factory),
        "pad": ("PAD is set", options.pad),
        "buckets": ("BATCH_BUCKETS is set", options.batch_buckets),
        "unbatched": ("max_batch_size is 0", config.max_batch_size == 0),
        "states": (
            "a state of sequence_batching has dims of -1",
            any(-1 in state.dims for state in config.states),
        ),
        "compiled": (
            "TORCH_COMPILE_OPTIONAL_PARAMETERS is set",
            options.compilation is not None,
        ),
        "static": (
            "TORCH_COMPILE_OPTIONAL_PARAMETERS has dynamic: false",
            options.static_shapes,
        ),
        "shared": ("ENABLE_WEIGHT_SHARING shares the weights on the GPU", shared),
        "placed": ("instance_group has KIND_MODEL", config.kind == "MODEL"),
        "profile": ("PROFILE_DIR is set", options.profile_dir),
        "ragged": ("config.pbtxt has batch_input or batch_output", config.concatenates),
        "hooks": (
            "hooks.py is beside the model",
            (config.version_folder / "hooks.py").is_file(),
        ),
    }
    settings |= {name: (f"OPTIMIZE asks for {name}", True) for name in options.optimize}
    present = {name: text for name, (text, is_set) in settings.items() if is_set}
    for first, second, cure in _EXCLUSIONS:
        for one, other in product(first.split(), second.split()):
            if one in present and other in present:
                raise ConfigError(f"{present[one]}, and {present[other]}", cure=cure)
