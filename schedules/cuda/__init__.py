"""Schedules for CUDA: kernels written as TensorIR, one module for each algorithm, beside shared ones."""
