"""What completing a config costs: without torch, where nothing is missing, against with it.

    python benchmarks/auto_complete.py

Triton runs a backend's `auto_complete_config` in a process of its own at every load. A complete
config needs no model, hence no torch. Whole processes are timed in turn, A B A B ….
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

PAIRS = 7
_COMPLETE = {
    "name": "m",
    "max_batch_size": 8,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [4]}],
    "parameters": {},
}
# What the stub does, less the stub: import the adapter, call the hook.
_HOOK = f"""
import sys, types
sys.modules["triton_python_backend_utils"] = types.ModuleType("triton_python_backend_utils")
from torch_py_backend.adapter import TritonPythonModel
class Config:
    def as_dict(self):
        return {json.dumps(_COMPLETE)}
TritonPythonModel.auto_complete_config(Config())
assert "torch" not in sys.modules
"""


def seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603  this Python
    return time.perf_counter() - start


def main() -> None:
    seconds(_HOOK + "import torch")  # warm the file cache
    without, with_torch = [], []
    for _ in range(PAIRS):
        without.append(seconds(_HOOK))
        with_torch.append(seconds(_HOOK + "import torch"))
    ratios = [a / b for a, b in zip(without, with_torch, strict=True)]
    print("| | median | min | max |\n|---|---|---|---|")
    for label, values, unit in (
        ("complete config, s", without, ".2f"),
        ("the same and torch, s", with_torch, ".2f"),
        ("ratio", ratios, ".2f"),
    ):
        median = statistics.median(values)
        print(f"| {label} | {median:{unit}} | {min(values):{unit}} | {max(values):{unit}} |")


if __name__ == "__main__":
    main()
