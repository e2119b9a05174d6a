"""Completes the inputs and outputs that config.pbtxt lacks from the model.

`completion` does not import torch: it runs `schema` in a child process. That infers the schema from
an exported program, or from runs with an example or made-up values.
"""
