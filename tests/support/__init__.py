"""Shared by the tests: references in loops, inputs, the registry of losses, processes."""
