"""State per correlation ID: initial values, storage, and the state columns of a batch."""
