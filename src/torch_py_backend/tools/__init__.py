"""The work of the commands init, check, tune, bench, profile and pack; `save_model` and `serve`.

Used by `cli` and, for the two functions, by the top level of the package.
"""
