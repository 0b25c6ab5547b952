"""Models and lists of problems, read into layers: a compilation starts from them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tvm_deconv.artifact.files import write
from tvm_deconv.errors import SourceError
from tvm_deconv.frontends.extents import check_names, checked_ranges
from tvm_deconv.frontends.layers import FoundLayer, with_unique_names
from tvm_deconv.frontends.packages import missing_package
from tvm_deconv.problem.quantization import SCALING

__all__ = ["Coverage", "FoundLayer", "coverage_table", "scan", "weights_of", "with_unique_names", "write_weights"]


class _Reader(NamedTuple):
    """The reader of files with one suffix; its module is imported when it is needed, since it wants packages."""

    module: str
    function: str
    format: str
    has_free_extents: bool = False  # and takes their ranges


#: Most bytes of a file of weights, in which layers do not share their constants.
_MOST_WEIGHTS = 1 << 32
#: suffix of a file -> its reader
_READERS = {
    ".xml": _Reader("openvino_ir", "scan_ir", "OpenVINO IR", True),
    ".onnx": _Reader("onnx", "scan_onnx", "", True),
    ".json": _Reader("problem_list", "scan_list", "a list of problems"),
}


def scan(
    source: object,
    inputs: Sequence[object] | Mapping[str, object] = (),
    *,
    extents: Mapping[str, tuple[int, int]] | None = None,
) -> list[FoundLayer]:
    """Return every transposed convolution of `source`, covered or not, under names that are unique.

    `source` is a path: of an OpenVINO IR (.xml, with its .bin beside it), an ONNX model (.onnx) or a list of problems
    (.json). Or it is an nn.Module, which is run once on `inputs`: its arguments, or a mapping of its keyword arguments.
    A model may leave extents free. `extents` are ranges of these, by their names or as ``input.axis``, and the layers
    get buckets from them. Raises SourceError if the source cannot be read.
    """
    ranges = checked_ranges(extents or {})
    if not isinstance(source, (str, os.PathLike)):
        from tvm_deconv.frontends.torch import scan_module

        check_names(ranges, (), "a module")
        return with_unique_names(scan_module(source, inputs))
    path = Path(source)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        *others, last = (suffix + (f" ({r.format})" if r.format else "") for suffix, r in _READERS.items())
        raise SourceError("source", path, f"must end in {', '.join(others)} or {last}")
    read = getattr(importlib.import_module(f"{__name__}.{reader.module}"), reader.function)
    if reader.has_free_extents:
        return with_unique_names(read(path, ranges))
    check_names(ranges, (), path)
    return with_unique_names(read(path))


def write_weights(layers: Iterable[FoundLayer], path: Path) -> list[str]:
    """Write the constants to a safetensors file, as ``<name>.filter`` and ``<name>.bias``; return these names.

    Each array is as its FoundLayer holds it; the metadata gives the key of the problem of each layer, and as
    ``<name>.scaling`` the numbers of a quantized one. Without any constant no file is written. An old file stays until
    the new one is whole. Raises as `weights_of` does.
    """
    layers = list(layers)
    arrays = weights_of(layers)
    if not arrays:
        return []
    from safetensors.numpy import save

    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    facts = {layer.name: layer.problem.key for layer in layers if layer.problem is not None}
    facts |= {f"{layer.name}{SCALING}": layer.scaling.text for layer in layers if layer.scaling is not None}
    content = save(arrays, facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, content)
    return list(arrays)


def weights_of(layers: Iterable[FoundLayer]) -> dict[str, Any]:
    """Return the constants of `layers` by the names that `write_weights` gives them.

    Raises SourceError if there are any and the package safetensors is missing, or for more than 4 GiB.
    """
    arrays = {
        f"{layer.name}.{kind}": array
        for layer in layers
        for kind, array in (("filter", layer.filter), ("bias", layer.bias))
        if array is not None
    }
    size = sum(array.nbytes for array in arrays.values())
    if size > _MOST_WEIGHTS:
        raise SourceError("weights", size, f"must have at most {_MOST_WEIGHTS} bytes, of all layers together")
    try:
        if arrays:
            import safetensors.numpy  # noqa: F401
    except ImportError:
        raise missing_package("weights", "safetensors", "compile") from None
    return arrays


class Coverage(NamedTuple):
    """A row of the table of covered layers: `problem` is a key, or empty if `reason` tells why there is none.

    `notes` tell what a covered layer leaves to calls or to the model: free extents, a filter that is no constant.
    """

    name: str
    operator: str
    problem: str
    reason: str
    epilogue: str
    macs: int
    notes: str = ""


def coverage_table(layers: Iterable[FoundLayer]) -> list[Coverage]:
    """Return one row per layer, in their order; macs are 0 if a layer is not covered."""
    rows = []
    for layer in layers:
        problem = layer.problem
        if problem is None:
            rows.append(Coverage(layer.name, layer.operator, "", layer.reason, "", 0))
        else:
            facts = (problem.key, "", str(problem.epilogue), problem.macs, layer.notes)
            rows.append(Coverage(layer.name, layer.operator, *facts))
    return rows
