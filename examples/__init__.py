"""Worked examples on top of itrloss."""
