"""Completes the inputs and outputs that config.pbtxt lacks from the model.

`completion` does not import torch: it runs `schema` in a child process. That infers the schema from
an exported program, from runs with examples, or from runs of hooks.
"""
