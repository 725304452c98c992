"""``python -m benchmarks``: the losses compared with plain PyTorch, its compiler, other libraries
and bare products.
"""
