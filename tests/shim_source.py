"""The text of a CUDA translation unit as g++ takes it with `cuda_shim`; of the standard library alone."""

import re

_PTX = re.compile(r"__device__ __forceinline__ \w+ \w+\([^)]*\) \{\n(?:[^}]|\}(?!\n))*?asm volatile.*?\n\}\n", re.S)


def for_cpu(text):
    """Functions of PTX are the shim's, and g++ takes two words in one order only."""
    return '#include "all.h"\n' + _PTX.sub("", text.replace("__shared__ alignas(64)", "alignas(64) __shared__"))
