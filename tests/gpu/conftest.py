"""What the GPU tests need of the suite's fixtures: a machine with a GPU may have pytest only."""

from fixtures import dynamo, process

__all__ = ["dynamo", "process"]
