"""How questions about similarities are answered: the map of this room.

========= ==================================================================================================
scores    the inputs of a matrix: embeddings, their lengths, precision; the tiles that a pass visits
pairs     which pairs are positive, from ids; scores of listed pairs, whose gradient goes straight to them
answers   what can be asked: elementwise functions of scores, with derivatives where writing them out pays
reduce    the one reduction: sums of an answer over tiles, forward and backward, as one autograd function
          and two operators
ranking   what is no sum: hardest negatives, ranks
matrix    a score matrix with its engine, and what is kept of it between questions
answerers who answers: small matrices together, in plain PyTorch (dense); others by tiles, with triton too
triton    the reduction on CUDA, around cuBLAS products; its two template kernels are in kernels
products  which library multiplies on the CPU, by a rule
========= ==================================================================================================
"""
