"""The engine: how sums, extremes and ranks over a score matrix are computed.

========= ==================================================================================================
scores    the inputs of a score matrix: embeddings, their norms, precision; the tiles that a pass visits
pairs     which pairs are positive, from ids; scores of listed pairs, whose gradient skips the matrix
answers   the elementwise functions of scores that can be summed, with hand-written derivatives where faster
reduce    the one reduction: sums of an answer over tiles, forward and backward, as one autograd function
          and two operators
ranking   what is not a sum: hardest negatives, ranks
matrix    a score matrix with its engine, and what is cached between questions
backends  what answers: small matrices batched in plain PyTorch (dense), others by tiles (tiled, triton)
triton    the reduction on CUDA, around cuBLAS products; its two template kernels are in kernels
processes the collectives of processes that share a batch, with their gradients
exchange  such a batch, and what its anchors exchange
ring      a matrix whose columns travel around the processes
sets      scores of sets of embeddings from those of their elements
products  which library multiplies on the CPU: a fixed rule
========= ==================================================================================================
"""
