"""Whole models with random weights, in each framework as they are and with artifacts: for `bench_models.py`."""
