"""How similarities are computed: the engines behind :class:`itrloss.Similarity`.

``reference`` is the specification (a dense matrix and autograd); ``tiles`` and ``answers`` hold the hand-written
passes that the dense and the tiled engine share; ``operators`` registers them with PyTorch.
"""
