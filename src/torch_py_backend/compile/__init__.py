"""torch.compile, its cache on disk, CUDA graphs, and the batch sizes they are made for."""
