"""``itrloss bench``: the losses beside plain PyTorch, its compiler, the bare matrix products and other libraries."""
