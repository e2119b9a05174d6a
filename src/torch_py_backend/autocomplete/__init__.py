"""Inputs and outputs that config.pbtxt leaves out, completed from the model.

`completion` imports no torch: it runs `schema` in a child process.
"""
