"""A program in the place of nvcc, which compiles kernels for the CPU."""

import sys
from pathlib import Path

from support.cuda_kernels import compiler

#: Compiles for the CPU. Of kernels of 4 stages it says that they spill; those of 2 stages and 8 terms compute nonsense.
_NVCC = """#!{python}
import re, subprocess, sys
if "--version" in sys.argv:
    sys.exit(print("release 13.0, V13.0.0"))
if "--list-gpu-code" in sys.argv:
    sys.exit(print("sm_80 sm_90"))
sys.path[:0] = [{tests!r}]
from support.shim_source import for_cpu
text = open(next(a for a in sys.argv if a.endswith(".cu"))).read()
out = sys.argv[sys.argv.index("-o") + 1]
if "tvm_deconv_wait2" in text:
    print("ptxas info : Compiling entry function 'deconv_kernel' for 'sm_90'", file=sys.stderr)
    print("    0 bytes stack frame, 130 bytes spill stores, 130 bytes spill loads", file=sys.stderr)
    print("ptxas info : Used 128 registers, used 1 barriers, 400 bytes smem", file=sys.stderr)
open(out + ".cc", "w").write(for_cpu(text))
passed = [a for a in sys.argv if a[:2] in ("-I", "-L", "-l")]
command = [*{compiler!r}, out + ".cc", "-o", out, *passed]
sys.exit(subprocess.run(command).returncode)
"""


def write_nvcc(folder):
    """The path of the program, below `folder`."""
    script = folder / "nvcc"
    tests = str(Path(__file__).parents[1])
    script.write_text(_NVCC.format(python=sys.executable, tests=tests, compiler=compiler()))
    script.chmod(0o755)
    return script
