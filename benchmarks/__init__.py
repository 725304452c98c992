"""Benchmarks: the losses against plain PyTorch, side by side in one process."""
