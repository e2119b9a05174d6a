"""Serve any PyTorch model on NVIDIA Triton Inference Server, from Python."""

__version__ = "0.1.0"
