"""A search on the CUDA devices of a tracker's servers, whose driver is the shim's; this machine has none."""

import dataclasses
import subprocess

import numpy as np
import pytest
from support.fake_nvcc import write_nvcc
from support.fleet import until

import tvm_deconv as td
from tvm_deconv import targets
from tvm_deconv.compiler import nvcc, selection
from tvm_deconv.compiler.backends.cuda import CudaToolchain
from tvm_deconv.compiler.launcher import find_compiler
from tvm_deconv.compiler.process import WorkerError
from tvm_deconv.compiler.records import read
from tvm_deconv.targets import CUDA_TARGETS
from tvm_deconv.tuning import tune
from tvm_deconv.tuning.builders import Builder
from tvm_deconv.tuning.runners.harness import Baseline
from tvm_deconv.tuning.runners.rpc import Servers, build_probe
from tvm_deconv.tuning.runners.rpc_cuda import _PROBE, Device, RpcCudaMachine, RpcCudaRunner
from tvm_deconv.tuning.runners.tracker import Tracker

PROBLEM = td.Problem(1, 1, 70, 9, (5, 6), (2, 2), (2, 2), (1, 1), (0, 0), (10, 12), epilogue=td.Epilogue(True, "relu"))
SM_90 = CUDA_TARGETS["cuda-sm_90"]


@pytest.fixture(autouse=True)
def compiler(tmp_path, monkeypatch):
    """Nvcc, which is here; and no driver of this machine."""
    monkeypatch.setenv("NVCC", str(write_nvcc(tmp_path)))
    monkeypatch.setattr(targets.cuda, "DRIVER", "libcuda-that-is-not-there.so.1")
    caches = targets.cuda_capability, nvcc.find_nvcc
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_a_search_on_the_device_of_a_server(fleet, tmp_path):
    tracker = fleet.trackers["alone"]
    how = {"jobs": 1, "rpc_tracker": tracker.address, "rpc_key": tracker.key}
    # Of a target for several devices the candidates are for that of the server.
    (tuned,) = tune([PROBLEM], "cuda", 3, tmp_path, seed=3, **how)
    assert tuned.trials > 1
    assert tuned.best.seconds <= tuned.default.seconds
    assert tuned.floor > 0
    records = list(read("cuda", tmp_path))
    assert {record.host for record in records} == {"Shim GPU"}
    assert {record.seed for record in records} == {3}
    assert any(record.default_ratio for record in records)
    for record in records:
        assert record.error == "" or (record.knobs["stages"] == 4 and "spills" in record.error), record


#: The host code of a kernel: `BODY` is C. Memory of the shim's device is the CPU's.
_HOST = """
    #include <dlfcn.h>
    #include <stdint.h>
    #include <unistd.h>
    struct any { int32_t type; uint32_t zero; union { float **tensor; int64_t number; }; };
    void TVMFFIErrorSetRaisedFromCStr(const char *, const char *);
    void *TVMFFIEnvGetStream(int, int);
    static void *of_driver(const char *name) { return dlsym(dlopen("libcuda.so.1", RTLD_LAZY), name); }
    int __tvm_ffi_deconv(void *self, const struct any *arguments, int32_t count, struct any *result) {
        float *out = *arguments[count - 1].tensor;
        BODY
        return 0;
    }
    int __tvm_ffi_launches(void *self, const struct any *arguments, int32_t count, struct any *result) {
        *result = (struct any){1, 0, .number = *(int *)of_driver("shim_launches")};
        return 0;
    }
"""


def host_code(folder, body):
    """The path of a library of this host code."""
    path = folder / "host.so"
    command = [find_compiler(), "-x", "c", "-shared", "-fPIC", "-o", str(path), "-"]
    subprocess.run(command, input=_HOST.replace("BODY", body), text=True, check=True)
    return path


def test_a_bad_candidate_is_to_blame_and_its_server_is_not(fleet, tmp_path):
    key = PROBLEM.artifact_key
    default = selection.default_schedule(PROBLEM, SM_90)
    good = Builder(SM_90, tmp_path, CudaToolchain(nvcc.find_nvcc())).build(key, default)
    baseline = Baseline(key, 0, good)

    def outcome(body, seconds=60.0):
        path = host_code(tmp_path, body)
        with pytest.raises(WorkerError) as caught:
            runner.measure(baseline, dataclasses.replace(good, deconv=path), 1.0, seconds)
        assert not caught.value.died
        return str(caught.value)

    with RpcCudaRunner(fleet.trackers["alone"], [SM_90]) as runner:
        assert outcome("out[-1] = 0;") == "ArithmeticError: wrote outside of its output"
        assert outcome("for (;;) {}", 1.0) == "TimeoutError: did not end within 1 s"
        fails = 'TVMFFIErrorSetRaisedFromCStr("RuntimeError", "CUDA: an illegal memory access"); return -1;'
        assert outcome(fails) == "RuntimeError: CUDA: an illegal memory access"
        assert runner.measure(baseline, good, 1.0, 60.0).ratio > 0


def test_servers_without_a_fitting_device(fleet, tmp_path):
    tracker = fleet.trackers["alone"]
    how = {"rpc_tracker": tracker.address, "rpc_key": tracker.key}
    tuned_on = r"is tuned on a device of compute capability {0}.0 and later {0}.x: that of the server 127.0.0.1:\d+"
    with pytest.raises(td.DeviceError, match=f"target='cuda-sm_100': {tuned_on.format(10)} has 9.0"):
        tune([PROBLEM], "cuda-sm_100", 1, tmp_path, **how)
    kept = fleet.driver.rename(tmp_path / "driver")
    try:
        missing = "is missing: needs NVIDIA's driver: libcuda.so.1 is not found"
        with pytest.raises(td.DeviceError, match=f"{tuned_on.format(9)} {missing}"):
            tune([PROBLEM], ["native", "cuda-sm_90"], 1, tmp_path, **how)
    finally:
        kept.rename(fleet.driver)
    assert not [*tmp_path.glob("**/*.jsonl")]


def test_devices_of_two_kinds_under_one_key_are_refused():
    runner = RpcCudaRunner.__new__(RpcCudaRunner)
    runner._targets, runner._tracker = [SM_90], Tracker("127.0.0.1", 9190, "gpus")
    runner._host = Device(frozenset(), "H100", address="one:1", capability=(9, 0))
    runner._admit(dataclasses.replace(runner.host, address="two:2"))
    for other in ({"name": "H200"}, {"capability": (9, 1)}):
        with pytest.raises(td.RemoteError, match=r"rpc_key='gpus': .* of two kinds, H100 \(9.0\) and H\d00 \(9"):
            runner._admit(dataclasses.replace(runner.host, **other))


def machine_of(fleet, tmp_path):
    """A session of this process at the server."""
    tracker = fleet.trackers["alone"]
    until(tracker.free)
    return RpcCudaMachine(1, Servers(tracker, build_probe(find_compiler(), _PROBE, tmp_path)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # TVM leaves what it uploads open
def test_the_device_of_a_server_as_a_machine(fleet, tmp_path):
    machine = machine_of(fleet, tmp_path)
    assert (machine.host().name, machine.host().cores, machine.host().capability) == ("Shim GPU", 4, (9, 0))
    assert machine.multiply_adds("float16") == 4 * 2048e9
    assert 0 < machine.copy() < float("inf")
    for dtype in ("float32", "uint16", "int8", "float16", "float64", "int32"):
        values = np.arange(12).reshape(3, 4).astype(dtype)
        output = machine.output((3, 4), values.dtype)
        output.argument = machine.put(values)
        np.testing.assert_array_equal(output.read(), values)
        output.poison(0xFF)
        assert output.intact(0xFF)
        assert (output.read().view(np.uint8) == 0xFF).all()


#: Copies the first argument to the second on the stream of the call.
_COPIES = """
    int (*copy)(uint64_t, uint64_t, size_t, void *) = of_driver("cuMemcpyDtoDAsync_v2");
    copy((uint64_t)out, (uint64_t)*arguments[0].tensor, 400, TVMFFIEnvGetStream(2, 0));
"""
_COPIES_ELSEWHERE = _COPIES.replace("TVMFFIEnvGetStream(2, 0)", "0")
_WAITS = """usleep(1000); if (((int (*)(void))of_driver("cuCtxSynchronize"))()) return -1;"""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("body", "graphs", "least"),
    [(_COPIES, 6, 0.0), (_COPIES_ELSEWHERE, 0, 0.0), (_WAITS + _COPIES, 0, 0.001)],
    ids=["captured", "on another stream", "fails in a capture"],
)
def test_times_are_of_graphs_at_the_server(body, graphs, least, fleet, tmp_path):
    machine = machine_of(fleet, tmp_path)
    values = np.arange(100, dtype=np.float32)
    output = machine.output((100,), values.dtype)
    library = host_code(tmp_path, body)
    launches = machine._load(library)["launches"]
    bound = machine.bind(library, "deconv", (machine.put(values), output.argument))
    bound.run()
    np.testing.assert_array_equal(output.read(), values)
    output.poison(0xFF)
    times = bound.sample(10, 5)
    assert len(times) == 5
    assert least < min(times) < 0.008
    np.testing.assert_array_equal(output.read(), values)
    assert output.intact(0xFF)
    assert launches() == graphs
