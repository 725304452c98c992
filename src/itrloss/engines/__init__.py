"""How similarities are computed: the engines behind :class:`itrloss.Similarity`.

``reference`` is the specification (a dense matrix and autograd). ``softmax``, ``moments``, ``pairs`` and ``ranking``
are the hand-written passes that the dense and the tiled engine share, over what ``tiles`` hands them; ``triton`` has
them once more, with kernels. ``operators`` registers them with PyTorch, and ``dispatch`` picks the engine.
"""
