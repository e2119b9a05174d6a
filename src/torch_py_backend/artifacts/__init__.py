"""Which file of a version folder is the model, of which type, and which files belong to it.

Reads names, headers and syntax trees; runs no code of a model and imports no torch.
"""
