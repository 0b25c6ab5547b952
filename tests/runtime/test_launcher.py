"""The launcher, inside artifacts: each scenario runs in a process of its own that never imports tvm."""

import ctypes.util
import platform
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import spinning

from tvm_deconv.compiler.launcher import FLAGS, SOURCE, find_compiler, launcher_object
from tvm_deconv.errors import BuildError, CompilerNotFound

#: Functions of the C library in whose place the launcher calls those of the stress program.
HOOKS = {
    "pthread_create": "create",
    "sched_getaffinity": "affinity",
    "sched_setaffinity": "confine",
    "clock_gettime": "clock",
    "posix_memalign": "memalign",
    "free": "free",
}
STRESS = Path(__file__).parents[1] / "support" / "launcher_stress.c"

# Two artifacts, each `out[i, j] = factor * data[i, last - j] + 1`, parallel over rows, with a workspace of one row.
SHAPES = {"small": (64, 4096), "large": (8, 1 << 18)}
FACTORS = {"small": 2.0, "large": 3.0}

PRELUDE = f"""
import sys
sys.modules["torch"] = None  # tvm_ffi imports it where it is installed, which takes seconds and starts threads
import contextlib, ctypes, gc, os, re, resource, threading, time
from pathlib import Path
import numpy as np
import tvm_ffi

SHAPES, FACTORS = {SHAPES}, {FACTORS}
paths = dict(zip(SHAPES, sys.argv[1:]))
libs = {{name: ctypes.CDLL(path) for name, path in paths.items()}}
mains = {{name: tvm_ffi.load_module(path)["deconv_with"] for name, path in paths.items()}}
set_threads, get_threads = libs["small"].tvm_deconv_set_num_threads, libs["small"].tvm_deconv_get_num_threads

class Case:
    def __init__(self, name, limit=0, host=0):
        self.main, self.limit, self.host = mains[name], limit, host
        self.data = np.random.default_rng(0).random(SHAPES[name], dtype=np.float32)
        self.out = np.full_like(self.data, np.nan)
        self.wanted = self.data[:, ::-1] * np.float32(FACTORS[name]) + np.float32(1)
    def run(self):
        self.main(self.limit, 0, self.host, self.data, self.out)
    def check(self):
        self.out[:] = np.nan
        self.run()
        assert np.array_equal(self.out, self.wanted)

def worker_ids():
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if (task / "comm").read_text().strip() == "tvm_deconv": found.append(int(task.name))
    return found

def workers():
    return len(worker_ids())

def come_to(number, count=workers):  # a new thread names itself when it first runs; an ended one is listed for a moment
    end = time.time() + 10
    while count() != number and time.time() < end: time.sleep(0.001)
    return count() == number

def tasks():
    return len(os.listdir("/proc/self/task"))
"""


def _export(path: Path, addon: Path, rows: int, columns: int, factor: float) -> Path:
    import tvm
    from tvm import te

    data = te.placeholder((rows, columns), "float32", name="data")
    scaled = te.compute((rows, columns), lambda i, j: data[i, j] * tvm.tirx.const(factor, "float32"), name="scaled")
    out = te.compute((rows, columns), lambda i, j: scaled[i, columns - 1 - j] + 1.0, name="out")
    schedule = tvm.s_tir.Schedule(te.create_prim_func([data, out]).with_attr("global_symbol", "deconv"))
    row, _ = schedule.get_loops(schedule.get_sblock("out"))
    schedule.compute_at(schedule.get_sblock("scaled"), row)
    schedule.parallel(row)
    module = tvm.compile(schedule.mod, target={"kind": "llvm", "mcpu": "x86-64-v3"})
    module.export_library(str(path), addons=[str(addon)], cc=find_compiler())
    return path


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launcher")
    addon = launcher_object(find_compiler(), folder)
    return [_export(folder / f"{name}.so", addon, *SHAPES[name], FACTORS[name]) for name in SHAPES]


@pytest.fixture
def run(artifacts):
    def run(script: str, **environment: str) -> str:
        kept = {name: value for name, value in spinning().items() if name != "TVM_DECONV_NUM_THREADS"}
        command = [sys.executable, "-W", "error", "-W", "ignore:.*fork:DeprecationWarning", "-c", PRELUDE + script]
        command += map(str, artifacts)
        done = subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_needs_only_the_c_library_and_ffi(artifacts):
    for path in artifacts:
        dynamic = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=True).stdout
        needed = re.findall(r"NEEDED.*\[(.*?)\.so", dynamic)
        assert set(needed) <= {"libtvm_ffi", "libc", "libm", "libgcc_s", "libstdc++", "libpthread", "ld-linux-x86-64"}
        listing = subprocess.run(["nm", "-D", str(path)], capture_output=True, text=True, check=True).stdout
        symbols = listing.splitlines()
        undefined = [line.split()[1] for line in symbols if line.split()[0] == "U"]
        assert all("@GLIBC" in name or name.startswith("TVMFFI") for name in undefined)
        assert not any("__TVMBackend" in line for line in symbols)  # nothing outside can overwrite the hooks
        assert any(line.split()[1:] == ["u", "tvm_deconv_runtime_v5"] for line in symbols)


def test_self_contained_with_one_pool(run):
    run("""
for name in SHAPES:
    for threads in (4, 1, 3, 4):
        set_threads(threads)
        Case(name).check()
    assert come_to(3)
assert not {name for name in sys.modules if name == "tvm" or name.startswith("tvm.")}
assert not {"libtvm_runtime", "libtvm_compiler"} & set(re.findall("libtvm_[a-z]+", Path("/proc/self/maps").read_text()))
""")


def test_number_of_threads(run):
    script = """
cpus = len(os.sched_getaffinity(0))
assert get_threads() == int(os.environ.get("EXPECTED", cpus))
assert set_threads(5) == int(os.environ.get("EXPECTED", cpus)) and get_threads() == 5
assert libs["large"].tvm_deconv_get_num_threads() == 5
assert set_threads(-1) == -1 and set_threads(1 << 20) == -1 and get_threads() == 5
assert set_threads(0) == 5 and get_threads() == int(os.environ.get("EXPECTED", cpus))
"""
    run(script)
    run(script, TVM_DECONV_NUM_THREADS="3", EXPECTED="3")
    run(script, TVM_DECONV_NUM_THREADS="3 threads")


def test_limit_is_of_one_call(run):
    run("""
set_threads(4)
Case("small", 1).check()
time.sleep(0.05)
assert workers() == 0
Case("small").check()
assert come_to(3)
case = Case("small", 1 << 40)
case.check()
for wrong in (("1", 0, 0), (0, None, 0), (0, 0, "0"), (-1, 0, 0), (0, 0), ()):
    try:
        case.main(*wrong)
    except TypeError as error:
        assert str(error) == "threads, arena, host: must be integers, before the arguments of deconv"
    else:
        raise AssertionError(wrong)
""")


def test_a_function_of_the_same_name_elsewhere_is_not_called(run, tmp_path):
    """Also if it is in every library's sight, as that of an artifact loaded with RTLD_GLOBAL."""
    (tmp_path / "other.c").write_text("int __tvm_ffi_deconv(void) { __builtin_trap(); }")
    command = [find_compiler(), "-x", "c", "-shared", "-fPIC", tmp_path / "other.c", "-o", tmp_path / "other.so"]
    subprocess.run(command, check=True)
    run('Case("small").check()', LD_PRELOAD=str(tmp_path / "other.so"))


def test_outlives_the_artifact_loaded_first(run):
    run("""
set_threads(4)
Case("small").check()
handle = libs.pop("small")._handle
del set_threads, get_threads
mains.pop("small")
gc.collect()
ctypes.CDLL(None).dlclose(ctypes.c_void_p(handle))
Case("large").check()
assert come_to(3)
""")


def test_openmp_as_host(run):
    # Its team computes in place of the pool: the same results, in the caller's rounding mode, on any number of threads.
    if not ctypes.util.find_library("gomp"):
        pytest.skip("no libgomp")
    run("""
class Host(ctypes.Structure):
    _fields_ = [("parallel_for", ctypes.c_void_p), ("context", ctypes.c_void_p)]

gomp, made = ctypes.CDLL("libgomp.so.1"), Host()
libs["small"].tvm_deconv_make_openmp_host(ctypes.byref(made), ctypes.cast(gomp.GOMP_parallel, ctypes.c_void_p))
host = ctypes.addressof(made)
set_threads(4)
gomp.omp_set_num_threads(4)
before = tasks()
for name in SHAPES:
    for limit in (0, 1, 2, 3, 9):
        Case(name, limit, host).check()
assert come_to(before + 3, tasks) and workers() == 0

set_round = ctypes.CDLL("libm.so.6").fesetround
case, serial = Case("large", 0, host), Case("large", 1)
for mode in (0x800, 0):
    set_round(mode)
    case.run(), serial.run()
    set_round(0)
    assert np.array_equal(case.out, serial.out) and np.array_equal(case.out, case.wanted) == (mode == 0)

failed = []
def caller():
    try:
        for _ in range(20): Case("small", 0, host).check()
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=caller) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failed, failed
assert workers() == 0

pid = os.fork()
if pid == 0:  # OpenMP has no threads here, and would wait for them; the pool starts
    try:
        Case("small").check()
        assert come_to(3)
        os._exit(0)
    finally:
        os._exit(1)
assert os.waitpid(pid, 0)[1] == 0
case.check()
""")


def test_forked_child(run):
    run("""
import multiprocessing
set_threads(4)
case = Case("small")
case.check()

def child():
    try:
        assert workers() == 0
        case.check()
        case.check()
        assert come_to(3) and get_threads() == 4
        os._exit(0)
    finally:
        os._exit(1)

def fork():
    pid = os.fork()
    if pid == 0:
        child()
    assert os.waitpid(pid, 0)[1] == 0
    case.check()

fork()
stop = False
def load():
    mine = Case("large")
    while not stop:
        mine.check()
threads = [threading.Thread(target=load) for _ in range(3)]
for thread in threads: thread.start()
try:
    for _ in range(25): fork()
finally:
    stop = True
    for thread in threads: thread.join()

def total(factor):
    case.check()
    return factor * float(case.out.sum())
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(total, range(6)) == [total(factor) for factor in range(6)]
""")


def test_concurrent_callers(run):
    run("""
failed = []
def caller(seed):
    random = np.random.default_rng(seed)
    cases = [Case("small"), Case("large")]
    try:
        for _ in range(40):
            if random.random() < 0.3: set_threads(int(random.integers(1, 7)))
            case = cases[int(random.random() < 0.1)]
            case.limit = int(random.integers(0, 4)) if random.random() < 0.3 else 0
            case.check()
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=caller, args=(seed,)) for seed in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failed, failed
assert workers() <= 5
""")


def test_rounding_mode_is_that_of_the_caller(run):
    # In every thread that computes, whatever the mode was when the thread began, and after the call.
    run("""
UPWARD = 0x800  # of FE_UPWARD on x86
set_round = ctypes.CDLL("libm.so.6").fesetround
set_threads(4)
case = Case("small")
def result(mode, limit):
    set_round(mode)
    case.limit = limit
    case.run()
    set_round(0)
    return case.out.copy()
upward, nearest = result(UPWARD, 0), result(0, 1)
assert come_to(3)
assert not np.array_equal(upward, nearest)
for _ in range(100):
    assert np.array_equal(result(0, 0), nearest)
    assert np.array_equal(result(UPWARD, 0), upward)
assert np.array_equal(result(UPWARD, 1), upward)
""")


def test_affinity(run):
    # The caller's is untouched, and workers are not confined to that of whichever thread starts them.
    run("""
everywhere = os.sched_getaffinity(0)
here = {min(everywhere)}
set_threads(3)
def caller():
    os.sched_setaffinity(0, here)
    Case("small").check()
    assert os.sched_getaffinity(0) == here
thread = threading.Thread(target=caller)
thread.start(); thread.join()
assert os.sched_getaffinity(0) == everywhere
assert come_to(2)
assert [os.sched_getaffinity(worker) for worker in worker_ids()] == [everywhere, everywhere]
set_threads(2)  # of two or more processors: workers are confined for the moment in which they wake
def sleepers():
    states = [Path(f"/proc/self/task/{worker}/stat").read_text().split()[2] for worker in worker_ids()]
    return states.count("S")
for here in everywhere, {max(everywhere)}:
    for worker in worker_ids():
        os.sched_setaffinity(worker, here)
    for _ in range(3):
        assert come_to(2, sleepers)
        Case("small").check()
    assert come_to(2, sleepers)  # who was woken has run
    assert [os.sched_getaffinity(worker) for worker in worker_ids()] == [here, here]
""")


def test_idle_pool_sleeps(run):
    run("""
set_threads(4)
case = Case("small")
def idle():
    for _ in range(20): case.run()
    before = time.process_time()
    time.sleep(0.3)
    return time.process_time() - before
used = [idle() for _ in range(3)]  # threads may still start in the first
assert min(used) < 0.010, used
""")


def test_repeated_calls_allocate_nothing(run):
    run("""
set_threads(2)
case = Case("large")
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20): case.run()
before = faults()
for _ in range(20): case.run()
assert faults() - before < 100, faults() - before  # a fresh workspace for every row would be 40000
""")


def test_workspace_is_freed_with_its_thread(run):
    run("""
case = Case("large", 1)
def caller():
    case.run()
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
before = resident()
for _ in range(100):
    thread = threading.Thread(target=caller)
    thread.start(); thread.join()
assert resident() - before < 20 << 20  # of 100 MiB
""")


def test_out_of_memory_is_an_error_of_the_call(run):
    # In the caller or in a worker: the error object reaches the caller, and the pool goes on.
    run("""
malloc = ctypes.CDLL(None).malloc
malloc.restype = ctypes.c_void_p
case = Case("large")
for threads in (1, 4):
    set_threads(threads)
    Case("small").check()
    assert come_to(threads - 1)  # thread-local data of a thread that begins now would find no memory either
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (size, hard))
    while malloc(1 << 20): pass  # what the heap still has
    try:
        case.run()
    except MemoryError as error:
        text = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    assert text == "nbytes=1048576: no memory for the workspace", text
    Case("small").check()
case.check()
""")


def test_exit_with_a_thread_inside_a_call(run):
    # Called through ctypes: what tvm_ffi's frames do when the interpreter ends a daemon thread is not the launcher's.
    script = """
class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64)]
class Any(ctypes.Structure):
    _fields_ = [("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", ctypes.c_void_p)]

def tensor(array, shape):
    return Tensor(array.ctypes.data, (1, 0), 2, 2, 32, 1, ctypes.addressof(shape), None, 0)

def caller(started):
    case = Case("large")
    shape = (ctypes.c_int64 * 2)(*case.data.shape)
    tensors = [tensor(case.data, shape), tensor(case.out, shape)]
    arguments = (Any * 2)(*[Any(7, 0, ctypes.addressof(each)) for each in tensors])
    result = Any()
    function = libs["large"].__tvm_ffi_deconv
    while True:
        assert function(None, arguments, 2, ctypes.byref(result)) == 0
        if started is not None:
            assert np.array_equal(case.out, case.wanted)
            started.set()
            started = None

set_threads(4)
for _ in range(3):
    started = threading.Event()
    threading.Thread(target=caller, args=(started,), daemon=True).start()
    assert started.wait(20)
"""
    for _ in range(2):
        run(script)


def _build_stress(folder: Path, *flags: str) -> Path:
    cc, program = find_compiler(), folder / "stress"
    objects = [folder / f"{source.stem}.o" for source in (SOURCE, STRESS)]
    for source, made in zip((SOURCE, STRESS), objects, strict=True):
        hooks = [f"-D{name}=hooked_{hook}" for name, hook in HOOKS.items()] if source == SOURCE else []
        command = [cc, "-x", "c", *FLAGS, "-Werror", "-g", *hooks, *flags, "-c", str(source), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True)
    subprocess.run([cc, "-pthread", *flags, *map(str, objects), "-o", str(program)], check=True, capture_output=True)
    return program


@pytest.fixture(scope="module")
def stress(tmp_path_factory):
    return _build_stress(tmp_path_factory.mktemp("stress"))


MODES = ("failures", "lanes", "nested", "fork", "turns", "keep", "asleep", "elsewhere", "host")
MOMENTS = [(mode, 1) for mode in MODES]


LONG = pytest.param("rendezvous", 30000, marks=pytest.mark.slow)  # minutes where another program takes a CPU


@pytest.mark.parametrize(("mode", "rounds"), [*MOMENTS, ("storm", 1000), ("rendezvous", 3000), LONG])
def test_stress(stress, mode, rounds):
    done = subprocess.run([stress, mode, str(rounds)], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """The stress program under ThreadSanitizer, as a command; skips where that does not run."""
    try:
        program = str(_build_stress(tmp_path_factory.mktemp("tsan"), "-fsanitize=thread"))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the compiler has no ThreadSanitizer: {error.stderr.decode().strip()}")
    commands = [[program]]
    if shutil.which("setarch"):  # the sanitizer's fixed addresses may clash with randomised ones
        commands.append(["setarch", platform.machine(), "-R", program])
    for command in commands:
        tried = subprocess.run([*command, "storm", "0"], capture_output=True, text=True, timeout=60, check=False)
        if tried.returncode == 0:
            return command
    pytest.skip(f"ThreadSanitizer does not run here: {tried.stderr.strip()[:200]}")


@pytest.mark.parametrize(("mode", "rounds"), [("storm", 200), ("rendezvous", 1000), ("host", 1)])
def test_no_data_race(sanitized, mode, rounds):
    done = subprocess.run([*sanitized, mode, str(rounds)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compiler_from_the_environment(monkeypatch, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho sorry >&2\nexit 1\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(compiler))
    assert find_compiler() == str(compiler)
    with pytest.raises(BuildError, match="the launcher does not compile:\nsorry"):
        launcher_object(find_compiler(), tmp_path)
    assert sorted(tmp_path.iterdir()) == [compiler]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX")
    assert find_compiler() == str(compiler)


def test_missing_compiler(monkeypatch, tmp_path):
    for wanted in ("no-such-compiler", f"env {find_compiler()}", f"{find_compiler()} -O1"):
        monkeypatch.setenv("CXX", wanted)
        rule = "no such program; set CXX to the path of a C++ compiler, with no other words, or unset it"
        with pytest.raises(CompilerNotFound, match=f"^{re.escape(f'CXX={wanted!r}: {rule}')}$"):
            find_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompilerNotFound, match=r"no C\+\+ compiler here .*; install g\+\+ or set CXX"):
        find_compiler()
    with pytest.raises(CompilerNotFound, match=r"does not start \(No such file or directory\); set CXX"):
        launcher_object(str(tmp_path / "gone"), tmp_path)
