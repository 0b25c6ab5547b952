"""The canonical description of one transposed convolution, under all dialects.

Per spatial axis, with data extent X, kernel K, stride s, dilation d, begin pad p and output extent Y:

    out[n, g*Co+o, s*x + d*k - p] += data[n, g*Ci+i, x] * filter[g, i, o, k]    where the index lies in [0, Y)

What nothing reaches is zero. The epilogue (bias, then activation) follows. An end pad is not part of the description:
it only decided Y.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tvm_deconv.errors import ProblemError

if TYPE_CHECKING:
    from tvm_deconv.problem import dialects

Array = npt.NDArray[Any]

#: dtype -> (bytes, accumulator, output)
_DTYPES = {
    "float32": (4, "float32", "float32"),
    "float64": (8, "float64", "float64"),
    "float16": (2, "float32", "float16"),
    "bfloat16": (2, "float32", "bfloat16"),
    "int8": (1, "int32", "int32"),
    "uint8": (1, "int32", "int32"),
}
_BYTES = {name: size for name, (size, _, _) in _DTYPES.items()} | {"int32": 4}
DTYPES = tuple(_DTYPES)
#: How float32 products are computed: as IEEE 754 has it, or with factors rounded to 11 bits where the target can.
PRECISIONS = ("ieee", "tf32")
ACTIVATIONS = ("none", "relu", "leaky_relu", "sigmoid", "tanh", "gelu", "silu", "clip")
DATA_FORMATS = ("NCX", "NXC")
#: The formats a problem keeps, and the other names of the same memory.
FILTER_FORMATS = ("IOX", "GIOX", "XIO")
_FILTER_ALIASES = {"OIX": "IOX", "XOI": "XIO"}
_INT64_MAX = 2**63 - 1
_INT64_DIGITS = len(str(_INT64_MAX))
_INT32 = (-(2**31), 2**31 - 1)
#: The word for an extent that every call decides.
ANY = "any"
_ANY_OUTPUT = re.compile(r"any([+-]\d{1,18})", re.ASCII)
#: What a problem with a dynamic batch holds in its place.
_REPRESENTATIVE_BATCH = 1
#: The buckets of "any", by the rank.
_BUCKETS = {1: (16, 128, 1024), 2: (64,)}
_MOST_VARIANTS = 16


def is_dynamic(extent: object) -> bool:
    """Tell whether a call decides `extent`: the word "any", or a list of buckets."""
    return isinstance(extent, (list, tuple)) or (isinstance(extent, str) and extent == ANY)


def buckets_of(extent: object) -> tuple[int, ...]:
    """The buckets that a dynamic `extent` lists, rising; none for "any". Raises ProblemError."""
    if isinstance(extent, str):
        return ()
    found = integers("data_spatial", extent, 1)
    if not found:
        raise ProblemError("data_spatial", extent, "must hold at least one extent, where it is a list of buckets")
    return tuple(sorted(set(found)))


def representative_extent(axis: int, rank: int, extent: object = ANY) -> int:
    """What a problem has in the place of a dynamic `extent`: of the batch, which is `axis` 0, or of a spatial axis."""
    return max(buckets_of(extent) or _BUCKETS.get(rank, (1,))) if axis else _REPRESENTATIVE_BATCH


def one_of(attribute: str, value: object, allowed: Iterable[str]) -> str:
    """`value` if it is one of the `allowed` words, else ProblemError."""
    allowed = tuple(allowed)
    if not isinstance(value, str) or value not in allowed:
        raise ProblemError(attribute, value, f"must be one of {', '.join(allowed)}")
    return value


def integer(attribute: str, value: object, minimum: int) -> int:
    """`value` as a Python int of at least `minimum`, else ProblemError; floats and bools are no integers."""
    if isinstance(value, (bool, np.bool_)):
        raise ProblemError(attribute, value, "must be an integer, not a bool")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ProblemError(attribute, value, "must be an integer") from None
    if number < minimum:
        raise ProblemError(attribute, number, f"must be at least {minimum}")
    if number > _INT64_MAX:
        raise ProblemError(attribute, number, "must fit in 64 bits")
    return number


def integers(attribute: str, value: object, minimum: int, length: int | None = None) -> tuple[int, ...]:
    """`value` as a tuple of `length` ints, each at least `minimum`, else ProblemError."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ProblemError(attribute, value, "must be a sequence of integers")
    try:
        items = tuple(integer(attribute, item, minimum) for item in value)
    except ProblemError as error:
        raise ProblemError(attribute, value, f"every element {error.rule}") from None
    except TypeError:
        raise ProblemError(attribute, value, "must be a sequence of integers") from None
    if length is not None and len(items) != length:
        raise ProblemError(attribute, items, f"must have one element per spatial axis, {length} here")
    return items


def uncropped(
    data_spatial: Iterable[int], kernel: Iterable[int], strides: Iterable[int], dilations: Iterable[int]
) -> tuple[int, ...]:
    """The output extents that nothing would be cut from: s*(X-1) + (K-1)*d + 1."""
    axes = zip(data_spatial, kernel, strides, dilations, strict=True)
    return tuple(s * (x - 1) + (k - 1) * d + 1 for x, k, s, d in axes)


_EPILOGUE = re.compile(r"(?P<bias>bias(?:\+(?=.)|$))?(?:(?P<name>[a-z_]+)(?:\((?P<numbers>[^()]+)\))?)?")


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What happens to an element after the last product: bias, then activation.

    `alpha` is the slope of leaky_relu; `minimum` and `maximum` are the bounds of clip. Where they mean nothing they
    take their defaults, so that equal epilogues compare equal. gelu is the exact form, with the error function. Raises
    ProblemError.
    """

    bias: bool = False
    activation: str = "none"
    alpha: float = 0.01
    minimum: float = 0.0
    maximum: float = 6.0

    def __post_init__(self) -> None:
        if not isinstance(self.bias, (bool, np.bool_)):
            raise ProblemError("bias", self.bias, "must be True or False: the values come with the filter, at bind")
        one_of("activation", self.activation, ACTIVATIONS)
        object.__setattr__(self, "bias", bool(self.bias))
        for field in dataclasses.fields(self)[2:]:
            meant = self.activation == ("leaky_relu" if field.name == "alpha" else "clip")
            value = getattr(self, field.name) if meant else field.default
            if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
                raise ProblemError(field.name, value, "must be a real number")
            try:
                object.__setattr__(self, field.name, float(value) + 0.0)  # -0.0 becomes 0.0: one printed form
            except OverflowError:
                raise ProblemError(field.name, value, "must fit in a float") from None
        if not math.isfinite(self.alpha):
            raise ProblemError("alpha", self.alpha, "must be finite")
        if not self.minimum <= self.maximum:
            raise ProblemError("minimum", self.minimum, f"must be at most maximum={self.maximum}, neither NaN")

    def __str__(self) -> str:
        activation = self.activation
        if activation == "leaky_relu":
            activation += f"({self.alpha!r})"
        elif activation == "clip":
            activation += f"({self.minimum!r},{self.maximum!r})"
        if self.bias:
            return "bias" if activation == "none" else f"bias+{activation}"
        return activation

    @staticmethod
    def parse(text: str) -> Epilogue:
        """The epilogue that prints as `text`, for example ``bias+leaky_relu(0.1)``; all else raises ProblemError."""
        found = _EPILOGUE.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise ProblemError("epilogue", text, "must look like none, bias, relu or bias+leaky_relu(0.1)")
        try:
            numbers = [float(number) for number in (found["numbers"] or "").split(",") if number]
        except ValueError:
            raise ProblemError("epilogue", text, "what stands in parentheses must be numbers") from None
        activation = found["name"] or "none"
        names = {"leaky_relu": ["alpha"], "clip": ["minimum", "maximum"]}.get(activation, [])
        if len(names) != len(numbers):
            raise ProblemError("epilogue", text, f"{activation} takes {len(names)} numbers")
        epilogue = Epilogue(found["bias"] is not None, activation, **dict(zip(names, numbers, strict=True)))
        if str(epilogue) != text:
            raise ProblemError("epilogue", text, f"must be written {epilogue}")
        return epilogue


_KEY = re.compile(
    r"n(?P<batch>\d+|any)-g(?P<groups>\d+)-i(?P<in_channels>\d+)-o(?P<out_channels>\d+)"
    r"-x(?P<data_spatial>(?:any(?:\(\d+(?:,\d+)*\))?|[\dx])+)-k(?P<kernel>[\dx]+)-s(?P<strides>[\dx]+)-d(?P<dilations>[\dx]+)"
    r"-p(?P<pads_begin>[\dx]+)-y(?P<output_spatial>(?:any[+-]|[\dx])+)"
    r"-(?P<dtype>[a-z0-9]+)(?:\+(?P<precision>[a-z0-9]+))?-(?P<data_format>[A-Z]+)-(?P<filter_format>[A-Z]+)-(?P<epilogue>[^\s/]+)",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One transposed convolution with everything decided; see the module for its meaning.

    `in_channels` and `out_channels` are per group. Sequences become tuples and numpy integers become ints. A dilation
    along an axis where the kernel has one element is 1, and filter formats that are the same memory have one name.

    Extents may be left to each call, which makes a *variable* problem: ``batch="any"``, and with one or two axes
    ``"any"`` in `data_spatial`, where `output_spatial` then has ``"any+c"`` for ``s*(X-1) + c``. `dynamic` lists those
    axes of the data (0 the batch, 1 the first spatial axis). In place of ``"any"`` may stand *buckets*, a list of
    extents: calls of every extent are served still, each by a schedule that was chosen for the smallest bucket that
    holds it, or for the largest; ``"any"`` has (16, 128, 1024) with one axis and (64,) with two. `buckets` keeps them,
    one tuple for each spatial axis, empty for "any"; `variants` are the problems of the single buckets. The fields of
    dynamic axes, and all that follows from them, are those of a representative call: a batch of 1, and the largest
    bucket. `at` gives the problem of a call.

    `precision` "tf32", of float32 problems, permits data and filter to be rounded to TF32 before they are multiplied;
    sums stay float32. It asks for nothing: what computes exactly serves such a problem too. Raises ProblemError.
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
    epilogue: Epilogue = Epilogue()
    dynamic: tuple[int, ...] = ()
    precision: str = "ieee"
    buckets: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        self._read_dynamic()
        for name, minimum in (("batch", 0), ("groups", 1), ("in_channels", 1), ("out_channels", 1)):
            put(name, integer(name, getattr(self, name), minimum))
        put("data_spatial", integers("data_spatial", self.data_spatial, 1))
        if not 1 <= self.rank <= 3:
            raise ProblemError("data_spatial", self.data_spatial, "must have 1, 2 or 3 axes")
        per_axis = (("kernel", 1), ("strides", 1), ("dilations", 1), ("pads_begin", 0), ("output_spatial", 0))
        for name, minimum in per_axis:
            put(name, integers(name, getattr(self, name), minimum, self.rank))
        put("dilations", tuple(1 if k == 1 else d for k, d in zip(self.kernel, self.dilations, strict=True)))
        one_of("dtype", self.dtype, DTYPES)
        one_of("precision", self.precision, PRECISIONS)
        if self.precision != "ieee" and self.dtype != "float32":
            raise ProblemError("precision", self.precision, f"must be ieee where dtype={self.dtype}")
        one_of("data_format", self.data_format, DATA_FORMATS)
        one_of("filter_format", self.filter_format, (*FILTER_FORMATS, *_FILTER_ALIASES))
        put("filter_format", _FILTER_ALIASES.get(self.filter_format, self.filter_format))
        if not isinstance(self.epilogue, Epilogue):
            raise ProblemError("epilogue", self.epilogue, "must be an Epilogue")
        self._make_representative()
        if self.accumulate_dtype == "int32":
            self._check_integer_epilogue()
        self._check_sizes()

    def _read_dynamic(self) -> None:
        """Turn the words for dynamic extents into `dynamic` and a representative extent."""
        dynamic = set(integers("dynamic", self.dynamic, 0))
        if isinstance(self.batch, str) and self.batch == ANY:
            dynamic.add(0)
            object.__setattr__(self, "batch", _REPRESENTATIVE_BATCH)
        data, output = self.data_spatial, self.output_spatial
        buckets = self.buckets
        if isinstance(data, (list, tuple)) and any(map(is_dynamic, data)):
            if not isinstance(output, (list, tuple)) or len(output) != len(data):
                raise ProblemError(
                    "output_spatial", output, f"must have one element per spatial axis, {len(data)} here"
                )
            extents: list[Any] = list(data)
            outputs: list[Any] = list(output)
            buckets = tuple(buckets_of(extent) if is_dynamic(extent) else () for extent in data)
            for axis, extent in enumerate(data):
                if is_dynamic(extent):
                    found = _ANY_OUTPUT.fullmatch(outputs[axis]) if isinstance(outputs[axis], str) else None
                    if found is None:
                        rule = f"must be any+c where the data extent is any, for s*(X-1) + c; axis {axis} is not"
                        raise ProblemError("output_spatial", output, rule)
                    dynamic.add(axis + 1)
                    extents[axis] = representative = representative_extent(axis + 1, len(data), extent)
                    stride = integers("strides", self.strides, 1, len(data))[axis]
                    outputs[axis] = stride * (representative - 1) + int(found[1])
            object.__setattr__(self, "data_spatial", tuple(extents))
            object.__setattr__(self, "output_spatial", tuple(outputs))
        object.__setattr__(self, "dynamic", tuple(sorted(dynamic)))
        object.__setattr__(self, "buckets", buckets)

    def _make_representative(self) -> None:
        """Give dynamic axes their representative extents, whatever extents they came with."""
        self._read_buckets()
        if not self.dynamic:
            return
        if self.dynamic[-1] > self.rank:
            raise ProblemError("dynamic", self.dynamic, f"must be axes from 0 to {self.rank}")
        if self.dynamic != (0,) and self.rank not in _BUCKETS:
            raise ProblemError("data_spatial", self.dynamic, "extents may be any with 1 or 2 axes only")
        if 0 in self.dynamic:
            object.__setattr__(self, "batch", _REPRESENTATIVE_BATCH)
        data, output = list(self.data_spatial), list(self.output_spatial)
        for axis in (axis - 1 for axis in self.dynamic if axis):
            representative = self._buckets(axis)[-1]
            output[axis] += self.strides[axis] * (representative - data[axis])
            data[axis] = representative
        object.__setattr__(self, "data_spatial", tuple(data))
        object.__setattr__(self, "output_spatial", integers("output_spatial", output, 0))

    def _read_buckets(self) -> None:
        """Bring `buckets` into their one form."""
        given = self.buckets
        if not isinstance(given, (list, tuple)) or (given and len(given) != self.rank):
            raise ProblemError("buckets", given, f"must have one element per spatial axis, {self.rank} here")
        buckets = tuple(() if extents in ((), []) else buckets_of(extents) for extents in given)
        if any(extents and axis + 1 not in self.dynamic for axis, extents in enumerate(buckets)):
            raise ProblemError("buckets", given, "must be of dynamic extents")
        if math.prod(max(len(extents), 1) for extents in buckets) > _MOST_VARIANTS:
            raise ProblemError("buckets", given, f"must have at most {_MOST_VARIANTS} combinations")
        object.__setattr__(self, "buckets", buckets if any(buckets) else ())

    def _buckets(self, axis: int) -> tuple[int, ...]:
        """The buckets along a dynamic spatial `axis`, rising."""
        return self._all_buckets[axis] or _BUCKETS[self.rank]

    @property
    def variants(self) -> tuple[Problem, ...]:
        """The problems of the single buckets, or combinations of them: an artifact has a schedule for each.

        The first that holds a call's extents is the one for it; the last axis is that which varies first. Buckets that
        give no output are left out, but for the largest. Without dynamic spatial extents it is the problem itself.
        """
        found = [self]
        for axis in (axis - 1 for axis in self.dynamic if axis):
            stride, constant = self.strides[axis], self.output_constant(axis)
            *small, largest = self._buckets(axis)
            extents = [*(extent for extent in small if stride * (extent - 1) + constant > 0), largest]
            found = [
                dataclasses.replace(
                    problem, buckets=tuple((x,) if i == axis else old for i, old in enumerate(problem._all_buckets))
                )
                for problem in found
                for x in extents
            ]
        return tuple(found)

    @property
    def _all_buckets(self) -> tuple[tuple[int, ...], ...]:
        return self.buckets or ((),) * self.rank

    def _check_integer_epilogue(self) -> None:
        epilogue = self.epilogue
        one_of("activation", epilogue.activation, ("none", "relu", "clip"))
        for name, bound in (("minimum", epilogue.minimum), ("maximum", epilogue.maximum)):
            if not _INT32[0] <= bound <= _INT32[1] or not bound.is_integer():
                raise ProblemError(name, bound, f"must be an integer of 32 bits where dtype={self.dtype}")

    def _check_sizes(self) -> None:
        for name in ("data_shape", "filter_shape", "output_shape"):
            shape = getattr(self, name)
            # Without zero extents, since an empty tensor still has strides.
            if math.prod(max(extent, 1) for extent in shape) * 8 > _INT64_MAX:
                raise ProblemError(name, shape, "must have a size in bytes that fits in 64 bits")
        for axis, extent in enumerate(self.uncropped_spatial):
            if extent + self.pads_begin[axis] + self.output_spatial[axis] > _INT64_MAX:
                raise ProblemError("strides", self.strides, f"must keep every index of axis {axis} within 64 bits")

    @property
    def rank(self) -> int:
        """The number of spatial axes."""
        return len(self.data_spatial)

    @property
    def uncropped_spatial(self) -> tuple[int, ...]:
        """The output extents that nothing would be cut from; see `uncropped`."""
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
        return _DTYPES[self.dtype][1]

    @property
    def output_dtype(self) -> str:
        """The type of the output: `dtype`, or int32 where `dtype` is an integer type."""
        return _DTYPES[self.dtype][2]

    @property
    def macs(self) -> int:
        """The multiply-adds that reach the output: products that a pad cuts off are not counted."""
        pairs = math.prod(self._pairs(axis) for axis in range(self.rank))
        return self.batch * self.groups * self.in_channels * self.out_channels * pairs

    def _pairs(self, axis: int) -> int:
        """How many pairs of a data position and a kernel element land inside the output, along `axis`."""
        positions, kernel = self.data_spatial[axis], self.kernel[axis]
        s, d, pad = self.strides[axis], self.dilations[axis], self.pads_begin[axis]

        def before(end: int) -> int:
            """The pairs (x, k) with ``s*x + d*k < end``: so many x for each k, `positions` at most."""
            reaching = min(max(-(-end // d), 0), kernel)
            full = min(max(-(-(end - s * (positions - 1)) // d), 0), reaching)
            # Counted from the last k that reaches any: (smallest + d*i) // s positions, rounded up beforehand.
            smallest = end - d * (reaching - 1) + s - 1
            return full * positions + _floor_sum(reaching - full, s, d, smallest)

        return before(pad + self.output_spatial[axis]) - before(pad)

    def reach(self, axis: int, k: int) -> range:
        """The data positions whose product with kernel element `k` lands inside the output, along `axis`."""
        s, shift = self.strides[axis], self.dilations[axis] * k - self.pads_begin[axis]
        first = max(0, -(shift // s))
        last = min(self.data_spatial[axis] - 1, (self.output_spatial[axis] - 1 - shift) // s)
        return range(first, max(first, last + 1))

    @property
    def min_bytes(self) -> int:
        """Bytes that must cross memory: data, filter and bias read once, output written once."""
        size = _BYTES[self.dtype]
        moved = (math.prod(self.data_shape) + math.prod(self.filter_shape)) * size
        moved += math.prod(self.output_shape) * _BYTES[self.output_dtype]
        return moved + self.epilogue.bias * math.prod(self.bias_shape) * _BYTES[self.accumulate_dtype]

    @property
    def key(self) -> str:
        """The problem in one printed word that a file name can hold; `from_key` reads it back."""

        def by(extents: Iterable[int | str]) -> str:
            return "x".join(map(str, extents))

        data: list[int | str] = [*self.data_spatial]
        output: list[int | str] = [*self.output_spatial]
        for axis in (axis - 1 for axis in self.dynamic if axis):
            buckets = self._all_buckets[axis]
            data[axis] = f"{ANY}({','.join(map(str, buckets))})" if buckets else ANY
            output[axis] = f"{ANY}{self.output_constant(axis):+d}"
        dtype = self.dtype if self.precision == "ieee" else f"{self.dtype}+{self.precision}"
        return (
            f"n{ANY if 0 in self.dynamic else self.batch}-g{self.groups}-i{self.in_channels}-o{self.out_channels}"
            f"-x{by(data)}-k{by(self.kernel)}-s{by(self.strides)}-d{by(self.dilations)}"
            f"-p{by(self.pads_begin)}-y{by(output)}"
            f"-{dtype}-{self.data_format}-{self.filter_format}-{self.epilogue}"
        )

    @property
    def artifact_key(self) -> str:
        """The key of the library that serves the problem: filters reach it as ``[G, Ci, Co, *K]`` from any format."""
        return self.replace(filter_format="GIOX").key

    @property
    def artifact_keys(self) -> tuple[str, ...]:
        """The `artifact_key`, and that of the exact problem where less is permitted: either library serves."""
        return tuple(dict.fromkeys((self.artifact_key, self.replace(precision="ieee").artifact_key)))

    @staticmethod
    def from_key(key: str) -> Problem:
        """The problem that prints as `key`; anything else raises ProblemError."""
        found = _KEY.fullmatch(key) if isinstance(key, str) else None
        if found is None:
            raise ProblemError("key", key, "must be the printed key of a problem")
        fields: dict[str, Any] = found.groupdict()

        def read(extent: str) -> int | str | tuple[int, ...]:
            if extent.startswith(f"{ANY}("):
                return tuple(map(int, re.findall(r"\d+", extent)))
            return extent if extent.startswith(ANY) else int(extent)

        channels = ("batch", "groups", "in_channels", "out_channels")
        for name in (*channels, "data_spatial", "kernel", "strides", "dilations", "pads_begin", "output_spatial"):
            numbers = fields[name].split("x")
            if not all(numbers):
                raise ProblemError("key", key, f"{name} must be integers joined by x")
            if (
                max(map(len, re.findall(r"\d+", fields[name])), default=0) > _INT64_DIGITS
            ):  # Python refuses to read numbers of some thousand digits
                raise ProblemError("key", key, f"{name} must fit in 64 bits")
            fields[name] = read(numbers[0]) if name in channels else tuple(map(read, numbers))
        fields["epilogue"] = Epilogue.parse(fields["epilogue"])
        fields["precision"] = fields["precision"] or "ieee"
        problem = Problem(**fields)
        if problem.key != key:
            raise ProblemError("key", key, f"must be written {problem.key}")
        return problem

    def replace(self, **changes: Any) -> Problem:
        """The same problem with some fields changed; validated again. Extents that are given are no longer dynamic."""
        given = {0} if "batch" in changes else set()
        if "data_spatial" in changes:
            given |= set(range(1, self.rank + 1))
        dynamic = changes.get("dynamic", tuple(axis for axis in self.dynamic if axis not in given))
        kept = tuple(old if i + 1 in dynamic and i + 1 not in given else () for i, old in enumerate(self._all_buckets))
        return dataclasses.replace(self, **{"dynamic": dynamic, "buckets": kept} | changes)

    def output_constant(self, axis: int) -> int:
        """The c of the output extent ``s*(X-1) + c`` along a spatial `axis`, which pads and kernel decide."""
        return self.output_spatial[axis] - self.strides[axis] * (self.data_spatial[axis] - 1)

    def at(self, data_shape: tuple[int, ...]) -> Problem:
        """The problem of a call of a variable problem with data of that shape.

        Raises ProblemError where the shape differs in what is not dynamic, or an output extent would be negative.
        """
        wanted = self.data_form
        if len(data_shape) != len(wanted) or any(w not in (ANY, x) for w, x in zip(wanted, data_shape, strict=True)):
            raise ProblemError("data_shape", data_shape, f"must be ({', '.join(map(str, wanted))})")
        batch = data_shape[0]
        data_spatial = data_shape[2:] if self.data_format == "NCX" else data_shape[1:-1]
        output = list(self.output_spatial)
        for axis in (axis - 1 for axis in self.dynamic if axis):
            output[axis] = self.strides[axis] * (data_spatial[axis] - 1) + self.output_constant(axis)
        return self.replace(batch=batch, data_spatial=data_spatial, output_spatial=tuple(output))

    def serves(self, other: Problem) -> bool:
        """Tell whether a kernel for this problem computes `other`: they differ in extents that are dynamic here only.

        Filter formats do not matter, as to artifacts, and a kernel may be more exact than what `other` permits.
        """
        if not set(other.dynamic) <= set(self.dynamic) or other.rank != self.rank:
            return False
        exact = {"precision": "ieee"} if self.precision == "ieee" else {}
        try:
            wanted = other.replace(
                filter_format=self.filter_format, dynamic=self.dynamic, buckets=self.buckets, **exact
            )
        except ProblemError:  # its output would be negative at the representative extent
            return False
        return wanted == self

    def canonical_filter(self, filter: Array) -> Array:
        """A view of `filter`, which is in `filter_format`, as ``[G, Ci, Co, *K]``; copies nothing."""
        if self.filter_format == "XIO":
            filter = filter.transpose(self.rank + 1, self.rank, *range(self.rank))
        return filter.reshape(self.groups, self.in_channels, self.out_channels, *self.kernel)

    if TYPE_CHECKING:  # bound by tvm_deconv.problem.dialects, which needs this class
        from_openvino = staticmethod(dialects.from_openvino)
        from_onednn = staticmethod(dialects.from_onednn)
        from_onnx = staticmethod(dialects.from_onnx)
        from_torch = staticmethod(dialects.from_torch)


def _floor_sum(count: int, divisor: int, factor: int, offset: int) -> int:
    """Return the sum of ``(factor*i + offset) // divisor`` for i from 0 to count - 1, in logarithmic time."""
    total = 0
    while True:
        total += factor // divisor * (count * (count - 1) // 2) + offset // divisor * count
        # What is left counts the lattice points under a line of slope below one: the same sum along the other axis.
        rows, rest = divmod(factor % divisor * count + offset % divisor, divisor)
        if rows == 0:
            return total
        count, divisor, factor, offset = rows, factor % divisor, divisor, rest
