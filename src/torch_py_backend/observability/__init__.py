"""The table of metrics, OpenTelemetry traces of requests, and torch.profiler traces of batches."""
