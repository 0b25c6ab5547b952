"""Models and lists -> problems: what a compile starts from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tvm_deconv.artifact import files
from tvm_deconv.errors import SourceError
from tvm_deconv.frontends.graph import FoundLayer, missing_package, with_unique_names

__all__ = ["Coverage", "FoundLayer", "coverage_table", "scan", "with_unique_names", "write_weights"]


def scan(source: object, inputs: Sequence[object] = ()) -> list[FoundLayer]:
    """Every transposed convolution of `source`, covered or not, under names that are unique.

    `source` is the path of an OpenVINO IR (.xml, with its .bin beside it), an ONNX model (.onnx) or a list of problems
    (.json), or an nn.Module that is run once on `inputs`. Raises SourceError where it cannot be read.
    """
    # A reader is imported when it is needed, since each wants a package of its own.
    if not isinstance(source, (str, os.PathLike)):
        from tvm_deconv.frontends.torch import scan_module

        return with_unique_names(scan_module(source, inputs))
    path = Path(source)
    suffix = path.suffix.lower()
    if suffix == ".xml":
        from tvm_deconv.frontends.openvino_ir import scan_ir as read
    elif suffix == ".onnx":
        from tvm_deconv.frontends.onnx import scan_onnx as read
    elif suffix == ".json":
        from tvm_deconv.frontends.problem_list import scan_list as read
    else:
        raise SourceError("source", path, "must end in .xml (OpenVINO IR), .onnx or .json (a list of problems)")
    return with_unique_names(read(path))


def write_weights(layers: Iterable[FoundLayer], path: Path) -> list[str]:
    """Write the constants to a safetensors file, as ``<name>.filter`` and ``<name>.bias``; returns these names.

    Each array is as its FoundLayer holds it; the metadata gives the key of the problem of each layer. Without any
    constant no file is written. An old file stays until the new one is whole. Raises SourceError where the package
    safetensors is missing.
    """
    layers = list(layers)
    arrays = {
        f"{layer.name}.{kind}": np.ascontiguousarray(array)
        for layer in layers
        for kind, array in (("filter", layer.filter), ("bias", layer.bias))
        if array is not None
    }
    if not arrays:
        return []
    try:
        from safetensors.numpy import save
    except ImportError:
        raise missing_package("weights", "safetensors", "'tvm_deconv[compile]'") from None
    content = save(arrays, {layer.name: layer.problem.key for layer in layers if layer.problem is not None})
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, content)
    return list(arrays)


class Coverage(NamedTuple):
    """A row of the table that tells what is covered: `problem` is a key, or empty where `reason` says why."""

    name: str
    operator: str
    problem: str
    reason: str
    epilogue: str
    macs: int


def coverage_table(layers: Iterable[FoundLayer]) -> list[Coverage]:
    """One row per layer, in their order; macs are 0 where a layer is not covered."""
    rows = []
    for layer in layers:
        problem = layer.problem
        facts = ("", layer.reason, "", 0) if problem is None else (problem.key, "", str(problem.epilogue), problem.macs)
        rows.append(Coverage(layer.name, layer.operator, *facts))
    return rows
