"""The table of metrics, traces of requests, and profiler traces."""
