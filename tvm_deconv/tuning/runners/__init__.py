"""Runners check and time candidates: on this machine, at servers of a TVM tracker, or on a CUDA device."""
