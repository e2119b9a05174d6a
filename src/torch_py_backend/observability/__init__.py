"""The table of metrics."""
