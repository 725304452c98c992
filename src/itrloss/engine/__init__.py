"""The engine: how sums, extremes and ranks over a score matrix are computed.

=========== ========================================================================================
terms       the functions of scores that are summed
vectors     lengths, precision, and the gradient that goes back to vectors
relation    which rows and columns belong together, by ids, sets of labels, groups or a matrix
related     the same as it is passed in, checked
inputs      the inputs of a score matrix, and its tiles
question    what is computed from a matrix, and how the anchors of a side see a tile
tiled       the one loop: answers, added up tile by tile, and their gradient in closed form
dense       the same answers in plain PyTorch: the specification, for compilers and second
            derivatives
pair_scores scores of listed pairs, whose gradient skips the matrix
step        all vectors of a step and its small matrices, and the sums over a small matrix
autograd    sums over a large matrix, which is visited tile by tile
matrix      a score matrix with its engine, and what is kept of it between questions
ranking     the best candidate, and ranks
sets        scores of sets of embeddings from the scores of their elements
products    which library multiplies on the CPU: a fixed rule
triton      the answers on CUDA, around cuBLAS products; its template kernels are in kernels
devices     the GPUs on which a committed record says that the kernels passed their checks
=========== ========================================================================================
"""
