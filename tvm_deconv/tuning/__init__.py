"""The search for schedules."""

from tvm_deconv.tuning.search import Choice, Log, Record, Records, Trial, Tuned, best, choices, nearest, read, tune

__all__ = ["Choice", "Log", "Record", "Records", "Trial", "Tuned", "best", "choices", "nearest", "read", "tune"]
