"""Layers on the CPU: a filter bound to its artifact for arrays in the memory of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tvm_deconv.artifact.manifest import Manifest
from tvm_deconv.errors import ArtifactError, ProblemError, TensorError, TensorTypeError
from tvm_deconv.problem import Array, Problem, Scaling, integer
from tvm_deconv.problem.arrays import BFLOAT16, empty, empty_lines, storage
from tvm_deconv.problem.checks import INT64_MAX
from tvm_deconv.problem.quantization import bound_arrays
from tvm_deconv.runtime import arrays
from tvm_deconv.runtime.arrays import Borrowed
from tvm_deconv.runtime.process import Artifact, Served, guarded
from tvm_deconv.runtime.threads import MAX_LANES, checked_limit, make_arena

_REFUSALS = (RuntimeError, ValueError, TypeError)  # of a kernel, which checks its arguments
_MOST_SHAPES = 4096  # that a layer of a variable problem remembers
_BITS = np.dtype(np.uint16)  # of bfloat16, as it crosses to the kernels


class HostMemory:
    """The memory of the CPU."""

    device = None

    def borrow(self, argument: str, array: object) -> Borrowed:
        """Return a view of `array`, of any package with DLPack. Raises TensorTypeError, TensorError."""
        return arrays.borrow(argument, array)

    def bind(
        self,
        problem: Problem,
        served: Served,
        filter: Borrowed,
        bias: Borrowed | None,
        scaling: Scaling | None = None,
        workspace: int | Array | None = None,
    ) -> HostCall:
        """Pack `filter` and convert `bias`; see `Library.bind`."""
        return HostCall(problem, served, filter, bias, scaling, workspace)

    def run_once(
        self, problem: Problem, served: Served, data: Borrowed, filter: Borrowed, bias: Borrowed | None, out: Any
    ) -> Any:
        """Return the output for borrowed arrays, in `out` if that is given, which must not overlap them."""
        others = {"filter": filter.view} if bias is None else {"filter": filter.view, "bias": bias.view}
        return HostCall(problem, served, filter, bias).compute(data, out, others)


HOST = HostMemory()


class HostCall:
    """A filter bound to its artifact, for arrays in the memory of the CPU."""

    def __init__(
        self,
        problem: Problem,
        served: Served,
        filter: Borrowed,
        bias: Borrowed | None,
        scaling: Scaling | None = None,
        workspace: int | Array | None = None,
    ) -> None:
        """Pack `filter` and convert `bias`; see `Library.bind`."""
        self._problem = problem
        self.artifact = served.artifact
        # The output's shape by the data's. A variable problem learns those of its calls.
        self._output_shapes = {} if problem.dynamic else {problem.data_shape: problem.output_shape}
        self._output_storage = storage(problem.output_dtype)
        # The fast path compares dtypes by identity. NumPy does not know bfloat16: the first call says what it is.
        self._as_bits = problem.dtype == BFLOAT16
        self._data_dtype: Any = None if self._as_bits else np.dtype(problem.dtype)
        self._output_dtype: Any = None if self._as_bits else self._output_storage
        self._path = served.artifact.path
        self.constants = guarded(_constants, problem, served.artifact, filter, bias, scaling)
        self._deconv: Callable[..., None] = served.artifact
        # An empty output is complete: kernels need not know extents of zero. Dynamic extents are those of each call.
        if not problem.dynamic and 0 in problem.output_shape:
            self._deconv = _compute_nothing
        elif served.manifest is None:  # NumPy computes, on threads and in memory of its own
            self._deconv = lambda _threads, _arena, _host, *arguments: served.artifact(*arguments)
        self._arena = 0
        if workspace is not None and served.manifest is not None:
            self._workspace = _workspace_memory(workspace, served.manifest)
            self._arena = make_arena(self._workspace, served.manifest.lane_bytes, served.manifest.shared_bytes)

    def run(self, data: Any, out: Any = None, threads: int | None = None, host: int = 0) -> Any:
        """Return the output for `data`; see `Layer`."""
        limit = 0 if threads is None else checked_limit(threads)
        if type(host) is not int or not 0 <= host <= INT64_MAX:
            host = integer("host", host, 0)
        # The fast path: plain arrays of NumPy that need no conversion but a view of their bits.
        shape = self._output_shapes.get(data.shape) if type(data) is np.ndarray else None
        if shape is not None and data.dtype is self._data_dtype and data.flags.carray:
            result = None
            if out is None:
                result = empty(shape, self._output_dtype)
            elif _is_plain(out, self._output_dtype, shape) and not np.may_share_memory(data, out):
                result = out
            if result is not None:
                read, written = (data.view(_BITS), result.view(_BITS)) if self._as_bits else (data, result)
                try:
                    self._deconv(limit, self._arena, host, read, *self.constants, written)
                except _REFUSALS as error:
                    raise self._refused(error) from error
                return result
        computed = self.compute(arrays.borrow("data", data), out, {}, limit, host)
        if self._as_bits and type(data) is np.ndarray:
            self._data_dtype = self._output_dtype = data.dtype
        return computed

    def compute(self, data: Borrowed, out: Any, others: dict[str, Array], limit: int = 0, host: int = 0) -> Any:
        """Check `data` and `out`, which must not overlap each other or `others`, and return the output."""
        arrays.check_type("data", data.dtype, [self._problem.dtype])
        shape = self._output_shape(data.view)
        arrays.check_layout("data", data.view)
        if out is None:
            result = empty(shape, self._output_storage)
        else:
            borrowed = arrays.borrow("out", out)
            result = borrowed.view
            arrays.check_type("out", borrowed.dtype, [self._problem.output_dtype])
            arrays.check_shape("out", result.shape, shape)
            arrays.check_layout("out", result)
            arrays.check_output(result, {"data": data.view, **others})
        if result.size:
            try:
                self._deconv(limit, self._arena, host, arrays.readable(data.view), *self.constants, result)
            except _REFUSALS as error:
                raise self._refused(error) from error
        if out is None:
            return data.give(result)
        arrays.count_write(out)
        return out

    def _refused(self, error: Exception) -> ArtifactError:
        """Return the error for a kernel that refuses arrays which fit the problem of its manifest."""
        return ArtifactError(self._path, f"must compute the problem of its manifest: {error}")

    def _output_shape(self, data: Array) -> tuple[int, ...]:
        """Return the output's shape for `data` after checking its shape, and remember it."""
        if not self._problem.dynamic:
            arrays.check_shape("data", data.shape, self._problem.data_shape)
            return self._problem.output_shape
        try:
            shape = self._problem.at(data.shape).output_shape
        except ProblemError as error:
            raise TensorError("data", data.shape, f"{error.attribute} {error.rule}") from None
        # Empty outputs are not remembered: the fast path would call the kernel.
        if 0 not in shape:
            if len(self._output_shapes) >= _MOST_SHAPES:
                self._output_shapes.clear()
            self._output_shapes[data.shape] = shape
        return shape


def _constants(
    problem: Problem, artifact: Artifact, filter: Borrowed, bias: Borrowed | None, scaling: Scaling | None
) -> tuple[Any, ...]:
    """Return what all calls have in common: the packed filter, and behind it the bias or what stands in its place."""
    offset = None if bias is None else _accumulated(problem, bias)
    canonical, last = bound_arrays(problem, problem.canonical_filter(filter.view), offset, scaling)
    constants = [_packed(artifact, canonical), *([] if last is None else [last])]
    return tuple(map(artifact.constant, constants))


def _compute_nothing(*_: object) -> None:
    pass


def _is_plain(array: Any, dtype: np.dtype[Any] | None, shape: tuple[int, ...]) -> bool:
    """Tell whether the kernel can write to `array` directly; if not, the checks say why."""
    return type(array) is np.ndarray and array.dtype is dtype and array.shape == shape and array.flags.carray


def _workspace_memory(workspace: int | Array, manifest: Manifest) -> Array:
    """Return the bytes of a workspace: an array that was given, or new memory for a number of threads."""
    if not isinstance(workspace, np.ndarray):
        threads = integer("workspace", workspace, 1)
        if threads > MAX_LANES:
            raise ProblemError("workspace", threads, f"must be at most {MAX_LANES}, or an array")
        needed = manifest.workspace_bytes(threads)
        try:
            return np.ones(needed, np.uint8)  # written, so that the pages are there
        except MemoryError:
            raise ProblemError("workspace", threads, f"must fit in memory: {needed} bytes") from None
    if workspace.dtype.hasobject:
        raise TensorTypeError("workspace", workspace.dtype.name, "must be of numbers, not of objects")
    least = manifest.workspace_bytes(1)
    if workspace.nbytes < least:
        raise TensorError("workspace", workspace.nbytes, f"must have at least {least} bytes, for one thread")
    if not (workspace.flags.c_contiguous and workspace.flags.writeable):
        raise TensorError("workspace", workspace.strides, "must be contiguous memory that can be written")
    return workspace.view(np.ndarray).reshape(-1).view(np.uint8)


def _packed(artifact: Artifact, filter: Array) -> Array:
    """Return a canonical `filter`, in any layout, as the kernel reads it."""
    # A copy unless the memory already is [G, Ci, Co, *K]; "pack" only reads it.
    canonical = np.require(filter, requirements=["C", "A"])
    shape, dtype = artifact.packed
    try:
        packed = empty_lines(shape, np.dtype(dtype))
        artifact.pack(arrays.readable(canonical), packed)
    except (RuntimeError, ValueError, TypeError, MemoryError) as error:
        raise ArtifactError(artifact.path, f"must take the filter as its manifest says: {error}") from error
    return packed


def _accumulated(problem: Problem, bias: Borrowed) -> Array:
    """Return a copy of `bias` in the problem's accumulate dtype."""
    arrays.check_bias(problem, bias.dtype, bias.shape)
    if bias.dtype == BFLOAT16:
        return (bias.view.astype(np.uint32) << 16).view(np.float32)
    return np.array(bias.view, dtype=problem.accumulate_dtype, order="C")
