"""What Triton loads for `backend: "pytorch_py"`; the code is in torch_py_backend."""

import os
import sys

# The package that `install` puts beside this file wins over one in site-packages.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from torch_py_backend.adapter import TritonPythonModel

__all__ = ["TritonPythonModel"]
