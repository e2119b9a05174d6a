"""Names of earlier versions, and what replaces each: one table.

`scripts/check_pages.py` refuses pages and examples that mention one of them.
"""

from __future__ import annotations

from collections.abc import Iterable

NAMES = {
    "parameter": {
        "AUTO_COMPLETE_TIMEOUT_S": "Write inputs and outputs to config.pbtxt.",
        "CAST_OUTPUTS": "CAST_INPUTS also converts outputs back to the types of config.pbtxt.",
        "CHECK_OUTPUTS": "Write the dims that the model returns to config.pbtxt.",
        "COMPILE_REQUIRED": "A failing compiler now always fails the load; remove the option.",
        "DEVICE_MAP": "Use KIND_MODEL and place the module in model.py, or in MODEL_KWARGS.",
        "FALLBACK": "Compile the package on the machine that serves it, or serve the module.",
        "HOOKS": "Move the class to hooks.py beside the model and name it Hooks.",
        "ON_FATAL": "An instance without its device stays and answers 503; remove the option.",
        "PARALLEL_LOADS": "Instances take turns where memory or a compiler requires it; remove it.",
        "PREPROCESS_THREADS": "Use a thread pool in preprocess_batch() of hooks.py.",
        "PROFILE_BATCHES": "Set PROFILE_DIR alone; the schedule is fixed.",
        "SEQUENCE_MEMORY_MB": "Set max_candidate_sequences in sequence_batching.",
        "STATE": "Declare the states in config.pbtxt: sequence_batching { state { … } }.",
        "TRACING": "The context of a request that Triton traces is always current; remove it.",
        "WATCH_WEIGHTS": "Add a new version folder: Triton switches to it without a gap.",
    },
    "OPTIMIZE": {
        "auto": "`torch-py-backend tune` prints the options to set.",
        "bf16_weights": "Use bf16, which converts the weights at load.",
        "cuda_graphs": 'Set TORCH_COMPILE_OPTIONAL_PARAMETERS to {"mode": "reduce-overhead"}.',
        "fp16_weights": "Use fp16, which converts the weights at load.",
        "fp8_weights": "Quantize the module with torchao in model.py.",
        "int8_weights": "Quantize the module with torchao in model.py.",
    },
    "hook": {
        "forward": "Call the module in forward() of a module in model.py.",
        "inference": "Call the module in forward() of a module in model.py.",
    },
    "format": {
        "torchscript": 'Use format="export", or torch.jit.save and `torch-py-backend init`.',
    },
    "command": {
        "bench": "Use perf_analyzer of perf-analyzer 2.58 or newer, or of Triton's SDK.",
        "export-compiled": "Copy the folder compile_cache of the model to the other machine.",
        "import-compiled": "Copy the folder compile_cache of the model from the other machine.",
        "import-mar": "Use `torch-py-backend init model.mar`.",
        "pack": "Use conda-pack, or `pip install --target` for a few packages.",
        "profile": "Set PROFILE_DIR in config.pbtxt.",
    },
    "flag": {
        "--cache-size": "Remove it: `serve URL` fetches the repository once, at its start.",
        "--example": "Put the inputs beside the model as example_inputs.safetensors.",
        "--inputs": "Put the inputs beside the model as example_inputs.safetensors.",
        "--link": "Remove it: `init` copies the files.",
        "--max-error": "Remove it: the table has each candidate's error.",
        "--poll": "Remove it: synchronize a folder and pass --reload.",
        "--upload-compiled": "Remove it: copy the folder compile_cache of the model.",
    },
}


def advice(kind: str, names: Iterable[str]) -> str:
    """Return what to do about the first of these names that was removed; empty: none was."""
    table = NAMES[kind]
    return next((f"{name} was removed. {table[name]}" for name in names if name in table), "")
