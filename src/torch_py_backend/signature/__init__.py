"""The call tree of forward() and of its result, and the binding of tensor names to its leaves."""
