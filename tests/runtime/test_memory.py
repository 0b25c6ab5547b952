"""What calls allocate, and what a process keeps: nothing that grows."""

import ctypes
import json
import math
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support import artifacts as made
from support.processes import without_torch
from support.strategies import operands

import tvm_deconv as td
from tvm_deconv.compiler.launcher import find_compiler

ROOT = Path(td.__file__).parents[1]
SOAK = ROOT / "tests" / "support" / "soak.py"

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
_Atomic long last_large;
long large_allocations(void) { return atomic_load(&large); }
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
static void note(size_t size) { if (size >= LARGE) atomic_fetch_add(&large, 1), atomic_store(&last_large, size); }
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
from threading import Thread
import numpy as np
import tvm_deconv as td
count = ctypes.CDLL(None).large_allocations
count.restype = ctypes.c_long
last = ctypes.c_long.in_dll(ctypes.CDLL(None), "last_large")
before = count()
held = np.empty(1000)
assert count() == before + 1, "allocations are not counted"
def allocates_at_most(each, call):
    # In one of several runs: a second thread may come late to its first task, and takes its workspace then.
    for _ in range(10):
        before = count()
        for _ in range(10): call()
        if count() - before <= 10 * each: return True
    return False
def first(layer, data, out):
    # That of a thread that has no workspace yet.
    counts = []
    def call():
        warm()
        before = count()
        layer(data, out)
        counts.append(count() - before)
    thread = Thread(target=call)
    thread.start()
    thread.join()
    return counts[0]
# What a thread's first call of any artifact has Python, tvm_ffi and the C library allocate, it does in `warm`.
library = td.load(sys.argv[1])
assert library.manifests[0].scratch_bytes == library.manifests[0].shared_bytes == 0
p = library.manifests[0].parsed
layer, tiny = library.bind(p, np.ones(p.filter_shape, np.float32)), np.ones(p.data_shape, np.float32)
warm = lambda: layer(tiny, threads=1)
for directory in sys.argv[2:]:
    library = td.load(directory)
    (manifest,) = library.manifests
    p, what = manifest.parsed, f"{manifest.algorithm} {manifest.knobs}"
    filter, data = np.ones(p.filter_shape, p.dtype), np.ones(p.data_shape, p.dtype)
    out = np.empty(p.output_shape, p.output_dtype)
    bias = np.ones(p.bias_shape, p.accumulate_dtype) if p.epilogue.bias else None
    td.set_num_threads(1)
    whole, own = (library.bind(p, filter, bias, workspace=lanes) for lanes in (1, None))
    assert first(own, data, out) > 0, f"the first call without a workspace takes none: this tells nothing of {what}"
    assert first(whole, data, out) == 0, f"{last.value} bytes at the first call with a workspace: {what}"
    for threads in (1, 2):
        td.set_num_threads(threads)
        for each in (own, library.bind(p, filter, bias, workspace=threads)):
            assert allocates_at_most(0, lambda: each(data, out)), f"with out, {threads} threads: {what}"
            assert allocates_at_most(1, lambda: each(data)), f"more than the output, {threads} threads: {what}"
"""

#: A layer whose workspace and output are both far from small, and whose schedule packs no data for all threads at once.
LARGE = td.Problem(1, 1, 20, 10, (56, 112), (3, 3), (2, 2), (1, 1), (1, 1), (112, 224))


def run(*command, **environment):
    done = subprocess.run(
        [sys.executable, "-W", "error", *map(str, command)],
        env=without_torch() | environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    directory = tmp_path_factory.mktemp("large")
    made.export(directory, [LARGE])
    return directory


def export_by(directory, problem, algorithm, share_data):
    """The artifact of a plan of `algorithm`, of those that pack data once for all threads or not."""
    from tvm_deconv.compiler import build
    from tvm_deconv.compiler.selection import Choice, candidates_of
    from tvm_deconv.targets import get

    plans = candidates_of(problem, algorithm, get(made.TARGET))
    chosen = next(plan.schedule for plan in plans if ("share_data", share_data) in plan.schedule.knobs)
    choices = [Choice(chosen, "default", "")]
    return build.export(problem, get(made.TARGET), directory, choices=choices, toolchain=made.toolchain_of())


@pytest.fixture(scope="module")
def by_algorithm(tmp_path_factory):
    """A directory for each algorithm and way to pack, and one with so many workspaces as axes have combinations.

    Each artifact has one plan, so that every call writes to all of its workspace.
    """
    from tvm_deconv.compiler.selection import named
    from tvm_deconv.schedules.x86 import parallel
    from tvm_deconv.schedules.x86.algorithms import ALGORITHMS

    root = tmp_path_factory.mktemp("algorithms")
    # A stride of one: one combination of runs, which compiles quickly.
    plane = td.Problem(1, 1, 9, 20, (30, 40), (2, 2), (1, 1), (1, 1), (0, 0), (31, 41))
    # Of the types and channels that these are for.
    special = {
        "col2im": plane.replace(in_channels=32, out_channels=2, data_format="NXC"),
        "dot": plane.replace(dtype="int8"),
        "direct_folded": td.Problem(1, 1, 9, 20, (30, 40), (1, 2), (1, 2), (1, 1), (0, 0), (30, 80), data_format="NXC"),
        "direct_inputs": plane.replace(in_channels=32, out_channels=2, data_format="NXC"),
        "dot_inputs": plane.replace(dtype="int8", in_channels=32, out_channels=2, data_format="NXC"),
    }
    cube = td.Problem.from_torch((1, 8, 6, 6, 16), (8, 24, 3, 3, 3), stride=2, epilogue=td.Epilogue(True))
    wanted = [
        (special.get(algorithm.name, plane).replace(batch=20 - 19 * share), algorithm, share)
        for algorithm in ALGORITHMS
        for share in ((0,) if algorithm.name == "col2im" else (0, 1))  # which shares none
        if algorithm.name not in ("dot_channels", "dot_folded", "dot_rows")  # whose stages `direct_*` have, too
    ]
    wanted.append((cube, ALGORITHMS[0], 1))
    wanted.append((plane.replace(in_channels=32), named("col2im"), 0))  # in `N C *X` it packs data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "_SHORTEST", math.inf)
        return [(export_by(root / str(i), *each), root / str(i)) for i, each in enumerate(wanted)]


def test_calls_allocate_nothing_but_the_output(by_algorithm, tmp_path):
    if not hasattr(ctypes.CDLL(None), "__libc_memalign"):
        pytest.skip("another C library than GNU's")
    counter = tmp_path / "counter.so"
    (tmp_path / "tiny").mkdir()
    command = [find_compiler(), "-x", "c", "-", "-shared", "-fPIC", "-O1", "-o", str(counter)]
    subprocess.run(command, input=COUNTER.encode(), check=True)
    made.export(tmp_path / "tiny", [td.Problem(1, 1, 1, 1, (2,), (1,), (1,), (1,), (0,), (2,))])
    run("-c", COUNT, tmp_path / "tiny", *(directory for _, directory in by_algorithm), LD_PRELOAD=str(counter))


def test_manifests_tell_the_whole_workspace(by_algorithm):
    """What a call writes to in memory of its own is what the manifest says, but for what ends a line."""
    shared = set()
    for manifest, directory in by_algorithm:
        problem = manifest.parsed
        data, filter, bias = operands(problem)
        layer_of = td.load(directory).bind
        memory = np.full(manifest.workspace_bytes(1), 0xA5, np.uint8)
        layer = layer_of(problem, filter, bias, workspace=memory)
        np.testing.assert_array_equal(layer(data, threads=1), layer_of(problem, filter, bias)(data, threads=1))
        assert (memory != 0xA5).mean() > 0.5, manifest
        assert (manifest.shared_bytes > 0) <= bool(manifest.knobs["share_data"] or problem.epilogue.bias)
        shared.add(manifest.shared_bytes > 0)
    assert shared == {False, True}


# ---- a workspace of a layer's own ----


@pytest.mark.parametrize("lanes", [1, 3, 8])
@pytest.mark.parametrize("name", made.PROBLEMS)
def test_workspace_of_the_caller(artifacts, name, lanes):
    """Eight callers, with lanes for fewer or for all; nothing outside of the memory is written."""
    problem = made.PROBLEMS[name]
    data, filter, bias = operands(problem)
    library = td.load(artifacts)
    manifest = library.select(problem)[0].manifest
    memory = np.full(manifest.workspace_bytes(lanes) + 2000, 0xA5, np.uint8)
    inner = memory[1000 + lanes : -1000 + lanes]  # at odd addresses
    layer = library.bind(problem, filter, bias, workspace=inner)
    expected = library.bind(problem, filter, bias)(data)
    before = td.get_num_threads()
    td.set_num_threads(4)
    try:
        with ThreadPoolExecutor(8) as pool:
            outputs = pool.map(lambda _: [layer(data) for _ in range(50)], range(8))
            assert {output.tobytes() for outputs in outputs for output in outputs} == {expected.tobytes()}
    finally:
        td.set_num_threads(before)
    assert (memory[: 1000 + lanes] == 0xA5).all()
    assert (memory[-1000 + lanes :] == 0xA5).all()
    if name == "plain":  # others may be small enough for the stack
        assert (inner[: manifest.workspace_bytes(1)] != 0xA5).mean() > 0.1, "the memory is not what is used"


def test_workspace_at_bind(large):
    data, filter, _ = operands(LARGE)
    library = td.load(large)
    np.testing.assert_array_equal(library.bind(LARGE, filter, workspace=2)(data), library.bind(LARGE, filter)(data))
    assert library.bind(LARGE, filter, workspace=64)(data).any()


@pytest.mark.parametrize(
    ("workspace", "error", "match"),
    [
        (0, td.ProblemError, "workspace=0: must be at least 1"),
        (65, td.ProblemError, "workspace=65: must be at most 64, or an array"),
        (1.5, td.ProblemError, "workspace=1.5: must be an integer"),
        (True, td.ProblemError, "workspace=True: must be an integer, not a bool"),
        (np.empty(100, np.uint8), td.TensorError, "workspace=100: must have at least [0-9]+ bytes, for one thread"),
        (np.empty(1 << 20, np.uint8)[::2], td.TensorError, "workspace=.*: must be contiguous"),
        (np.broadcast_to(np.uint8(0), 1 << 20), td.TensorError, "workspace=.*: must be contiguous"),
        (np.empty(1 << 20, object), td.TensorTypeError, "workspace='object': must be of numbers, not of objects"),
    ],
)
def test_wrong_workspace(artifacts, workspace, error, match):
    with pytest.raises(error, match=match):
        td.load(artifacts).bind(made.PLAIN, operands(made.PLAIN)[1], workspace=workspace)


def test_workspace_that_does_not_fit(artifacts, tmp_path):
    """As a manifest may ask for that nobody vouches for."""
    shutil.copytree(artifacts, tmp_path, dirs_exist_ok=True)
    made.rewrite(tmp_path, made.PLAIN, scratch_bytes=1 << 40)
    layer = td.load(tmp_path).bind(made.PLAIN, operands(made.PLAIN)[1])
    assert layer.manifest.scratch_bytes == 1 << 40
    with pytest.raises(td.ProblemError, match=r"^workspace=64: must fit in memory: 703\d+ bytes$"):
        td.load(tmp_path).bind(made.PLAIN, operands(made.PLAIN)[1], workspace=64)


def test_workspace_of_no_artifact(tmp_path):
    data, filter, _ = operands(made.PLAIN)
    layer = td.load(tmp_path, fallback="reference").bind(made.PLAIN, filter, workspace=1)
    np.testing.assert_allclose(layer(data), td.reference(made.PLAIN, data, filter), rtol=1e-6)


# ---- for long ----


@pytest.mark.parametrize("seconds", [6, pytest.param(600, marks=pytest.mark.slow)])
def test_soak(artifacts, tmp_path, seconds):
    found = json.loads(run(SOAK, artifacts, tmp_path / "rebuilt", seconds))
    assert found["calls"] > 1000
    assert min(found[name] for name in ("loads", "fork", "interrupt", "builds")) > 0, found
    first, *_, last = found["held"]
    # A kilobyte lost with each call would be ten times this.
    assert last["resident"] - first["resident"] < max(4 << 20, found["calls"] * 100), found
    assert last["descriptors"] <= first["descriptors"], found
