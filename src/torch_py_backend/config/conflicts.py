"""Settings of config.pbtxt that are refused: a table of rules."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from torch_py_backend.config.pbtxt import Document
from torch_py_backend.errors import ConfigError

if TYPE_CHECKING:
    from torch_py_backend.config.model_config import ModelConfig

# What to do about settings on which the answer to a request depends.
CACHE_CURE = (
    "Triton's cache compares input tensors alone, and would send the answer to another request:"
    " remove one of the two."
)
# Whether a config has a combination of settings that is refused; the combination, as a clause; and
# what to do, as a sentence.
Rule: TypeAlias = tuple[bool, str, str]


def check(config: ModelConfig, *, complete: bool = True) -> None:
    """Raise for the first rule that applies.

    Before the config is completed, only rules apply that decide how the model is run for that.

    Raises:
        ConfigError: two settings conflict.
    """
    rules = _rules_before_completion(config)
    for applies, problem, cure in (*rules, *_rules(config)) if complete else rules:
        if applies:
            raise ConfigError(problem, cure=cure)


def refuse(*rules: tuple[bool, str, str]) -> None:
    """Raise for the first rule that applies: whether it does, what was found, what was expected.

    Raises:
        ConfigError: a rule applies.
    """
    for applies, found, expected in rules:
        if applies:
            raise ConfigError(found, expected=expected)


def check_for_triton(document: Document) -> None:
    """Raise for sizes that Triton refuses, before or after it completes the config.

    Raises:
        ConfigError: the server would not load the model.
    """
    rows = document["max_batch_size"]
    refuse((rows < 0, f"max_batch_size is {rows}", "the largest number of rows, or 0"))
    for role in ("input", "output"):
        for entry in document[role]:
            is_wrong = any(size < 1 and size != -1 for size in entry["dims"])
            found = f"{role} '{entry['name']}' has dims {entry['dims']}"
            refuse((is_wrong, found, "sizes of at least 1, or -1 for any size"))


def _rules_before_completion(config: ModelConfig) -> tuple[Rule, ...]:
    options = config.options
    sequences = config.sequencing is not None
    return (
        (
            config.decoupled and sequences,
            "sequence_batching is set, and the model is decoupled",
            "A stream keeps its own state between responses: remove one from config.pbtxt.",
        ),
        (
            options.model_class is not None and options.model_factory is not None,
            "MODEL_CLASS and MODEL_FACTORY both name what is to be served",
            "They exclude each other; keep one.",
        ),
    )


def _rules(config: ModelConfig) -> tuple[Rule, ...]:
    options = config.options
    compiled = options.compilation is not None
    largest_bucket = max(options.batch_buckets or (0,))
    gpu_sharing = bool(options.enable_weight_sharing) and config.kind != "CPU"
    reduced = [name for name in options.optimize if name in ("bf16", "fp16")]
    states = {state.output for state in config.states}
    ragged = "batch_input" if config.batch_inputs else "batch_output"
    of_batches = {
        "PAD is set": bool(options.pad),
        "BATCH_BUCKETS is set": bool(options.batch_buckets),
    }
    excluded_by_streams = of_batches | {
        "TORCH_COMPILE_OPTIONAL_PARAMETERS is set": compiled,
        "OPTIMIZE asks for freeze": "freeze" in options.optimize,
        "ENABLE_WEIGHT_SHARING shares the weights on the GPU": gpu_sharing,
    }
    excluded_by_ragged_batches = {
        "PAD": bool(options.pad),
        "BATCH_BUCKETS": bool(options.batch_buckets),
        "TORCH_COMPILE_OPTIONAL_PARAMETERS with dynamic: false": options.static_shapes,
        "model_transaction_policy { decoupled: true }": config.decoupled,
        "a state that batch_output names": any(out.name in states for out in config.batch_outputs),
    }
    return (
        (
            bool(options.pad) and any(-1 in state.dims for state in config.states),
            "PAD is set, and a state of sequence_batching has dims of -1",
            "Padding in a state cannot be recognized: give it fixed dims, or remove PAD.",
        ),
        (
            len(reduced) > 1,
            f"OPTIMIZE asks for {' and '.join(reduced)}",
            "They exclude each other; keep one.",
        ),
        (
            options.weights_dtype is not None and options.cast_inputs is not None,
            f"CAST_INPUTS is set, and OPTIMIZE asks for {''.join(reduced)}",
            "That converts inputs, too: remove CAST_INPUTS.",
        ),
        *(
            (
                is_set and config.max_batch_size == 0,
                f"{setting}, and max_batch_size is 0",
                "It applies to batches: set max_batch_size, or remove it.",
            )
            for setting, is_set in of_batches.items()
        ),
        (
            largest_bucket > config.max_batch_size,
            f"BATCH_BUCKETS holds {largest_bucket}, and max_batch_size is {config.max_batch_size}",
            "Raise max_batch_size, or remove the bucket.",
        ),
        (
            options.profile_dir is not None and not Path(options.profile_dir).is_absolute(),
            f"PROFILE_DIR is '{options.profile_dir}'",
            "Give an absolute path: Triton chooses the working directory of an instance.",
        ),
        *(
            (
                is_set and config.decoupled,
                f"{setting}, and the model is decoupled",
                "Each request is a stream, with the model's code between its responses: remove it.",
            )
            for setting, is_set in excluded_by_streams.items()
        ),
        *(
            (
                is_set and config.concatenates,
                f"config.pbtxt has {ragged} and {setting}",
                f"Remove one of the two: sizes differ from batch to batch with {ragged}.",
            )
            for setting, is_set in excluded_by_ragged_batches.items()
        ),
        (
            config.response_cache and config.sequencing is not None,
            "response_cache is enabled, and sequence_batching is set",
            CACHE_CURE,
        ),
    )
