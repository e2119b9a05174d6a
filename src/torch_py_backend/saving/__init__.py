"""`save_model`: write a module of this process as a model folder."""
