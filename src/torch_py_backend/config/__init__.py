"""config.pbtxt as frozen objects: tensors, options, sequences, element types, conflict rules.

Imports no torch.
"""
