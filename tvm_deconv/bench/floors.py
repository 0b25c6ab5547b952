"""What the machine can do, measured on the spot: multiply-adds and copied bytes per second.

No program does its multiply-adds faster than the first rate, nor moves its bytes faster than the second while they
cross memory; arrays that stay in a cache may.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tvm_deconv.compiler.launcher import find_compiler
from tvm_deconv.errors import BuildError
from tvm_deconv.problem import Problem
from tvm_deconv.targets import CpuTarget

# Twelve chains cover a latency of 4 to 5 cycles on two units, and fit in 16 registers with the two factors.
_SOURCE = r"""
typedef ELEMENT vector __attribute__((vector_size(BYTES)));

const long fmas_per_step = 12 * BYTES / sizeof(ELEMENT);

double run(long steps, double factor, double summand) {
    vector x = {}, y = {};
    x += (ELEMENT)factor;
    y += (ELEMENT)summand;
    vector a = x, b = x, c = x, d = x, e = x, f = x, g = x, h = x, i = x, j = x, k = x, l = x;
    for (long step = 0; step < steps; ++step) {
        a = a * x + y; b = b * x + y; c = c * x + y; d = d * x + y; e = e * x + y; f = f * x + y;
        g = g * x + y; h = h * x + y; i = i * x + y; j = j * x + y; k = k * x + y; l = l * x + y;
        /* Else the compiler sees twelve equal chains and computes one. */
        __asm__ volatile("" : "+v"(a), "+v"(b), "+v"(c), "+v"(d), "+v"(e), "+v"(f));
        __asm__ volatile("" : "+v"(g), "+v"(h), "+v"(i), "+v"(j), "+v"(k), "+v"(l));
    }
    a += b + c + d + e + f + g + h + i + j + k + l;
    return a[0];
}
"""
#: The types of multiply-adds that are measured, and their names in C.
FMA_DTYPES = {"float32": "float", "float64": "double"}
_STEPS = 2_000_000  # some milliseconds
_TRIALS = 7


@dataclass(frozen=True)
class Floors:
    """Rates that bound every program, all threads together; `fma` maps an accumulate dtype to multiply-adds a second.

    Where a type is missing, `why` tells.
    """

    fma: Mapping[str, float]
    copy: float
    why: str = ""

    def seconds(self, problem: Problem) -> dict[str, float]:
        """Return the least time of the multiply-adds ("fma", where known) and of the bytes ("copy")."""
        found = {"copy": problem.min_bytes / self.copy}
        if problem.accumulate_dtype in self.fma:
            found["fma"] = problem.macs / self.fma[problem.accumulate_dtype]
        return found


def build_fma(target: CpuTarget, dtype: str, directory: Path) -> Path:
    """Compile the kernel of multiply-adds on whole vectors of `target`; `dtype` is float32 or float64.

    Raises CompilerNotFound, BuildError.
    """
    library = directory / f"fma-{target.name}-{dtype}.so"
    flags = ["-O2", "-shared", "-fPIC", f"-march={target.mcpu}", "-ffp-contract=fast"]
    macros = [f"-DELEMENT={FMA_DTYPES[dtype]}", f"-DBYTES={target.vector_bits // 8}"]
    command = [find_compiler(), "-x", "c", *flags, *macros, "-", "-o", str(library)]
    done = subprocess.run(command, input=_SOURCE, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError("cc", command[0], f"does not compile the measuring kernel: {done.stderr.strip()}")
    return library


def fma_per_second(library: Path, threads: int, steps: int = _STEPS) -> float:
    """Return the multiply-adds per second of the kernel in `library` on so many threads, the best of some trials."""
    module = ctypes.CDLL(str(library))
    module.run.argtypes = [ctypes.c_long, ctypes.c_double, ctypes.c_double]
    module.run.restype = ctypes.c_double
    per_step = ctypes.c_long.in_dll(module, "fmas_per_step").value
    return threads * steps * per_step / _shortest([lambda: module.run(steps, 0.5, 0.25)] * threads)


def copy_bytes_per_second(size: int, threads: int) -> float:
    """Return the bytes per second, read plus written, of copies of `size` bytes in all, the best of some trials."""
    share = size // threads
    pairs = [(np.ones(share, np.uint8), np.ones(share, np.uint8)) for _ in range(threads)]
    return 2 * share * threads / _shortest([functools.partial(np.copyto, *pair) for pair in pairs])


def beyond_caches() -> int:
    """Return a number of bytes whose copy is not served by the caches of this machine."""
    caches = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    largest = max((int(size[:-1]) << 10 for size in caches if size.endswith("K")), default=0)
    return min(max(4 * largest, 64 << 20), 1 << 30)


def _shortest(parts: Sequence[Callable[[], object]]) -> float:
    """Run `parts` at the same time, several times; return the least time in seconds from start to end."""
    return min(_together(parts) for _ in range(_TRIALS))


def _together(parts: Sequence[Callable[[], object]]) -> float:
    starts, ends = [0.0] * len(parts), [0.0] * len(parts)
    barrier = threading.Barrier(len(parts))

    def run(index: int) -> None:
        barrier.wait()
        starts[index] = time.perf_counter()
        parts[index]()
        ends[index] = time.perf_counter()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(ends) - min(starts)
