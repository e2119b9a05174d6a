"""User code around forward(): preprocessing and postprocessing methods of a class in model.py."""
