"""Requests' items grouped, padded and gathered into a batch; results checked and scattered.

Knows nothing of how a model is loaded or called.
"""
