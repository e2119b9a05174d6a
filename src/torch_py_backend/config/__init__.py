"""What config.pbtxt says, as frozen objects: tensors, options, sequences, element types.

Imports no torch.
"""
