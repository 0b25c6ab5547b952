"""Layers inside PyTorch compute in its threads; each scenario is a process of its own."""

import subprocess
import sys

import pytest
from support import artifacts as made

import tvm_deconv as td

pytest.importorskip("torch")

PROBLEM = td.from_torch((1, 32, 64, 64), (32, 16, 4, 4), stride=2, padding=1)

PRELUDE = """
import contextlib, os, sys, threading, time
from pathlib import Path
import numpy as np
import torch
import torch.nn.functional as F
import tvm_deconv as td

torch.set_num_threads(3)
td.set_num_threads(3)
torch.set_grad_enabled(False)
library, problem = td.load(sys.argv[1]), td.Problem.from_key(sys.argv[2])
x, weight = torch.randn(problem.data_shape), torch.randn(32, 16, 4, 4)
layer = library.bind(problem, weight.numpy())
wanted = layer(x, threads=1)

def check():
    y = td.torch.conv_transpose(x, weight, stride=2, padding=1, library=library)
    assert np.array_equal(y.numpy(), wanted.numpy())  # to the last bit, whoever computes

def pool_starts():  # its threads name themselves when they first run
    end = time.time() + 20
    while time.time() < end and not pool():
        time.sleep(0.001)
    return pool()

def pool():
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            names.append((task / "comm").read_text().strip())
    return "tvm_deconv" in names

expected = F.conv_transpose2d(x, weight, stride=2, padding=1)  # PyTorch's threads start
assert torch.allclose(wanted, expected, atol=1e-4)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("threads")
    made.export(directory, [PROBLEM])
    return directory


@pytest.fixture
def run(directory):
    def run(script):
        command = [sys.executable, "-W", "ignore:.*fork:DeprecationWarning", "-c", PRELUDE + script]
        done = subprocess.run([*command, directory, PROBLEM.key], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr

    return run


def test_pytorchs_threads_compute(run):
    run("""
for count in (3, 2, 1):
    torch.set_num_threads(count)
    check()
assert not pool()
assert np.array_equal(layer(x).numpy(), wanted.numpy())
assert pool_starts()  # where there is no host, the pool
""")


def test_several_callers(run):
    # Each of PyTorch's callers has a team of its own.
    run("""
failed = []
def caller():
    try:
        for _ in range(20):
            check()
            torch.relu(x)
    except BaseException as error:
        failed.append(error)
callers = [threading.Thread(target=caller) for _ in range(4)]
for each in callers: each.start()
for each in callers: each.join()
assert not failed, failed
assert not pool()
""")


def test_a_forked_child_has_the_pool(run):
    # PyTorch's threads are not there, and its OpenMP waits for them.
    run("""
check()
child = os.fork()
if child == 0:
    try:
        check()
        os._exit(0 if pool_starts() else 2)
    finally:
        os._exit(1)
assert os.waitpid(child, 0)[1] == 0
check()
assert not pool()
""")


def test_without_openmp_the_pool_computes(run):
    run("""
from tvm_deconv.torch import host
host._gomp_parallel = lambda: None
check()
assert pool_starts()
""")
