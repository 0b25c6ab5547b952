"""scripts/gpu-check without a device: its processes use the CPU, and rows go wrong in every way.

As a program, this is the script with these processes and a few rows. A problem's batch says how its row ends.
"""

import contextlib
import functools
import os
import runpy
import signal
import time
import types
from pathlib import Path

import tvm_deconv as td
from tvm_deconv import targets
from tvm_deconv.bench import gpu
from tvm_deconv.tuning import tournament

SMALL = td.Problem(1, 1, 3, 5, (6,), (3,), (2,), (1,), (1,), (11,))
LAYER = td.Problem(1, 1, 8, 6, (7, 9), (4, 4), (2, 2), (1, 1), (1, 1), (14, 18), epilogue=td.Epilogue(True))
CRASHES, HANGS, LOSES_THE_DEVICE, IS_NOT_BUILT, ENDS_THE_TIME, LIES = 11, 12, 13, 14, 15, 16
ROWS = [
    ("", SMALL),
    ("right", LAYER),
    ("bytes", gpu.of_type(LAYER, "int8", "NCX")),
    ("crashes", LAYER.replace(batch=CRASHES)),
    ("wrong", gpu.of_type(LAYER, "float16", "NXC")),
    ("hangs", LAYER.replace(batch=HANGS)),
    ("loses", LAYER.replace(batch=LOSES_THE_DEVICE)),
    ("not built", LAYER.replace(batch=IS_NOT_BUILT)),
    ("lies", LAYER.replace(batch=LIES)),
    ("last", LAYER.replace(batch=2)),
]
BUILT = [problem for name, problem in ROWS if name in ("", "right", "bytes", "wrong", "lies", "last")]


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        assert isinstance(end, Event)
        return 2.0


class Stream:
    def synchronize(self):
        pass

    def wait_stream(self, other):
        assert isinstance(other, Stream)


class Graph:
    def replay(self):
        pass


def with_cpu():
    """Return torch with the CPU as its device."""
    import torch

    gpu.torch, gpu.DEVICE = torch, "cpu"
    torch.cuda = types.SimpleNamespace(
        Event=Event,
        Stream=Stream,
        CUDAGraph=Graph,
        current_stream=Stream,
        stream=lambda _: contextlib.nullcontext(),
        graph=lambda graph, stream: contextlib.nullcontext((graph, stream)),
        is_available=lambda: True,
        get_device_name=lambda: "none",
        get_device_properties=lambda _: types.SimpleNamespace(L2_cache_size=1),
        clock_rate=lambda: 1500,
        empty_cache=lambda: None,
        synchronize=lambda: None,
    )
    return torch


class Dry(gpu.Device):
    def start(self):
        self.torch = with_cpu()
        gpu.TOLERANCES["float16"] = 0.0
        honest = td.Library.select
        td.Library.select = lambda library, problem, _=None: honest(library, problem)
        return super().start() | {"process": os.getpid()}

    def check(self, name, problem):
        kill = Path(os.environ.get("GPU_DRY_KILL", "nothing"))
        if name == "right" and kill.exists():
            kill.unlink()
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
        if problem.batch == CRASHES:
            os._exit(9)
        if problem.batch == ENDS_THE_TIME:
            os.kill(os.getppid(), signal.SIGALRM)
        if problem.batch in (HANGS, ENDS_THE_TIME):
            time.sleep(1000)
        if problem.batch == LOSES_THE_DEVICE:

            def fails():
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

            self.torch.cuda.synchronize = fails
        return super().check(name, problem) | {"process": os.getpid()}

    def race(self, name, problem):
        with lying(self.torch) if problem.batch == LIES else contextlib.nullcontext():
            return super().race(name, problem)


@contextlib.contextmanager
def lying(torch):
    """A device whose level-2 cache is larger than its memory, by its word, with room for two copies of anything."""
    honest, clone, held = torch.cuda.get_device_properties, torch.Tensor.clone, []

    def copied(tensor, *arguments, **options):
        if len(held) == 2:
            held.clear()
            raise torch.OutOfMemoryError("CUDA out of memory")
        held.append(clone(tensor, *arguments, **options))
        return held[-1]

    torch.cuda.get_device_properties = lambda _: types.SimpleNamespace(L2_cache_size=1 << 60)
    torch.Tensor.clone = copied
    try:
        yield
    finally:
        torch.cuda.get_device_properties, torch.Tensor.clone = honest, clone


def patience(problem):
    return 1.0 if problem.batch == HANGS else 600.0


if __name__ == "__main__":
    gpu.small_problems = lambda: [SMALL]
    gpu.layers = lambda _: ROWS[1:]
    Dry.__module__ = "support.gpu_dry"  # by which its processes import it
    gpu.run = functools.partial(gpu.run, kind=Dry, patience=patience)
    targets.cuda_capability = lambda: (9, 0)
    tournament.hold = lambda directory, *_, **options: len(list(directory.iterdir())) * (options["seconds"] > 0)
    runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "gpu-check"), run_name="__main__")
