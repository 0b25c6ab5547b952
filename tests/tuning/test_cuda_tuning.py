"""The search on a CUDA device, with a driver whose memory is the CPU's and g++ in the place of nvcc."""

import ctypes
import dataclasses
import itertools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support.cuda_kernels import compile_driver
from support.fake_nvcc import write_nvcc

import tvm_deconv as td
from tvm_deconv import targets
from tvm_deconv.cli.main import main
from tvm_deconv.compiler import build, nvcc, selection
from tvm_deconv.compiler.backends import BACKENDS
from tvm_deconv.compiler.backends import cuda as cuda_backend
from tvm_deconv.compiler.backends.cuda import CudaToolchain
from tvm_deconv.compiler.fingerprint import kernel_digest
from tvm_deconv.compiler.process import Refusal
from tvm_deconv.compiler.records import Log, Schedule, read
from tvm_deconv.errors import DeviceError, ProblemError
from tvm_deconv.schedules.cuda.algorithms import ALGORITHMS
from tvm_deconv.targets import CUDA_TARGETS
from tvm_deconv.tuning import tournament, tune
from tvm_deconv.tuning.builders import Builder
from tvm_deconv.tuning.entrants import choose, prepare
from tvm_deconv.tuning.runners.cuda import CudaMachine
from tvm_deconv.tuning.runners.harness import Baseline, Harness

PROBLEM = td.Problem(1, 1, 70, 9, (5, 6), (2, 2), (2, 2), (1, 1), (0, 0), (10, 12), epilogue=td.Epilogue(True, "relu"))
SM_90 = CUDA_TARGETS["cuda-sm_90"]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def driver():
    """A folder with libcuda.so.1."""
    return compile_driver().parent


@pytest.fixture
def device(driver, tmp_path, monkeypatch):
    """A machine with a device and nvcc, for this process and those that it starts."""
    monkeypatch.setenv("NVCC", str(write_nvcc(tmp_path)))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver))
    monkeypatch.setattr(targets.cuda, "DRIVER", str(driver / "libcuda.so.1"))
    targets.cuda_capability.cache_clear()
    nvcc.find_nvcc.cache_clear()
    yield driver
    targets.cuda_capability.cache_clear()
    nvcc.find_nvcc.cache_clear()


@pytest.fixture(scope="module")
def default(tmp_path_factory):
    """The default schedule of the problem as a builder makes it, once: only what measures it differs."""
    folder = tmp_path_factory.mktemp("default")
    return Builder(SM_90, folder, CudaToolchain(str(write_nvcc(folder)))).build(PROBLEM.artifact_key, _default())


@pytest.mark.usefixtures("device", "searches_here")
def test_a_search_and_what_follows_it(tmp_path):
    logs = tmp_path / "logs"
    told = []
    (tuned,) = tune([PROBLEM], "cuda-sm_90", 4, logs, jobs=1, seed=3, on_trial=told.append)
    assert tuned.target == "cuda-sm_90"
    assert tuned.trials > 1
    assert tuned.best.seconds <= tuned.default.seconds
    assert tuned.floor > 0
    records = list(read("cuda-sm_90", logs))
    assert [record.schedule for record in records if record.seconds is not None]
    assert {record.host for record in records} == {"Shim GPU"}
    for record in records:
        if record.knobs.get("stages") == 4:
            assert "spills 260 bytes" in record.error
        else:
            assert record.error == "", record
    assert len(told) == tuned.trials
    # It is not tried again, and builds follow it.
    assert tune([PROBLEM], "cuda-sm_90", tuned.trials, logs)[0].trials == tuned.trials
    chosen = tuple(selection.choices_for(PROBLEM, SM_90, read("cuda-sm_90", logs)))
    manifest = build.export(PROBLEM, SM_90, tmp_path / "built", choices=chosen)
    assert (manifest.origin, manifest.algorithm) == ("tuned", tuned.best.algorithm)
    assert manifest.knobs == tuned.best.knobs


@pytest.mark.usefixtures("device")
def test_candidates_are_held_against_the_default(tmp_path):
    """What does not wait for its copies fails; what spills is not even made; a split sum has its workspace."""
    compiler = Path(nvcc.find_nvcc())
    compiler.write_text(
        compiler.read_text().replace("for_cpu(text)", "for_cpu(text.replace('tvm_deconv_wait1();', ''))")
    )
    builder, harness = Builder(SM_90, tmp_path, CudaToolchain(str(compiler))), Harness(CudaMachine, 0)
    problem = PROBLEM.replace(dtype="int8", in_channels=300, epilogue=td.Epilogue())
    two, split, three, four = (
        Schedule.of("cuda_product", _plans(problem, tile_m=64, tile_k=16, **wanted)[0].knobs)
        for wanted in ({"stages": 2, "split": 1}, {"stages": 2, "split": 2}, {"stages": 3}, {"stages": 4})
    )
    default = builder.build(problem.artifact_key, two)
    harness.prepare(Baseline(problem.artifact_key, 1, default), 60.0)
    assert harness.measure(default, 1.0, 60.0).ratio > 0
    assert harness.measure(builder.build(problem.artifact_key, split), 1.0, 60.0).ratio > 0
    wrong = builder.build(problem.artifact_key, three)
    with pytest.raises(Exception, match="a copy that nothing waits for"):
        harness.measure(wrong, 1.0, 60.0)
    with pytest.raises(Refusal, match="deconv_kernel spills 260 bytes, its stack has 0"):
        builder.build(problem.artifact_key, four)


def _default():
    return selection.default_schedule(PROBLEM, SM_90)


def _plans(problem, **wanted):
    (algorithm,) = (algorithm for algorithm in ALGORITHMS if algorithm.name == "cuda_product")
    found = [plan for _, plan in algorithm.candidates(problem, SM_90)]
    return [plan for plan in found if all(getattr(plan, name) == value for name, value in wanted.items())]


@pytest.mark.usefixtures("driver")
def test_without_a_device_it_says_what_it_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(targets.cuda, "DRIVER", "libcuda-that-is-not-there.so.1")
    targets.cuda_capability.cache_clear()
    with pytest.raises(DeviceError) as caught:
        tune([PROBLEM], "cuda-sm_90", 1, tmp_path)
    assert str(caught.value) == (
        "target='cuda-sm_90': is tuned on a device of compute capability 9.0 and later 9.x: device='cuda:0': needs "
        "NVIDIA's driver: libcuda-that-is-not-there.so.1 is not found"
    )
    path = tmp_path / "list.json"
    path.write_text('[{"data": [1, 2, 5], "filter": [1, 2, 3, 4], "strides": [3]}]')
    result = CliRunner().invoke(main, ["tune", str(path), "--target", "cuda-sm_90", "--logs", str(tmp_path)])
    assert result.exit_code != 0
    assert "is tuned on a device of compute capability 9.0" in result.output
    targets.cuda_capability.cache_clear()


@pytest.mark.usefixtures("device")
def test_trials_are_compiled_for_the_device_alone(monkeypatch):
    backend, every = BACKENDS["cuda"], CUDA_TARGETS["cuda"]
    assert backend.trial_target(every) == dataclasses.replace(every, code=((9, 0),), ptx=())
    monkeypatch.setattr(cuda_backend, "cuda_capability", lambda: (12, 0))
    assert backend.trial_target(every) == every  # that nvcc does not know it: by PTX


@pytest.mark.usefixtures("device")
def test_another_device_or_machine_is_refused(tmp_path):
    with pytest.raises(DeviceError, match=r"target='cuda-sm_80': is tuned on a device .* 8\.x: this one has 9\.0"):
        tune([PROBLEM], "cuda-sm_80", 1, tmp_path)
    assert not Log(tmp_path).targets()


@pytest.mark.usefixtures("device")
def test_the_device_as_a_machine():
    ctypes.CDLL(targets.cuda.DRIVER)
    machine = CudaMachine(0)
    assert (machine.host().name, machine.host().cores) == ("Shim GPU", 4)
    assert machine.multiply_adds("float16") == 4 * 2048e9
    assert machine.copy() > 0
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    memory = machine.put(values)
    np.testing.assert_array_equal(machine.read(memory.address, memory.shape, memory.dtype), values)
    output = machine.output((3, 4), np.dtype("float32"))
    output.poison(0xFF)
    assert output.intact(0xFF)
    assert np.isnan(output.read()).all()
    for beyond in (-1, output.argument.nbytes):
        output.poison(0xFF)
        machine.fill(output.argument.address + beyond, 0, 1)
        assert not output.intact(0xFF)
    with pytest.raises(DeviceError, match="cuDeviceGet says 101"):
        CudaMachine(1)


@pytest.mark.parametrize(
    ("level2", "memory"), [(0, 1 << 24), (2**31 - 1, 1 << 24), (2**31, 1 << 24), (1 << 20, 60_000)], ids=str
)
@pytest.mark.usefixtures("device")
def test_a_device_that_lies_about_its_memory(level2, memory, default, monkeypatch):
    """It says that its cache is nothing, more than its memory, or less than nothing: what fits is timed."""
    monkeypatch.setenv("SHIM_LEVEL2", str(level2))
    monkeypatch.setenv("SHIM_MEMORY", str(memory))
    harness = Harness(CudaMachine, 0)
    assert 0 < harness.copy(60.0) < float("inf")
    harness.prepare(Baseline(PROBLEM.artifact_key, 1, default), 60.0)
    assert harness.measure(default, 1.0, 60.0).ratio > 0


@pytest.mark.usefixtures("device")
def test_a_device_without_memory_is_an_error_of_the_device(monkeypatch):
    monkeypatch.setenv("SHIM_MEMORY", "100")
    machine = CudaMachine(0)
    for use in (machine.copy, lambda: machine.put(np.ones(101, np.uint8))):
        with pytest.raises(DeviceError, match="cuMemAlloc_v2 says 2"):
            use()


def _counts():
    """The graphs of the driver that are alive, and how many were launched so far."""
    driver = ctypes.CDLL(targets.cuda.DRIVER)
    return [ctypes.c_int.in_dll(driver, name).value for name in ("shim_graphs", "shim_launches")]


def _copying(machine, size=64):
    """A function that enqueues a copy on the machine's stream, and whether it was done."""
    source, copy = machine.put(np.ones(size, np.uint8)), machine.put(np.zeros(size, np.uint8))
    addresses = ctypes.c_uint64(copy.address), ctypes.c_uint64(source.address), ctypes.c_size_t(size)
    return (
        lambda: machine._ask("cuMemcpyDtoDAsync_v2", *addresses, machine._stream),
        lambda: source is not None and machine.read(copy.address, (size,), np.dtype(np.uint8)).all(),
    )


@pytest.mark.usefixtures("device")
def test_times_are_of_graphs_without_the_host():
    """The time that the host takes for a call is not in the samples; all turns have theirs."""
    machine, calls = CudaMachine(0), []
    enqueue, done = _copying(machine)

    def call(turn):
        time.sleep(0.002)
        calls.append(turn)
        enqueue()

    alive, launched = _counts()
    times = machine.sample(call, 3, 2, 5)
    assert len(times) == 5
    assert max(times) < 0.002
    assert calls == [0, 1, 2, 0, 1, 2]  # graphs that begin with the turns 0, 2 and 1, of two calls each
    assert done()
    assert _counts() == [alive, launched + 6]  # one more than are timed


@pytest.mark.parametrize("why", ["capture is not permitted", "the call is not captured", "the call fails in a capture"])
@pytest.mark.usefixtures("device")
def test_calls_that_make_no_graph_are_timed_one_by_one(why, monkeypatch):
    machine, calls = CudaMachine(0), []
    enqueue, done = _copying(machine)
    if why == "capture is not permitted":
        monkeypatch.setenv("SHIM_NO_CAPTURE", "1")

    def call(turn):
        calls.append(turn)
        if why == "the call fails in a capture":
            machine._ask("cuCtxSynchronize")
        if why != "the call is not captured":
            enqueue()

    alive, launched = _counts()
    times = machine.sample(call, 3, 2, 5)
    assert len(times) == 5
    assert min(times) >= 0
    assert calls[-12:] == [0, 1, 2, 0, 1, 2] * 2
    assert done() == (why != "the call is not captured")
    assert _counts() == [alive, launched]


@pytest.mark.usefixtures("device")
def test_candidates_are_timed_by_graphs(default):
    machine = CudaMachine(0)
    data = machine.put(np.ones(PROBLEM.data_shape, np.float32))
    bias = machine.put(np.ones(PROBLEM.bias_shape, np.float32))
    packed = machine.put(np.ones(default.packed_elements, default.packed_dtype))
    output = machine.output(PROBLEM.output_shape, np.dtype(np.float32))
    bound = machine.bind(default.deconv, "deconv", (data, packed, bias, output.argument))
    bound.run()
    wanted = output.read()
    output.poison(0xFF)
    _, launched = _counts()
    assert min(bound.sample(40, 2)) > 0
    assert _counts()[1] == launched + 3
    np.testing.assert_array_equal(output.read(), wanted)  # by the graphs, whose first turn is of these arrays


#: Measures without what compiles, in this process and those that it starts.
HOLD = """
import sys
from pathlib import Path
from tvm_deconv.tuning.tournament import hold
said = lambda match, records: print(match.key, *(record["error"] or "ok" for record in records))
print("left", hold(Path(sys.argv[1]), Path(sys.argv[2]), seconds=float(sys.argv[3]), on_match=said))
"""


def _hold(prepared, logs, scratch, seconds=60.0):
    """What the tournament prints in a process without TVM, nvcc, and the packages of builds."""
    for name in ("tvm", "msgspec", "click"):
        (scratch / name).mkdir(parents=True, exist_ok=True)
        (scratch / name / "__init__.py").write_text("raise ImportError('is not there')")
    environment = os.environ | {"NVCC": "no-nvcc", "PYTHONPATH": os.pathsep.join([str(scratch), str(ROOT)])}
    command = [sys.executable, "-c", HOLD, prepared, logs, str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.usefixtures("device", "searches_here")
def test_a_tournament_without_a_compiler(tmp_path, monkeypatch):
    """Plans that are compiled here become records of an ordinary log there."""
    monkeypatch.setattr(targets.cuda, "DRIVER", "libcuda-that-is-not-there.so.1")
    prepare([PROBLEM], "cuda-sm_90", tmp_path / "prepared", plans=6, jobs=1, seed=5)
    (tmp_path / "nvcc").unlink()  # nothing is compiled again
    prepare([PROBLEM], "cuda-sm_90", tmp_path / "prepared", plans=6, jobs=1, seed=6)
    made = [schedule for schedule in choose(PROBLEM, SM_90, 6) if dict(schedule.knobs)["stages"] < 4]  # no spill
    assert len(made) == 2
    logs, other = tmp_path / "logs", PROBLEM.replace(batch=2).artifact_key
    (match,) = tournament.read(tmp_path / "prepared")
    gone = dataclasses.replace(match.entrants[0].built, deconv=Path("not-there.so"))
    broken = [tournament.Entrant(gone, entrant.record | {"problem": other}) for entrant in match.entrants]
    second = dataclasses.replace(match, key=other, log="cuda-sm_90/other.jsonl", entrants=tuple(broken))
    tournament.write(tmp_path / "prepared", [match, second])
    assert _hold(tmp_path / "prepared", logs, tmp_path / "fakes", 0.0) == ["left 2"]
    assert not logs.exists()
    # An archive of the directory is unpacked elsewhere.
    there = shutil.move(tmp_path / "prepared", tmp_path / "elsewhere")
    first, second, left = _hold(there, logs, tmp_path / "fakes")
    assert first.split() == [PROBLEM.artifact_key, "ok", "ok"]
    assert "the default does not run" in second
    assert left == "left 0"
    assert _hold(there, logs, tmp_path / "fakes") == ["left 0"]
    records = read("cuda-sm_90", logs)
    assert not records.warnings
    found = records.by_problem[PROBLEM.artifact_key]
    assert [record.schedule for record in found] == made
    assert all((record.host, record.seed, record.error) == ("Shim GPU", 5, "") for record in found)
    assert found[0].default_ratio == 1.0
    assert all(record.seconds > 0 for record in found)
    assert {record.sources for record in found} == {kernel_digest("cuda")}
    assert all(record.error for record in records.by_problem[other])


def test_the_entrants_of_a_tournament_are_unlike_each_other():
    problem = PROBLEM.replace(batch=8, in_channels=256, out_channels=64, data_spatial=(16, 16), output_spatial=(32, 32))
    chosen = choose(problem, SM_90, 8)
    assert len(set(chosen)) == len(chosen) == 8
    assert chosen[0] == selection.default_schedule(problem, SM_90)
    for one, other in itertools.combinations(chosen, 2):
        assert one.algorithm != other.algorithm or selection.distance(one, other) >= 2
    with pytest.raises(ProblemError, match="target='x86-64-v3': must be a CUDA target"):
        prepare([problem], "x86-64-v3", Path("nowhere"))
    with pytest.raises(ProblemError, match="directory=nowhere: must hold a prepared tournament"):
        tournament.read(Path("nowhere"))


@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM.replace(batch=8, out_channels=64, data_spatial=(16, 16), output_spatial=(32, 32)),
        PROBLEM.replace(dtype="float16", data_format="NXC", in_channels=64),
        PROBLEM.replace(precision="tf32"),
        PROBLEM.replace(dtype="float64"),
        td.Problem(2, 64, 1, 1, (6, 8), (4, 4), (2, 2), (1, 1), (1, 1), (12, 16)),
        td.Problem(1, 1, 3, 2, (5, 5), (7, 7), (8, 8), (3, 3), (2, 3), (40, 43)),
    ],
)
def test_the_space_holds_the_default_and_stays_in_limits(problem):
    found = [*selection.space(problem, SM_90)]
    assert selection.default_schedule(problem, SM_90) in [candidate.schedule for candidate in found]
    assert all(candidate.cost > 0 for candidate in found)
    for candidate in found:
        plan = selection.plan_of(candidate.schedule)
        assert Schedule.of(candidate.schedule.algorithm, plan.knobs) == candidate.schedule
        if "stages" in plan.knobs:
            from tvm_deconv.schedules.cuda import product, tensor

            form = (product.Threads if candidate.schedule.algorithm == "cuda_product" else tensor.Warps)(problem, plan)
            together = max(1, form.resident // form.threads)  # blocks of a multiprocessor of 164 KiB, at least
            assert form.registers * form.threads * together <= 64 << 10
            assert form.memory_bytes <= (99 << 10 if together == 1 else (164 << 10) // together - (1 << 10))
