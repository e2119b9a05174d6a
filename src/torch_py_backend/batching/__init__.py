"""Group, pad and gather items into a batch; check and scatter its outputs.

Independent of how a model is loaded or called.
"""
