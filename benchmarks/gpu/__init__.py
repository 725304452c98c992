"""``python -m benchmarks gpu``: ten minutes on one CUDA device, and a record of what was found."""
