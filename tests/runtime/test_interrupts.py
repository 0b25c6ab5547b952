"""Interrupts at any moment of bind, call and del: nothing of the layer is left behind in its thread or its process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import artifacts as made

import tvm_deconv as td

ROOT = Path(td.__file__).parents[1]

#: Interrupts the main thread by a timer's signals, and the others by exceptions that Python raises in them.
STORM = """
import ctypes, random, signal, sys, threading, time
from pathlib import Path
import numpy as np
import tvm_deconv as td
from tvm_deconv.runtime import process

class Interrupt(BaseException):
    pass

def interrupt(*_):
    raise Interrupt

library, wanted = td.load(sys.argv[1]), int(sys.argv[2])
problem = td.Problem.from_key(sys.argv[3])
chance = np.random.default_rng(0)
filter = chance.random(problem.filter_shape, np.float32)
data = chance.random(problem.data_shape, np.float32)
td.set_num_threads(1)
expected = library.bind(problem, filter)(data)
td.set_num_threads(4)
manifest = library.bind(problem, filter).manifest
assert manifest.scratch_bytes + manifest.shared_bytes > 0, "this tells nothing of workspaces"
counts, wrong = {}, []

def work(name):
    out = np.empty_like(expected)
    while interrupts < wanted:
        counts[name] = counts.get(name, 0) + 1
        for lanes in (0, 1, 2):
            # So large that freed memory is not there any more.
            memory = np.ones(manifest.workspace_bytes(lanes) + (1 << 20), np.uint8) if lanes else None
            layer = library.bind(problem, filter, workspace=memory)
            del memory
            for threads in (None, 1, 2, None):
                out.fill(np.nan)
                layer(data, out, threads=threads)
                if not np.array_equal(out, expected):
                    wrong.append(name)
            del layer

interrupts = 0
def stormy(name):
    global interrupts
    while interrupts < wanted:
        try:
            if name == "main":
                signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-5, 2e-3))
            work(name)
        except Interrupt:
            interrupts += 1

others = [threading.Thread(target=stormy, args=(name,)) for name in "abc"]
for each in others: each.start()

def storm():
    raised = ctypes.pythonapi.PyThreadState_SetAsyncExc
    while interrupts < wanted - 50:  # so that none is left over for a thread that has ended its work
        time.sleep(random.uniform(2e-5, 1e-3))
        raised(ctypes.c_ulong(random.choice(others).ident), ctypes.py_object(Interrupt))
        time.sleep(0)

pest = threading.Thread(target=storm)
pest.start()
signal.signal(signal.SIGALRM, interrupt)
try:
    stormy("main")
except Interrupt:
    pass
signal.signal(signal.SIGALRM, signal.SIG_IGN)
signal.setitimer(signal.ITIMER_REAL, 0)
for each in (pest, *others): each.join()
assert not wrong, wrong
assert not process._inside, "a call that was interrupted counts as one that goes on"
# No limit of threads is left: a parallel call of this thread has helpers.
td.set_num_threads(None)
td.set_num_threads(3)
large = td.Problem.from_key(sys.argv[4])
data, filter = np.ones(large.data_shape, np.float32), np.ones(large.filter_shape, np.float32)
layer = library.bind(large, filter)
layer(data)
started = time.process_time(), time.thread_time()
for _ in range(50): layer(data)
helped = (time.process_time() - started[0]) - (time.thread_time() - started[1])
assert helped > 0, "all by itself"
"""

LARGE = td.Problem(1, 1, 64, 64, (32, 32), (4, 4), (2, 2), (1, 1), (1, 1), (64, 64))


@pytest.fixture(scope="module")
def parallel(tmp_path_factory):
    directory = tmp_path_factory.mktemp("parallel")
    made.export(directory, [made.PLAIN, LARGE])
    return directory


@pytest.mark.parametrize("interrupts", [1000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_storm(parallel, interrupts):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", STORM, parallel, str(interrupts), made.PLAIN.key, LARGE.key]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
