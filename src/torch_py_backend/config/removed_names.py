"""Names of earlier versions, and what replaces each: one table.

`scripts/check_pages.py` refuses pages and examples that mention one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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

OPTIMIZE: Mapping[str, str] = {
    "auto": "`torch-py-backend tune` prints the options to set.",
    "bf16_weights": "Use bf16, which converts the weights at load.",
    "cuda_graphs": 'Set TORCH_COMPILE_OPTIONAL_PARAMETERS to {"mode": "reduce-overhead"}.',
    "fp16_weights": "Use fp16, which converts the weights at load.",
    "fp8_weights": "Quantize the module with torchao in model.py.",
    "int8_weights": "Quantize the module with torchao in model.py.",
}

HOOKS: Mapping[str, str] = {
    "forward": "Call the module in forward() of a module in model.py.",
    "inference": "Call the module in forward() of a module in model.py.",
}

FORMATS: Mapping[str, str] = {
    "torchscript": 'Use format="export", or torch.jit.save and `torch-py-backend init`.',
}

COMMANDS: Mapping[str, str] = {
    "bench": "Use perf_analyzer of the package perf-analyzer 2.58 or newer, or of Triton's SDK.",
    "export-compiled": "Copy the folder compile_cache of the model to the other machine.",
    "import-compiled": "Copy the folder compile_cache of the model from the other machine.",
    "import-mar": "Use `torch-py-backend init model.mar`.",
    "pack": "Use conda-pack, or `pip install --target` for a few packages.",
    "profile": "Set PROFILE_DIR in config.pbtxt.",
}

FLAGS: Mapping[str, str] = {
    "--cache-size": "Remove it: `serve URL` fetches the repository once, at its start.",
    "--inputs": "Put the inputs beside the model as example_inputs.safetensors.",
    "--link": "Remove it: `init` copies the files.",
    "--max-error": "Remove it: the table has each candidate's error.",
    "--poll": "Remove it: synchronize a folder and pass --reload.",
    "--upload-compiled": "Remove it: copy the folder compile_cache of the model.",
}


def advice_for_value(key: str, text: str) -> str:
    """Return the sentence for the first removed value of an option; empty: none."""
    words = [word.strip().lower() for word in text.split(",")] if key == "OPTIMIZE" else []
    return next((f"{word} was removed. {OPTIMIZE[word]}" for word in words if word in OPTIMIZE), "")


def advice_for_command(arguments: Sequence[str]) -> str:
    """Return the sentence for the first removed command or flag of a command line; empty: none."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if own and own[0] in COMMANDS:
        return f"the command {own[0]} was removed. {COMMANDS[own[0]]}"
    flags = [argument.partition("=")[0] for argument in own]
    return next(
        (f"the flag {flag} was removed. {FLAGS[flag]}" for flag in flags if flag in FLAGS), ""
    )
