"""JAX: bound layers as functions of its programs; docs/frameworks.md."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tvm_deconv.compiler.shared import shared_library
from tvm_deconv.errors import ProblemError, TensorError
from tvm_deconv.problem import Problem
from tvm_deconv.runtime.arrays import check_type
from tvm_deconv.runtime.bridge import Bridge
from tvm_deconv.runtime.layer import Layer, native

__all__ = ["function"]

_TARGET = "tvm_deconv"
_SOURCE = Path(__file__).with_name("call.c")


def _prepare(library: ctypes.CDLL) -> None:
    library.tvm_deconv_add_function.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(library.tvm_deconv_handle), platform="cpu")


_handler = Bridge(_prepare)


def function(layer: Layer) -> Callable[[Any], Any]:
    """Return `layer` as a function of JAX, from data to output, for use inside and outside of ``jax.jit``.

    Programs call the artifact without Python and without a copy. Under ``jax.vmap`` it is called once for each element.
    It has no gradient. A C++ compiler makes the handler when a process asks for its first function.

    Raises ProblemError unless `layer` is one of an artifact for CPUs, CompilerNotFound, BuildError. The function raises
    TensorError and TensorTypeError for data that do not fit.
    """
    manifest = layer.manifest if isinstance(layer, Layer) else None
    if manifest is None or manifest.known_target is None or manifest.known_target.memory != "cpu":
        raise ProblemError("layer", layer, "must be a Layer of an artifact for CPUs")
    deconv, given = native(layer)
    if _handler.get(_compiled).tvm_deconv_add_function(manifest.sha256.encode(), deconv.__chandle__()):
        raise MemoryError("no memory for a function")
    constants = [_constant(np.from_dlpack(constant)) for constant in given]
    problem = layer.problem

    def compute(data: Any) -> Any:
        data = jnp.asarray(data)
        result = jax.ShapeDtypeStruct(_output_shape(problem, data), problem.output_dtype)
        called = jax.ffi.ffi_call(_TARGET, result, vmap_method="sequential")
        return called(data, *constants, artifact=manifest.sha256)

    return compute


def _constant(array: Any) -> Any:
    """Return a packed filter or a bias as an array of JAX."""
    made = jnp.asarray(array)
    if made.dtype != array.dtype:
        raise ProblemError("dtype", array.dtype, "needs jax.config.update('jax_enable_x64', True)")
    return made


def _output_shape(problem: Problem, data: Any) -> tuple[int, ...]:
    check_type("data", str(data.dtype), [problem.dtype])
    try:
        return problem.at(data.shape).output_shape
    except ProblemError as error:
        raise TensorError("data", data.shape, f"{error.attribute} {error.rule}") from None


def _compiled() -> bytes:
    return shared_library([_SOURCE], [jax.ffi.include_dir()], "the handler of JAX")
