"""Transposed convolution compiled ahead of time."""
