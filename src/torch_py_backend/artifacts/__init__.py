"""Find the model file of a version folder, its type, and the files that belong to it.

Reads names, headers and syntax trees; runs no code of a model and does not import torch.
"""
