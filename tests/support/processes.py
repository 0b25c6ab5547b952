"""The environment of processes that tests start."""

import os
from pathlib import Path

import tvm_deconv as td

TESTS = Path(__file__).parents[1]
#: A folder whose torch is not installed: TVM imports torch where it can, which takes longer than all else that it does.
WITHOUT_TORCH = TESTS / "support" / "without_torch"


def without_torch():
    """This environment, with the package and the tests on Python's path, and without torch."""
    path = WITHOUT_TORCH, Path(td.__file__).parents[1], TESTS
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}


def spinning():
    """This environment, in which OpenMP's threads spin while they wait, as they do by default."""
    return {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
