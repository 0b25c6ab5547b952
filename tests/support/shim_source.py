"""The text of a CUDA translation unit as g++ takes it with `cuda_shim`; of the standard library alone."""

import re

_PTX = re.compile(r"__device__ __forceinline__ \w+ \w+\([^)]*\) \{\n(?:[^}]|\}(?!\n))*?asm volatile.*?\n\}\n", re.S)


_DYNAMIC = re.compile(r"extern __shared__ __align__\(\d+\) ([\w ]+) (\w+)\[\];")
_LINES = re.compile(r"__device__ __forceinline__ unsigned long long tvm_deconv_operand.*?\n\}\n", re.S)
#: The host's function for maps, and what else a device of 9.0 has: more shared memory.
_ENCODE = re.compile(r"static CUresult tvm_deconv_encode\(.*?\n\}\n", re.S)
#: Kernels whose blocks are clusters, where they are defined.
_CLUSTERS = re.compile(r"__cluster_dims__\((\d+), 1, 1\).* (\w+)\(.*\{$", re.M)
#: How the host's code refuses an argument, of which there are dozens: by parts of a text, which g++ takes long for.
_REFUSAL = re.compile(
    r"\{\n *const char\* \w+\[\d+\] = \{((?:\"(?:[^\"\\]|\\.)*\"(?:, )?)+)\};\n"
    r" *TVMFFIErrorSetRaisedFromCStrParts\((\"\w+\"), .*\);\n *return -1;\n *\}"
)
_BETWEEN = re.compile(r'(?<!\\)", "')
_EXPORTED = "#define TVM_DLL TVM_FFI_DLL_EXPORT"
_HOPPER = "static const size_t shim_hopper = shim_most_shared = 227 << 10;\n"


def for_cpu(text):
    """Functions of PTX and what a launch allocates are the shim's, and g++ takes two words in one order only."""
    text = text.replace("__shared__ alignas(64)", "alignas(64) __shared__")
    text = _ENCODE.sub(_HOPPER, _LINES.sub("", text))
    known = "".join(f"shim_cluster((const void*){name}, {blocks}), " for blocks, name in _CLUSTERS.findall(text))
    text += f"static const int shim_known = ({known}0);\n" if known else ""
    text = _REFUSAL.sub(lambda refusal: f"return shim_raise({refusal[2]}, {_BETWEEN.sub('', refusal[1])});", text)
    text = text.replace(_EXPORTED, f'{_EXPORTED} __attribute__((no_sanitize("alignment")))')  # of hosts
    return '#include "all.h"\n' + _PTX.sub("", _DYNAMIC.sub(r"\1* \2 = (\1*)shim_dynamic;", text))
