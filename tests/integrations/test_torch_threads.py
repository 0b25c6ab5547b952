"""Layers inside PyTorch compute in its threads; each scenario is a process of its own."""

import pytest
from support import artifacts as made
from support.threads import run_script

import tvm_deconv as td

pytest.importorskip("torch")

PROBLEM = td.from_torch((1, 32, 64, 64), (32, 16, 4, 4), stride=2, padding=1)

PRELUDE = """
import sys
import numpy as np
import torch
import torch.nn.functional as F
import tvm_deconv as td
from support.threads import call_from_threads, child_has_the_pool, pool_starts, workers
from support.tolerances import WINOGRAD, assert_close

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

expected = F.conv_transpose2d(x, weight, stride=2, padding=1)  # PyTorch's threads start
assert_close(wanted, expected, growth=WINOGRAD)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("threads")
    made.export(directory, [PROBLEM])
    return directory


@pytest.fixture
def run(directory):
    return lambda script: run_script(PRELUDE + script, directory, PROBLEM.key)


def test_pytorchs_threads_compute(run):
    run("""
for count in (3, 2, 1):
    torch.set_num_threads(count)
    check()
assert not workers()
assert np.array_equal(layer(x).numpy(), wanted.numpy())
assert pool_starts()  # where there is no host, the pool
""")


def test_several_callers(run):
    # Each of PyTorch's callers has a team of its own.
    run("""
def caller():
    check()
    torch.relu(x)
call_from_threads(caller, 20)
assert not workers()
""")


def test_a_forked_child_has_the_pool(run):
    # PyTorch's threads are not there, and its OpenMP waits for them.
    run("""
check()
assert child_has_the_pool(check)
check()
assert not workers()
""")


def test_a_child_that_is_forked_while_a_forward_begins(run):
    # Another thread has the lock of the functions' names then, and is not there to give it back.
    run("""
import signal
from tvm_deconv.torch import calls

class Up(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x):
        return F.conv_transpose2d(x, self.weight, stride=2, padding=1)

model = Up().eval()
(row,) = td.torch.replace(model, library, [x], measure=False)
assert not row.reason

def forward():
    signal.alarm(60)
    assert np.array_equal(model(x).numpy(), wanted.numpy())

with calls._names._lock:
    assert child_has_the_pool(forward)
""")


def test_callers_with_many_shapes(run):
    run("""
import random
sys.setswitchinterval(1e-6)

def caller():
    data = torch.ones(1, 32, random.randrange(1, 40), 2)
    td.torch.conv_transpose(data, weight, stride=2, padding=1, library=library, fallback="torch")

call_from_threads(caller, 500, threads=8)
""")


def test_without_openmp_the_pool_computes(run):
    run("""
from tvm_deconv.torch import host
host._gomp_parallel = lambda: None
check()
assert pool_starts()
""")
