"""``python -m benchmarks``: the losses beside plain PyTorch, its compiler, other libraries and the bare products."""
