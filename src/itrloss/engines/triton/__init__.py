"""The Triton engine; import :mod:`itrloss.engines.triton.passes` where it is used."""
