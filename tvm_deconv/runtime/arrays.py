"""Callers' arrays in the memory of the CPU: any kind in, a NumPy view for the kernel, the same kind out.

`borrow` turns an array of any kind into a view without a copy. The checks compare views with the problem, and raise
errors of this package. In views bfloat16 is uint16, its bits: the form in which it crosses to the kernels, and the only
one that NumPy itself knows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from tvm_deconv.errors import TensorError, TensorTypeError
from tvm_deconv.problem import Array, Problem
from tvm_deconv.problem.arrays import BFLOAT16

_JAX = ("jax", "jaxlib")
_NAMES = {np.dtype(name): name for name in ("float32", "float64", "float16", "int8", "uint8", "int32")}
_HOST_DEVICES = (1, 3, 11)  # of DLPack: CPU, and host memory pinned for CUDA and ROCm


class Borrowed(NamedTuple):
    """A view of a caller's array, the name of its dtype, and `give`, which converts a result to the caller's kind."""

    view: Array
    dtype: str
    give: Callable[[Array], Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.view.shape


def borrow(argument: str, array: object) -> Borrowed:
    """Return a view of `array`, the argument called `argument`. Raises TensorTypeError, TensorError."""
    if isinstance(array, np.ndarray):
        return _borrow_numpy(argument, array)
    if not hasattr(array, "__dlpack__") or not hasattr(array, "__dlpack_device__"):
        rule = "must be a NumPy array or an array with DLPack (__dlpack__)"
        if type(array).__module__.partition(".")[0] in _JAX:
            rule += "; where jax traces a layer, call its tvm_deconv.jax.function"
        raise TensorTypeError(argument, type(array).__qualname__, rule)
    if getattr(array, "requires_grad", False):
        raise TensorError(argument, "requires_grad", "must not require gradients, which stop here; pass detach() of it")
    module = _module(type(array))
    if module is None:
        rule = "must be of a package that has from_dlpack, torch or jax: no other can hold the result"
        raise TensorTypeError(argument, type(array).__qualname__, rule)
    try:
        device = tuple(map(int, array.__dlpack_device__()))
        if device[0] in _HOST_DEVICES:
            return _borrow_foreign(argument, array, module)
    except TensorError:
        raise
    # Packages raise whatever class of error they like.
    except Exception as error:
        raise TensorTypeError(
            argument, type(array).__qualname__, f"must be readable as a NumPy array: {error}"
        ) from error
    raise TensorError(argument, device, "must be in the memory of the CPU; this is its DLPack device")


def _module(kind: type) -> ModuleType | None:
    """Return the imported package that defines `kind` or a base class of it, and that can make arrays."""
    for base in kind.__mro__:
        module = sys.modules.get(base.__module__.partition(".")[0])
        if module is not None and (module.__name__ in _JAX or hasattr(module, "from_dlpack")):
            return module
    return None


def _borrow_numpy(argument: str, array: Array) -> Borrowed:
    if isinstance(array, np.ma.MaskedArray):
        raise TensorTypeError(argument, type(array).__qualname__, "must not be masked: the mask would be ignored")
    dtype = array.dtype
    view = array if type(array) is np.ndarray else array.view(np.ndarray)
    name = _NAMES.get(dtype)
    if name is not None:
        return Borrowed(view, name, _itself)
    if not dtype.isnative:
        raise TensorTypeError(
            argument, dtype.str, "must be in this machine's byte order; pass astype of newbyteorder('=')"
        )
    if dtype.type.__name__ == BFLOAT16:
        # Of ml_dtypes: known by its name, since the runtime must not import that package.
        return Borrowed(view.view(np.uint16), BFLOAT16, lambda result: result.view(dtype))
    raise TensorTypeError(argument, dtype.name, f"must be one of {', '.join((*_NAMES.values(), BFLOAT16))}")


def _itself(result: Array) -> Array:
    return result


def _borrow_foreign(argument: str, array: Any, module: ModuleType) -> Borrowed:
    if module.__name__ == "torch":
        # By its own methods: NumPy's from_dlpack has no bfloat16, and before 2.1 it marks every such array read-only.
        if array.dtype == module.bfloat16:
            bits = array.view(module.int16).numpy().view(np.uint16)
            give = lambda result: module.from_numpy(result.view(np.int16)).view(module.bfloat16)  # noqa: E731
            return Borrowed(bits, BFLOAT16, give)
        view, give = array.numpy(), module.from_numpy
    elif module.__name__ in _JAX:
        # A NumPy array, of a dtype of ml_dtypes for bfloat16. It is never writable, as jax promises.
        view, give = np.asarray(array), sys.modules["jax"].numpy.asarray
    else:
        view, give = np.from_dlpack(array), module.from_dlpack
    borrowed = _borrow_numpy(argument, view)
    return Borrowed(borrowed.view, borrowed.dtype, lambda result: give(borrowed.give(result)))


class _Writable:
    """The memory of a read-only array, marked writable."""

    def __init__(self, view: Array) -> None:
        interface = view.__array_interface__
        self.view = view
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}


def readable(view: Array) -> Array:
    """Return `view` in a form that tvm_ffi takes as an input: it refuses arrays that are read-only."""
    return view if view.flags.writeable else np.asarray(_Writable(view))


def check_type(argument: str, dtype: str, allowed: Collection[str]) -> None:
    """Raise TensorTypeError unless `dtype` is among those `allowed`."""
    if dtype not in allowed:
        raise TensorTypeError(argument, dtype, f"dtype must be {' or '.join(allowed)}")


def check_bias(problem: Problem, dtype: str, shape: tuple[int, ...]) -> None:
    """Raise TensorTypeError or TensorError unless a bias has the type of sums or of data, and the problem's shape."""
    check_type("bias", dtype, list(dict.fromkeys([problem.accumulate_dtype, problem.dtype])))
    check_shape("bias", shape, problem.bias_shape)


def check_shape(argument: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raise TensorError unless the `shape` of an array is the one that is `wanted`."""
    if len(shape) != len(wanted):
        raise TensorError(argument, shape, f"rank must be {len(wanted)}, of shape {wanted}")
    if shape != wanted:
        raise TensorError(argument, shape, f"shape must be {wanted}")


def check_layout(argument: str, view: Array) -> None:
    """Raise TensorError unless `view` is C-contiguous and each element is aligned to its size."""
    if not view.flags.c_contiguous:
        rule = (
            f"strides must be those of a C-contiguous array of shape {view.shape}; pass a contiguous copy "
            "(numpy.ascontiguousarray, or contiguous() of a tensor)"
        )
        raise TensorError(argument, view.strides, rule)
    if not view.flags.aligned:
        address = view.__array_interface__["data"][0]
        raise TensorError(
            argument, hex(address), f"address must be a multiple of {view.itemsize}, the size of an element"
        )


def check_output(view: Array, others: dict[str, Array]) -> None:
    """Raise TensorError unless the output `view` can be written and shares no memory with the `others`."""
    if not view.flags.writeable:
        raise TensorError("out", "read-only", "must be writable")
    for name, other in others.items():
        # By bounds: exact for contiguous arrays, and on the safe side for others.
        if np.may_share_memory(view, other):
            raise TensorError(
                "out", "overlapping", f"must not share memory with {name}, which is read while out is written"
            )


def count_write(out: object) -> None:
    """Tell torch that the memory of `out` was written, if it is one of its tensors."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(out, torch.Tensor) and not out.is_inference():
        torch.autograd.graph.increment_version(out)
