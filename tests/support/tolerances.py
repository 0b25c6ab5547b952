"""Bounds on the errors of kernels: one table for all tests, derived from how numbers are rounded.

A sum of K products in a type with unit roundoff u is off by about ``sqrt(K) * u`` of its norm: rounding errors add up
like a random walk. No problem of the tests sums more than 1024 products into an element, hence 32 u. The reference is
float64 and is itself off by as much, which doubles the bound for kernels in float64. Results in half precision are
rounded once more, by at most u of their type, and the least of them by half of their distance. A single element may be
off by more than the norm says: by 4 times that, relative to the largest element.
"""

import numpy as np

#: Half the distance from 1 to the next number.
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
#: Half the distance between the least numbers of types that round results.
_LEAST = {"float16": 2.0**-25, "bfloat16": 2.0**-134}
_SUM = 32.0
_ELEMENT = 4.0
INTEGERS = ("int8", "uint8", "int32")
#: What Winograd's transforms and Strassen's algorithm may add, as a factor, to the errors of sums.
WINOGRAD = 4.0

#: dtype -> relative and absolute bound on an activation at one point. float32: 8 roundings of the vector forms, and
#: results near the least normal number become 0. float64: gelu at -30, where the argument of erfc is rounded. Halves:
#: one unit in the last place, since float32 results on a tie round either way.
ACTIVATIONS_AT_A_POINT = {
    "float32": (1e-6, 1e-36),
    "float64": (1e-12, 1e-304),
    "float16": (2.0**-10, 2.0**-24),
    "bfloat16": (2.0**-7, 1e-36),
}


def norm_bound(dtype, growth=1.0):
    """Return the bound on ``|error| / |wanted|`` in the 2-norm; `growth` is that of the algorithm."""
    return growth * _sums(dtype) + _rounding(dtype)


def element_bound(dtype, growth=1.0):
    """Return the bound on the error of an element, relative to the largest element."""
    return growth * _ELEMENT * _sums(dtype) + _rounding(dtype)


def _sums(dtype):
    if dtype in INTEGERS:
        return 0.0
    return 2 * _SUM * ROUNDOFF["float64"] if dtype == "float64" else _SUM * ROUNDOFF["float32"]


def _rounding(dtype):
    return ROUNDOFF[dtype] if dtype in ("float16", "bfloat16") else 0.0


def assert_close(found, wanted, dtype="float32", growth=1.0, message=""):
    """Assert that every element of `found` is within `element_bound` of `wanted`, and that the shapes are equal."""
    found, wanted = np.asarray(found).astype(np.float64), np.asarray(wanted).astype(np.float64)
    assert found.shape == wanted.shape, message
    bound = element_bound(dtype, growth) * np.abs(wanted).max(initial=0) + _LEAST.get(dtype, 0.0)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=bound, err_msg=message)


def assert_norm_close(found, wanted, dtype="float32", growth=1.0, message=""):
    """Assert that `found` is within `norm_bound` of `wanted`, and that the shapes are equal.

    Where all is nearly zero, that is 1e-3 as a norm.
    """
    found, wanted = np.asarray(found).astype(np.float64), np.asarray(wanted).astype(np.float64)
    assert found.shape == wanted.shape, message
    assert np.linalg.norm(found - wanted) <= norm_bound(dtype, growth) * max(np.linalg.norm(wanted), 1e-3), message
