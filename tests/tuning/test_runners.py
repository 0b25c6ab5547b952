"""Runners: what the processes that run candidates import, and what their parts in C are installed as."""

import subprocess
import sys
from pathlib import Path

import pytest

from tvm_deconv.bench import floors
from tvm_deconv.tuning.runners import rpc


def test_a_process_that_runs_candidates_starts_without_tvm():
    """TVM takes seconds to import, and such a process is replaced after each candidate that fails."""
    program = """
import sys
from tvm_deconv.tuning.runners import cuda, harness, local
assert not {"tvm", "torch", "onnx"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_sources_in_c_are_installed():
    """They are data of packages that pyproject.toml names."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    root = Path(__file__).parents[2]
    setuptools = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    for module in (floors, rpc):
        assert [*Path(module.__file__).parent.glob("*.c")]
        assert module.__package__ in setuptools["packages"]
        assert {"*.c", "*.h"} <= {*setuptools["package-data"]["*"]}
