"""Schedules for CUDA: kernels written as TensorIR, one module for each algorithm, and what they share."""
