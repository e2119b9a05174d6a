"""Triton's own Python runtime for PyTorch models, as a Python backend model.

That runtime is src/model.py of triton-inference-server/pytorch_backend. It is copied into a
repository as `runtime.py`, this file as `model.py`, the network as `network.py`, and its
weights as `network.pt`.
"""

from __future__ import annotations

import json
import locale
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import runtime


class TritonPythonModel(runtime.TritonPythonModel):  # type: ignore[misc]  # not in this repository
    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the network: in the stub's C locale, torch.compile cannot read its own files."""
        locale.setlocale(locale.LC_ALL, "C.UTF-8")
        config = json.loads(args["model_config"])
        config["default_model_filename"] = "network.py"
        super().initialize({**args, "model_config": json.dumps(config)})
