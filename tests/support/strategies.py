"""Random problems over the whole attribute space, and random arrays that fit them.

    from support.strategies import operands, problems

    @given(problems(dtypes=["float32"]))
    def test(p):
        data, filter, bias = operands(p, seed=0)

Sizes are bounded, so that a problem has at most `max_macs` products and about as many elements; everything else goes as
far as an operator allows: odd channels and extents, strides beyond the kernel, pads beyond the kernel, outputs that are
cut, extended or empty, no batch at all.
"""

import math

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from tvm_deconv.problem import ACTIVATIONS, DATA_FORMATS, DTYPES, FILTER_FORMATS, Epilogue, Problem

MAX_MACS = 200_000
_CHANNELS = (1, 2, 3, 5, 7, 8, 13, 16, 17, 24, 31, 33, 64)
_GROUPS = (1, 2, 3, 4, 7, 16, 19)
#: Largest (data extent, kernel, stride, dilation) by the number of axes.
_LARGEST = {1: (41, 9, 9, 5), 2: (9, 5, 5, 3), 3: (5, 3, 4, 3)}


@st.composite
def epilogues(draw, dtype="float32"):
    integer = dtype in ("int8", "uint8", "int32")
    activation = draw(st.sampled_from([a.name for a in ACTIVATIONS.values() if a.integers or not integer]))
    number = st.integers(-1000, 1000) if integer else st.floats(-4, 4, width=32)
    minimum, maximum = sorted((draw(number), draw(number)))
    alpha = draw(st.floats(-1, 2, width=32))
    return Epilogue(draw(st.booleans()), activation, alpha=alpha, minimum=minimum, maximum=maximum)


@st.composite
def problems(
    draw,
    dtypes=tuple(DTYPES),
    ranks=(1, 2, 3),
    data_formats=DATA_FORMATS,
    filter_formats=FILTER_FORMATS,
    epilogue=True,
    max_macs=MAX_MACS,
):
    """A Problem; `epilogue=False` leaves bias and activation out."""
    rank = draw(st.sampled_from(ranks))

    def extents(largest, smallest=1):
        return tuple(draw(st.lists(st.integers(smallest, largest), min_size=rank, max_size=rank)))

    largest_data, largest_kernel, largest_stride, largest_dilation = _LARGEST[rank]
    data, kernel = extents(largest_data), extents(largest_kernel)
    strides = kernel if draw(st.integers(0, 4)) == 0 else extents(largest_stride)
    dilations = (1,) * rank if draw(st.booleans()) else extents(largest_dilation)
    reaches = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    pads = tuple(draw(st.integers(0, reach + 2)) for reach in reaches)
    output = []
    for x, s, reach, pad in zip(data, strides, reaches, pads, strict=True):
        # From more than the uncropped extent down to less than half of it, but most often what a symmetric pad leaves.
        uncropped = s * (x - 1) + reach
        symmetric = max(uncropped - 2 * pad, 0)
        output.append(draw(st.one_of(st.just(symmetric), st.integers(uncropped // 2, uncropped + s + 2))))

    budget = max_macs // max(math.prod(data) * math.prod(kernel), math.prod(output))

    def within(choices):
        nonlocal budget
        chosen = draw(st.sampled_from([choice for choice in choices if choice <= max(budget, 1)]))
        budget //= max(chosen, 1)
        return chosen

    batch = within((1, 1, 2, 3, 0))
    groups = within(_GROUPS) if draw(st.booleans()) else 1
    depthwise = groups > 1 and draw(st.booleans())
    dtype = draw(st.sampled_from(dtypes))
    return Problem(
        batch=batch,
        groups=groups,
        in_channels=1 if depthwise else within(_CHANNELS),
        out_channels=1 if depthwise else within(_CHANNELS),
        data_spatial=data,
        kernel=kernel,
        strides=strides,
        dilations=dilations,
        pads_begin=pads,
        output_spatial=tuple(output),
        dtype=dtype,
        data_format=draw(st.sampled_from(data_formats)),
        filter_format=draw(st.sampled_from(filter_formats)),
        epilogue=draw(epilogues(dtype)) if epilogue else Epilogue(),
    )


def storage_dtype(name):
    """The NumPy dtype of arrays of dtype `name`; bfloat16 is that of ml_dtypes."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def operands(p, seed=0):
    """(data, filter, bias or None) for `p`: normal numbers, or integers whose sums fit, in the types that `p` takes."""
    rng = np.random.default_rng(seed)

    def array(shape, dtype):
        if np.issubdtype(dtype, np.integer):
            least, most = (np.iinfo(dtype).min, np.iinfo(dtype).max) if dtype.itemsize == 1 else (-1023, 1023)
            return rng.integers(least, most, shape, dtype, endpoint=True)
        return rng.standard_normal(shape).astype(dtype)

    kept = storage_dtype(p.dtype)
    bias = array(p.bias_shape, storage_dtype(p.accumulate_dtype)) if p.epilogue.bias else None
    return array(p.data_shape, kept), array(p.filter_shape, kept), bias


def not_empty(problem):
    return problem.batch > 0 and 0 not in problem.output_spatial
