"""Options and hooks of earlier versions, and what replaces each: one table.

`scripts/check_pages.py` refuses pages and examples that mention one of them.
"""

from __future__ import annotations

from collections.abc import Mapping

_BLOCKS = "Declare the states in config.pbtxt: sequence_batching { state { … } }."
HOOKS_FILE = "Move the class to hooks.py beside the model and name it Hooks."
FREEZING = (
    'Set TORCH_COMPILE_OPTIONAL_PARAMETERS to {"options": {"freezing": true}}; `tune` tries it.'
)

OPTIONS: Mapping[str, str] = {
    "AUTO_COMPLETE_TIMEOUT_S": "Write inputs and outputs to config.pbtxt if completion is slow.",
    "CAST_OUTPUTS": "CAST_INPUTS also converts outputs back to the types of config.pbtxt.",
    "CHECK_OUTPUTS": "Write the dims that the model returns to config.pbtxt.",
    "COMPILE_REQUIRED": "A failing compiler now always fails the load; remove the option.",
    "DEVICE_MAP": (
        "Use KIND_MODEL and place the module in model.py, for example with accelerate, or set"
        " device_map in MODEL_KWARGS for a Hugging Face model."
    ),
    "FALLBACK": "Compile the package on the machine that serves it, or serve the module itself.",
    "HOOKS": HOOKS_FILE,
    "ON_FATAL": "An instance without its device stays and answers 503; remove the option.",
    "PARALLEL_LOADS": "Instances take turns where memory or a compiler requires it; remove it.",
    "PREPROCESS_THREADS": "Use a thread pool in preprocess_batch() of hooks.py.",
    "PROFILE_BATCHES": "Set PROFILE_DIR alone; the schedule is fixed.",
    "SEQUENCE_MEMORY_MB": "Set max_candidate_sequences in sequence_batching.",
    "STATE": _BLOCKS,
    "TRACING": "The context of a request that Triton traces is always current; remove the option.",
    "WATCH_WEIGHTS": "Add a new version folder: Triton switches to it without a gap.",
}

# LibTorch's options that a repository may set, and why they have no effect.
IGNORED_OPTIONS: Mapping[str, str] = {"ENABLE_NVFUSER": "PyTorch no longer has nvFuser"}

HOOKS: Mapping[str, str] = {
    "forward": "Call the module in forward() of a module in model.py.",
    "inference": "Call the module in forward() of a module in model.py.",
}
