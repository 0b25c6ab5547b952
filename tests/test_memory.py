"""What calls allocate, and what a process keeps: nothing that grows."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import artifacts as made
import pytest

import tvm_deconv as td
from tvm_deconv.launcher import find_compiler

ROOT = Path(td.__file__).parents[1]
SOAK = Path(__file__).with_name("soak.py")

# Stands before the C library's functions and counts what is large enough to be an array or a workspace.
COUNTER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
enum { LARGE = 256 };
static _Atomic long large;
long large_allocations(void) { return atomic_load(&large); }
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
static void note(size_t size) { if (size >= LARGE) atomic_fetch_add(&large, 1); }
void *malloc(size_t size) { note(size); return __libc_malloc(size); }
void *calloc(size_t count, size_t size) { note(count * size); return __libc_calloc(count, size); }
void *realloc(void *old, size_t size) { note(size); return __libc_realloc(old, size); }
void *memalign(size_t align, size_t size) { note(size); return __libc_memalign(align, size); }
void *aligned_alloc(size_t align, size_t size) { return memalign(align, size); }
int posix_memalign(void **result, size_t align, size_t size) {
  *result = memalign(align, size);
  return *result ? 0 : ENOMEM;
}
"""

COUNT = """
import ctypes, sys
import numpy as np
import tvm_deconv as td
count = ctypes.CDLL(None).large_allocations
count.restype = ctypes.c_long
p = td.Problem.from_key(sys.argv[2])
td.set_num_threads(2)
layer = td.load(sys.argv[1]).bind(p, np.ones(p.filter_shape, np.float32))
data, out = np.ones(p.data_shape, np.float32), np.empty(p.output_shape, np.float32)
def during(call):
    # The least of several runs: a second thread may come late to its first task, and takes its workspace then.
    counts = []
    for _ in range(10):
        before = count()
        for _ in range(200): call()
        counts.append(count() - before)
    return min(counts)
before = count()
held = np.empty(1000)
assert count() == before + 1, "allocations are not counted"
assert td.load(sys.argv[1]).manifests[0].scratch_bytes > 1000
assert during(lambda: layer(data, out)) == 0, "with out"
assert during(lambda: layer(data)) <= 200, "more than the output"
"""

#: A layer whose workspace and output are both far from small.
LARGE = td.Problem(1, 1, 32, 16, (40, 40), (4, 4), (2, 2), (1, 1), (1, 1), (80, 80))


def run(*command, **environment):
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"} | environment
    done = subprocess.run(
        [sys.executable, "-W", "error", *map(str, command)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_calls_allocate_nothing_but_the_output(tmp_path):
    if not hasattr(ctypes.CDLL(None), "__libc_memalign"):
        pytest.skip("another C library than GNU's")
    counter = tmp_path / "counter.so"
    command = [find_compiler(), "-x", "c", "-", "-shared", "-fPIC", "-O1", "-o", str(counter)]
    subprocess.run(command, input=COUNTER.encode(), check=True)
    directory = tmp_path / "made"
    directory.mkdir()
    made.export(directory, [LARGE])
    run("-c", COUNT, directory, LARGE.key, LD_PRELOAD=str(counter))


@pytest.mark.parametrize("seconds", [15, pytest.param(600, marks=pytest.mark.slow)])
def test_soak(artifacts, seconds):
    found = json.loads(run(SOAK, artifacts, seconds))
    assert found["calls"] > 1000
    first, *_, last = found["resident"]
    # A kilobyte lost with each call would be ten times this.
    assert last - first < max(4 << 20, found["calls"] * 100), found
