"""Run batches: call the model, check its outputs, retry after a failure, replace weights."""
