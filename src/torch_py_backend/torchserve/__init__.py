"""TorchServe archives: unpacks, checks and migrates them, and serves them with their own handlers.

Only `cli` imports it; `loading.registry` finds its loader by name.
"""
