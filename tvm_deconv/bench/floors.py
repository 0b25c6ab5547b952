"""The rates of a machine, measured on the spot: multiply-adds and copied bytes per second, and stolen time.

No program does its multiply-adds faster than the first rate. None moves its bytes faster than the second while they
cross memory; arrays that stay in a cache may be faster.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tvm_deconv.compiler.launcher import find_compiler
from tvm_deconv.compiler.toolchain import run_compiler
from tvm_deconv.problem import Problem
from tvm_deconv.targets import CpuTarget

_SOURCE = Path(__file__).with_name("fma.c")
#: The types of multiply-adds that are measured, and their names in C.
FMA_DTYPES = {"float32": "float", "float64": "double"}
_STEPS = 2_000_000  # some milliseconds
_TRIALS = 7


@dataclass(frozen=True)
class Floors:
    """Rates that bound every program, all threads together.

    `fma` maps an accumulate dtype to multiply-adds per second, `copy` is bytes per second. If a dtype is missing,
    `why` is the reason.
    """

    fma: Mapping[str, float]
    copy: float
    why: str = ""

    def seconds(self, problem: Problem) -> dict[str, float]:
        """Return the least seconds for the bytes ("copy") and, if the rate is known, for the multiply-adds ("fma")."""
        seconds = {"copy": problem.min_bytes / self.copy}
        if problem.accumulate_dtype in self.fma:
            seconds["fma"] = problem.macs / self.fma[problem.accumulate_dtype]
        return seconds


def build_fma(target: CpuTarget, dtype: str, directory: Path) -> Path:
    """Compile the kernel of multiply-adds on whole vectors of `target`; `dtype` is float32 or float64.

    Raises CompilerNotFound, BuildError.
    """
    library = directory / f"fma-{target.name}-{dtype}.so"
    flags = ["-O2", "-shared", "-fPIC", f"-march={target.mcpu}", "-ffp-contract=fast"]
    macros = [f"-DELEMENT={FMA_DTYPES[dtype]}", f"-DBYTES={target.vector_bits // 8}"]
    command = [find_compiler(), "-x", "c", *flags, *macros, str(_SOURCE), "-o", str(library)]
    run_compiler("cc", command, "does not compile the measuring kernel: ")
    return library


def fma_per_second(library: Path, threads: int, steps: int = _STEPS) -> float:
    """Return the multiply-adds per second of the kernel in `library` on all `threads`, the best of some trials."""
    module = ctypes.CDLL(str(library))
    module.run.argtypes = [ctypes.c_long, ctypes.c_double, ctypes.c_double]
    module.run.restype = ctypes.c_double
    per_step = ctypes.c_long.in_dll(module, "fmas_per_step").value
    return threads * steps * per_step / _shortest([lambda: module.run(steps, 0.5, 0.25)] * threads)


def copy_bytes_per_second(size: int, threads: int) -> float:
    """Return the bytes per second, read plus written, of copying `size` bytes in all, the best of some trials."""
    share = size // threads
    pairs = [(np.ones(share, np.uint8), np.ones(share, np.uint8)) for _ in range(threads)]
    return 2 * share * threads / _shortest([functools.partial(np.copyto, *pair) for pair in pairs])


def beyond_caches() -> int:
    """Return a number of bytes that is too large for the caches of this machine."""
    caches = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    largest = max((int(size[:-1]) << 10 for size in caches if size.endswith("K")), default=0)
    return min(max(4 * largest, 64 << 20), 1 << 30)


def _shortest(parts: Sequence[Callable[[], object]]) -> float:
    """Run `parts` at the same time, several times; return the least seconds from start to end."""
    return min(_together(parts) for _ in range(_TRIALS))


def _together(parts: Sequence[Callable[[], object]]) -> float:
    """Run each of `parts` in a thread of its own; return the seconds from the first start to the last end.

    One alone is timed by its thread's own clock: other programs cost it nothing.
    """
    clock = time.thread_time if len(parts) == 1 else time.perf_counter
    starts, ends = [0.0] * len(parts), [0.0] * len(parts)
    barrier = threading.Barrier(len(parts))

    def run(index: int) -> None:
        barrier.wait()
        starts[index] = clock()
        parts[index]()
        ends[index] = clock()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(ends) - min(starts)


def cpu_times(cpus: Sequence[int], stat: Path = Path("/proc/stat")) -> tuple[int, int]:
    """Return the time that a hypervisor took from `cpus` since the start, and all time, in the system's ticks."""
    stolen = total = 0
    for line in stat.read_text().splitlines():
        name, *fields = line.split()
        if name in {f"cpu{cpu}" for cpu in cpus}:
            times = [int(text) for text in fields[:8]]  # the guests' times behind them are part of the user's
            stolen, total = stolen + times[7], total + sum(times)
    return stolen, total


def stolen_share(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Return the stolen part of the time between two results of `cpu_times`."""
    return (after[0] - before[0]) / max(after[1] - before[1], 1)
