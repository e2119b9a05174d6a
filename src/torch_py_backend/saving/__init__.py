"""`save_model`: write a module of this process as a model folder.

`save_model.py` is for the package's top level; the other modules are parts of it.
"""
