"""The canonical description of one transposed convolution, under all dialects.

Per spatial axis, with data extent X, kernel K, stride s, dilation d, begin pad p and output extent Y:

    out[n, g*Co+o, s*x + d*k - p] += data[n, g*Ci+i, x] * filter[g, i, o, k]    where the index lies in [0, Y)

Output elements that no product reaches are zero. The epilogue (bias, then activation) follows. An end pad is not part
of the description: it only decided Y. In a quantized problem stored integers stand for the data and the filter, and the
output may be quantized again: `quantization`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec

import numpy as np
import numpy.typing as npt

from tvm_deconv.errors import ProblemError
from tvm_deconv.problem import dialects
from tvm_deconv.problem.activations import ACTIVATIONS
from tvm_deconv.problem.arithmetic import ceil_div, landing_pairs, uncropped
from tvm_deconv.problem.checks import INT64_MAX, integer, integers, one_of, several
from tvm_deconv.problem.dtypes import DTYPES, FAST, FAST_TERMS, PRECISIONS, element_bytes
from tvm_deconv.problem.dynamic import (
    ANY,
    DEFAULT_BUCKETS,
    MOST_VARIANTS,
    REPRESENTATIVE_BATCH,
    buckets_of,
    read_extents,
)
from tvm_deconv.problem.epilogue import Epilogue
from tvm_deconv.problem.keys import read_key, write_key
from tvm_deconv.problem.quantization import STORED, Quantization, check_sums

Array = npt.NDArray[Any]
_Attributes = ParamSpec("_Attributes")

DATA_FORMATS = ("NCX", "NXC")
#: The formats a problem keeps, and the other names of the same memory.
FILTER_FORMATS = ("IOX", "GIOX", "XIO")
_FILTER_ALIASES = {"OIX": "IOX", "XOI": "XIO"}
_ANY_OUTPUT = re.compile(r"any([+-]\d{1,18})", re.ASCII)
_INT32 = np.iinfo(np.int32)


def _maker(fields: Callable[_Attributes, dialects.Fields]) -> Callable[_Attributes, Problem]:
    """Return a function that makes a problem of the attributes of a dialect."""

    @functools.wraps(fields)
    def make(*args: _Attributes.args, **attributes: _Attributes.kwargs) -> Problem:
        return Problem(**fields(*args, **attributes))

    make.__annotations__ = fields.__annotations__ | {"return": "Problem"}
    make.__signature__ = inspect.signature(fields).replace(return_annotation="Problem")  # type: ignore[attr-defined]
    return make


def check_problem(problem: object) -> None:
    """Raise ProblemError unless `problem` is a Problem."""
    if not isinstance(problem, Problem):
        raise ProblemError("problem", problem, "must be a Problem")


@dataclass(frozen=True, slots=True)
class Problem:
    """One transposed convolution with everything decided; the module's text has its meaning.

    `in_channels` and `out_channels` are per group. Sequences become tuples and NumPy integers become ints. A dilation
    along an axis where the kernel has one element is 1, and filter formats that are the same memory have one name.

    Extents may be left to each call, which makes a *variable* problem: ``batch="any"``, and with one or two axes
    ``"any"`` in `data_spatial`. There `output_spatial` has ``"any+c"``, which means ``s*(X-1) + c``. `dynamic` lists
    those axes of the data: 0 is the batch, 1 the first spatial axis.

    In place of ``"any"`` may stand *buckets*, a list of extents. Calls of every extent are served all the same. Each
    takes the schedule of the smallest bucket that holds it, or else of the largest bucket. ``"any"`` has the buckets
    (16, 128, 1024) with one axis and (8, 16, 32, 64) with two: squares, where both are any; beside a list, 64 alone.
    `buckets` has one tuple per spatial axis, empty for "any", and `variants` are the problems of the single buckets.

    The fields of dynamic axes, and all that follows from them, are those of a representative call: a batch of 1, and
    the largest bucket. `at` gives the problem of a call.

    `precision` "tf32", of float32 problems, permits data and filter to be rounded to TF32 before they are multiplied;
    sums stay float32. "tf32x3" permits each product to be the sum of three of such factors, as exact as float32 but at
    its limits. Neither demands anything: a more exact kernel serves such a problem too. "float32_fast" becomes the
    fastest precision whose errors are within twice those of float32: "tf32x3" for sums of 256 to 8192 terms, or "ieee".

    `quantization`, of int8 and uint8 data, makes a quantized problem. Raises ProblemError.
    """

    batch: int
    groups: int
    in_channels: int
    out_channels: int
    data_spatial: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads_begin: tuple[int, ...]
    output_spatial: tuple[int, ...]
    dtype: str = "float32"
    data_format: str = "NCX"
    filter_format: str = "IOX"
    epilogue: Epilogue = Epilogue()  # noqa: RUF009 (frozen)
    dynamic: tuple[int, ...] = ()
    precision: str = "ieee"
    buckets: tuple[tuple[int, ...], ...] = ()
    quantization: Quantization | None = None

    from_openvino = staticmethod(_maker(dialects.from_openvino))
    from_onednn = staticmethod(_maker(dialects.from_onednn))
    from_onnx = staticmethod(_maker(dialects.from_onnx))
    from_torch = staticmethod(_maker(dialects.from_torch))

    def __post_init__(self) -> None:
        self._read_dynamic()
        self._read_extents()
        self._read_types()
        self._read_buckets()
        self._make_representative()
        if self.output_dtype == "int32":
            self._check_integer_epilogue()
        if self.quantization:
            check_sums(self)
        self._check_sizes()

    def _put(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _read_dynamic(self) -> None:
        """Turn the words for dynamic extents into `dynamic`, `buckets` and representative extents."""
        dynamic = set(integers("dynamic", self.dynamic, 0))
        extents = read_extents(self.batch, self.data_spatial)
        if extents.buckets:
            self._put("output_spatial", self._representative_output(extents.spatial, extents.dynamic))
            self._put("data_spatial", extents.spatial)
            self._put("buckets", extents.buckets)
        self._put("batch", extents.batch)
        self._put("dynamic", tuple(sorted(dynamic.union(extents.dynamic))))

    def _representative_output(self, data: tuple[int, ...], dynamic: tuple[int, ...]) -> tuple[int, ...]:
        """Return `output_spatial` with the extents of a call with `data` in the place of any+c."""
        output: Any = self.output_spatial
        if not isinstance(output, (list, tuple)) or len(output) != len(data):
            raise ProblemError("output_spatial", output, f"must have one element per spatial axis, {len(data)} here")
        extents = list(output)
        for axis in (axis - 1 for axis in dynamic if axis):
            match = _ANY_OUTPUT.fullmatch(output[axis]) if isinstance(output[axis], str) else None
            if match is None:
                rule = f"must be any+c where the data extent is any, for s*(X-1) + c; axis {axis} is not"
                raise ProblemError("output_spatial", output, rule)
            stride = integers("strides", self.strides, 1, len(data))[axis]
            extents[axis] = stride * (data[axis] - 1) + int(match[1])
        return tuple(extents)

    def _read_extents(self) -> None:
        for name, minimum in (("batch", 0), ("groups", 1), ("in_channels", 1), ("out_channels", 1)):
            self._put(name, integer(name, getattr(self, name), minimum))
        self._put("data_spatial", integers("data_spatial", self.data_spatial, 1))
        if not 1 <= self.rank <= 3:
            raise ProblemError("data_spatial", self.data_spatial, "must have 1, 2 or 3 axes")
        per_axis = (("kernel", 1), ("strides", 1), ("dilations", 1), ("pads_begin", 0), ("output_spatial", 0))
        for name, minimum in per_axis:
            self._put(name, integers(name, getattr(self, name), minimum, self.rank))
        dilations = tuple(1 if k == 1 else d for k, d in zip(self.kernel, self.dilations, strict=True))
        self._put("dilations", dilations)

    def _read_types(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        one_of("precision", self.precision, (*PRECISIONS, FAST))
        if self.precision != "ieee" and self.dtype != "float32":
            raise ProblemError("precision", self.precision, f"must be ieee where dtype={self.dtype}")
        if self.precision == FAST:
            self._put("precision", "tf32x3" if self.terms in FAST_TERMS else "ieee")
        one_of("data_format", self.data_format, DATA_FORMATS)
        one_of("filter_format", self.filter_format, (*FILTER_FORMATS, *_FILTER_ALIASES))
        self._put("filter_format", _FILTER_ALIASES.get(self.filter_format, self.filter_format))
        if not isinstance(self.epilogue, Epilogue):
            raise ProblemError("epilogue", self.epilogue, "must be an Epilogue, which Epilogue.parse makes of a text")
        if not isinstance(self.quantization, Quantization | None):
            rule = "must be a Quantization, which Quantization.parse makes of a text, or None"
            raise ProblemError("quantization", self.quantization, rule)
        if self.quantization and self.dtype not in STORED:
            raise ProblemError("dtype", self.dtype, f"must be {' or '.join(STORED)} where quantization is given")

    def _read_buckets(self) -> None:
        """Bring `buckets` into their one form."""
        given = self.buckets
        if not isinstance(given, (list, tuple)) or (given and len(given) != self.rank):
            raise ProblemError("buckets", given, f"must have one element per spatial axis, {self.rank} here")
        buckets = tuple(() if extents in ((), []) else buckets_of(extents) for extents in given)
        if any(extents and axis + 1 not in self.dynamic for axis, extents in enumerate(buckets)):
            raise ProblemError("buckets", given, "must be of dynamic extents")
        if math.prod(max(len(extents), 1) for extents in buckets) > MOST_VARIANTS:
            raise ProblemError("buckets", given, f"must have at most {MOST_VARIANTS} combinations")
        self._put("buckets", buckets if any(buckets) else ())

    def _make_representative(self) -> None:
        """Give dynamic axes their representative extents, whatever extents they came with."""
        if not self.dynamic:
            return
        if self.dynamic[-1] > self.rank:
            raise ProblemError("dynamic", self.dynamic, f"must be axes from 0 to {self.rank}")
        if self.dynamic_axes and self.rank not in DEFAULT_BUCKETS:
            raise ProblemError("data_spatial", self.dynamic, "extents may be any with 1 or 2 axes only")
        if 0 in self.dynamic:
            self._put("batch", REPRESENTATIVE_BATCH)
        data, output = list(self.data_spatial), list(self.output_spatial)
        for axis in self.dynamic_axes:
            representative = self._buckets_along(axis)[-1]
            output[axis] += self.strides[axis] * (representative - data[axis])
            data[axis] = representative
        self._put("data_spatial", tuple(data))
        self._put("output_spatial", integers("output_spatial", output, 0))

    def _check_integer_epilogue(self) -> None:
        one_of("activation", self.epilogue.activation, (a.name for a in ACTIVATIONS.values() if a.integers))
        for name, bound in self.epilogue.parameters.items():
            if not _INT32.min <= bound <= _INT32.max or not bound.is_integer():
                raise ProblemError(name, bound, f"must be an integer of 32 bits where dtype={self.dtype}")

    def _check_sizes(self) -> None:
        for name in ("data_shape", "filter_shape", "output_shape"):
            shape = getattr(self, name)
            # Without zero extents, since an empty tensor still has strides.
            if math.prod(max(extent, 1) for extent in shape) * 8 > INT64_MAX:
                raise ProblemError(name, shape, "must have a size in bytes that fits in 64 bits")
        for axis, extent in enumerate(self.uncropped_spatial):
            if extent + self.pads_begin[axis] + self.output_spatial[axis] > INT64_MAX:
                raise ProblemError("strides", self.strides, f"must keep every index of axis {axis} within 64 bits")

    @property
    def dynamic_axes(self) -> tuple[int, ...]:
        """The dynamic spatial axes, counted from 0."""
        return tuple(axis - 1 for axis in self.dynamic if axis)

    @property
    def _all_buckets(self) -> tuple[tuple[int, ...], ...]:
        return self.buckets or ((),) * self.rank

    def _buckets_along(self, axis: int) -> tuple[int, ...]:
        """Return the buckets along a dynamic spatial `axis`, rising: of "any" beside a list the largest alone."""
        buckets = DEFAULT_BUCKETS[self.rank]
        return self._all_buckets[axis] or (buckets[-1:] if self.buckets else buckets)

    @property
    def variants(self) -> tuple[Problem, ...]:
        """The problems of the single buckets, or combinations of them: an artifact has a schedule for each.

        A call belongs to the first one that holds its extents; the last axis varies first. Buckets that give no output
        are left out, except the largest. Without dynamic spatial extents it is the problem itself.
        """
        listed = [(axis,) for axis in self.dynamic_axes if self._all_buckets[axis]]
        free = tuple(axis for axis in self.dynamic_axes if not self._all_buckets[axis])
        problems = [self]
        for axes in [free, *listed] if free else listed:
            *small, largest = self._buckets_along(axes[0])
            extents = [*(extent for extent in small if self._gives_output(axes, extent)), largest]
            problems = [problem._with_bucket(axes, extent) for problem in problems for extent in extents]
        return tuple(problems)

    def _gives_output(self, axes: Sequence[int], extent: int) -> bool:
        return all(self.strides[axis] * (extent - 1) + self.output_constant(axis) > 0 for axis in axes)

    def _with_bucket(self, axes: Sequence[int], bucket: int) -> Problem:
        buckets = tuple((bucket,) if i in axes else old for i, old in enumerate(self._all_buckets))
        return dataclasses.replace(self, buckets=buckets)

    @property
    def rank(self) -> int:
        """The number of spatial axes."""
        return len(self.data_spatial)

    @property
    def uncropped_spatial(self) -> tuple[int, ...]:
        """The output extents before anything is cut off; see `uncropped`."""
        return uncropped(self.data_spatial, self.kernel, self.strides, self.dilations)

    def _batched(self, channels: int, spatial: tuple[int, ...]) -> tuple[int, ...]:
        if self.data_format == "NCX":
            return (self.batch, channels, *spatial)
        return (self.batch, *spatial, channels)

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Shape of the data, in `data_format`."""
        return self._batched(self.groups * self.in_channels, self.data_spatial)

    @property
    def data_form(self) -> tuple[int | str, ...]:
        """The `data_shape`, with "any" for dynamic extents."""
        form: list[int | str] = [*self.data_shape]
        for axis in self.dynamic:
            form[axis + 1 if axis and self.data_format == "NCX" else axis] = ANY
        return tuple(form)

    @property
    def filter_shape(self) -> tuple[int, ...]:
        """Shape of the filter, in `filter_format`."""
        if self.filter_format == "GIOX":
            return (self.groups, self.in_channels, self.out_channels, *self.kernel)
        if self.filter_format == "IOX":
            return (self.groups * self.in_channels, self.out_channels, *self.kernel)
        return (*self.kernel, self.out_channels, self.groups * self.in_channels)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the output, in `data_format`."""
        return self._batched(self.groups * self.out_channels, self.output_spatial)

    @property
    def bias_shape(self) -> tuple[int, ...]:
        """Shape of the bias: one element per output channel, in `accumulate_dtype`."""
        return (self.groups * self.out_channels,)

    @property
    def accumulate_dtype(self) -> str:
        """The type of sums and of the bias: float32, float64 or int32."""
        return DTYPES[self.dtype].accumulator

    @property
    def filter_dtype(self) -> str:
        """The type of the filter: `dtype`, or that of a quantized problem."""
        return self.quantization.filter if self.quantization else self.dtype

    @property
    def output_dtype(self) -> str:
        """The type of the output: `dtype`, int32 if `dtype` is an integer type, or that of a quantized problem."""
        return self.quantization.output if self.quantization else DTYPES[self.dtype].output

    @property
    def terms(self) -> int:
        """The most products that an output element is a sum of."""
        axes = zip(self.kernel, self.strides, self.dilations, strict=True)
        return self.in_channels * math.prod(ceil_div(k, s // math.gcd(s, d)) for k, s, d in axes)

    @property
    def macs(self) -> int:
        """The number of multiply-adds that reach the output: products that a pad cuts off do not count."""
        axes = zip(
            self.data_spatial, self.kernel, self.strides, self.dilations, self.pads_begin, self.output_spatial,
            strict=True,
        )  # fmt: skip
        pairs = math.prod(landing_pairs(*axis) for axis in axes)
        return self.batch * self.groups * self.in_channels * self.out_channels * pairs

    def reach(self, axis: int, k: int) -> range:
        """Return the data positions whose product with kernel element `k` lands inside the output, along `axis`."""
        s, shift = self.strides[axis], self.dilations[axis] * k - self.pads_begin[axis]
        first = max(0, -(shift // s))
        last = min(self.data_spatial[axis] - 1, (self.output_spatial[axis] - 1 - shift) // s)
        return range(first, max(first, last + 1))

    @property
    def min_bytes(self) -> int:
        """The bytes that must cross memory: data, filter and bias read once, output written once."""
        moved = math.prod(self.data_shape) * element_bytes(self.dtype)
        moved += math.prod(self.filter_shape) * element_bytes(self.filter_dtype)
        moved += math.prod(self.output_shape) * element_bytes(self.output_dtype)
        return moved + self.epilogue.bias * math.prod(self.bias_shape) * element_bytes(self.accumulate_dtype)

    @property
    def key(self) -> str:
        """The problem in one printed word that a file name can hold; `from_key` reads it back."""
        return write_key(self)

    @property
    def artifact_key(self) -> str:
        """The key of the library that serves the problem: filters reach it as ``[G, Ci, Co, *K]`` from any format."""
        return self.replace(filter_format="GIOX").key

    @property
    def artifact_keys(self) -> tuple[str, ...]:
        """The keys of libraries that serve: `artifact_key`, then those of problems that permit less, the exact last."""
        allowed = PRECISIONS[: PRECISIONS.index(self.precision) + 1]
        return tuple(self.replace(precision=precision).artifact_key for precision in reversed(allowed))

    @staticmethod
    def from_key(key: str) -> Problem:
        """Return the problem that prints as `key`; anything else raises ProblemError."""
        problem = Problem(**read_key(key))
        if problem.key != key:
            raise ProblemError("key", key, f"must be written {problem.key}")
        return problem

    def replace(self, **changes: Any) -> Problem:
        """Return the problem with some fields changed, checked again. Extents that are given are no longer dynamic."""
        given = {0} if "batch" in changes else set()
        if "data_spatial" in changes:
            given |= set(range(1, self.rank + 1))
        dynamic = changes.get("dynamic", tuple(axis for axis in self.dynamic if axis not in given))
        kept = tuple(old if i + 1 in dynamic and i + 1 not in given else () for i, old in enumerate(self._all_buckets))
        return dataclasses.replace(self, **{"dynamic": dynamic, "buckets": kept} | changes)

    def output_constant(self, axis: int) -> int:
        """Return the c of the output extent ``s*(X-1) + c`` along a spatial `axis`; pads and kernel decide it."""
        return self.output_spatial[axis] - self.strides[axis] * (self.data_spatial[axis] - 1)

    def at(self, data_shape: tuple[int, ...]) -> Problem:
        """Return the problem of a call of a variable problem, with data of that shape.

        Raises ProblemError if the shape differs in an extent that is not dynamic, or makes an output extent negative.
        """
        form = self.data_form
        rule = f"must be ({', '.join(map(str, form))})"
        data_shape = several("data_shape", data_shape, rule)
        if len(data_shape) != len(form) or any(f not in (ANY, x) for f, x in zip(form, data_shape, strict=True)):
            raise ProblemError("data_shape", data_shape, rule)
        batch = data_shape[0]
        data_spatial = data_shape[2:] if self.data_format == "NCX" else data_shape[1:-1]
        output = list(self.output_spatial)
        for axis in self.dynamic_axes:
            output[axis] = self.strides[axis] * (data_spatial[axis] - 1) + self.output_constant(axis)
        return self.replace(batch=batch, data_spatial=data_spatial, output_spatial=tuple(output))

    def serves(self, other: Problem) -> bool:
        """Tell whether a kernel for this problem computes `other`.

        They may differ in extents that are dynamic here only, and in the filter format, which no artifact sees. A
        kernel may also be more exact than `other` permits.
        """
        check_problem(other)
        if not set(other.dynamic) <= set(self.dynamic) or other.rank != self.rank:
            return False
        as_exact = PRECISIONS.index(self.precision) <= PRECISIONS.index(other.precision)
        exact = {"precision": self.precision} if as_exact else {}
        try:
            alike = other.replace(filter_format=self.filter_format, dynamic=self.dynamic, buckets=self.buckets, **exact)
        except ProblemError:  # its output would be negative at the representative extent
            return False
        return alike == self

    def canonical_filter(self, filter: Array) -> Array:
        """Return a view of `filter`, which is in `filter_format`, as ``[G, Ci, Co, *K]``; copies nothing."""
        if self.filter_format == "XIO":
            filter = filter.transpose(self.rank + 1, self.rank, *range(self.rank))
        return filter.reshape(self.groups, self.in_channels, self.out_channels, *self.kernel)
