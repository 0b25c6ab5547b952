"""A library whose kernels use AMX asks the kernel for it as it is loaded; others do not."""

import subprocess
import sys

import pytest

import tvm_deconv as td
from tvm_deconv.targets import CPU_TARGETS, detect_host

TARGET = CPU_TARGETS["x86-64-v4-amx"]
#: Loads a library without this package, and prints whether the process may use AMX, before and after.
LOADING = """
import ctypes, sys
import tvm_ffi

def permitted(mask=ctypes.c_uint64()):
    get_permission, tile_data = 0x1022, 18
    assert ctypes.CDLL(None).syscall(158, get_permission, ctypes.byref(mask)) == 0
    return mask.value >> tile_data & 1

print(permitted())
tvm_ffi.load_module(sys.argv[1])
print(permitted())
"""


@pytest.mark.skipif(not TARGET.features <= detect_host().features, reason="this CPU has no AMX")
@pytest.mark.usefixtures("compiles_here")
@pytest.mark.parametrize(("dtype", "asks"), [("bfloat16", "1"), ("float32", "1"), ("float64", "0")])
def test_a_library_asks_for_amx(tmp_path, dtype, asks):
    problem = td.Problem(1, 1, 64, 32, (8, 8), (2, 2), (2, 2), (1, 1), (0, 0), (16, 16), dtype)
    td.compile([problem], target=TARGET.name, output=tmp_path)
    (library,) = tmp_path.glob("*.so")
    done = subprocess.run([sys.executable, "-c", LOADING, library], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", asks]
