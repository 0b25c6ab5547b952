"""The weights beside artifacts, as a compile of a model writes them: `Weights`, by the names of layers.

The files have the format of safetensors: the length of a header in eight bytes, the header in JSON, the arrays. They
are read here, since what runs artifacts needs NumPy and apache-tvm-ffi only.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tvm_deconv.artifact import files
from tvm_deconv.errors import ArtifactError, DeconvError, IntegrityError, ProblemError
from tvm_deconv.problem import Array, Problem, Scaling, one_of
from tvm_deconv.problem.arrays import numpy_dtype
from tvm_deconv.problem.quantization import SCALING

_MOST_HEADER = 100_000_000  # bytes, as the format has it
_MOST_BYTES = (4 << 30) + _MOST_HEADER  # a compile writes no more than 4 GiB of arrays
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8", "U8": "uint8",
    "I32": "int32",
}  # fmt: skip


class _Place(NamedTuple):
    """Where the arrays of a layer are: its name in a file of weights, its problem, the numbers of a quantized one."""

    path: Path
    name: str
    problem: Problem
    scaling: Scaling | None


class Weights(Mapping[str, Problem]):
    """The problems of the layers whose filters lie in the files of weights in the directory `root`, by name.

    A name that several files have is ``FILE:NAME``, FILE without its suffix. `signed` has the SHA-256 that each file
    must have, None if any will do. Raises ArtifactError for a file that does not read, IntegrityError for another one
    than was signed.
    """

    def __init__(self, root: Path, signed: Mapping[str, str] | None) -> None:
        self._signed = signed
        found = [place for path in files.weights(root) for place in self._places(path)]
        count = Counter(place.name for place in found)
        self._found: dict[str, _Place] = {}
        for place in found:
            name = place.name if count[place.name] == 1 else f"{place.path.stem}:{place.name}"
            if name in self._found:
                raise ArtifactError(place.path, "must be unique among the files of weights", "name", name)
            self._found[name] = place

    def __getitem__(self, name: str) -> Problem:
        return self._found[name].problem

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return f"<Weights of {', '.join(self._found) or 'no layers'}>"

    def arrays(self, name: str) -> tuple[Array, Array | None]:
        """Return the filter and the bias, or None, of a layer. Raises ProblemError for a name that is not here."""
        if not self._found:
            raise ProblemError("name", name, "must be a layer that was compiled with its weights: there is none")
        path, name, *_ = self._found[one_of("name", name, self._found)]
        content = self._content(path, None)
        header = _header(path, content)
        bias = f"{name}.bias"
        filter = _array(path, content, header, f"{name}.filter")
        return filter, _array(path, content, header, bias) if bias in header else None

    def scaling(self, name: str) -> Scaling | None:
        """Return the numbers of a quantized layer, None of another. Raises ProblemError for a name that is not here."""
        return self._found[one_of("name", name, self._found)].scaling

    def _places(self, path: Path) -> Iterator[_Place]:
        """Yield the layers of a file whose filters are there, by name: safetensors keeps no order."""
        start = self._content(path, 8)
        header = _header(path, self._content(path, 8 + _length(start)))
        problems = header.get("__metadata__")
        if not isinstance(problems, dict):
            return
        for name, key in sorted(problems.items()):
            if f"{name}.filter" in header:
                try:
                    problem = Problem.from_key(key)
                    scaling = Scaling.parse(problems[f"{name}{SCALING}"]) if problem.quantization else None
                except DeconvError as error:
                    raise _unreadable(path, str(error)) from None
                except (KeyError, TypeError, ValueError, RecursionError) as error:
                    raise _unreadable(path, f"{name}{SCALING}: {error}") from None
                yield _Place(path, name, problem, scaling)

    def _content(self, path: Path, limit: int | None) -> bytes:
        """Return the first `limit` bytes of a file, and all that there are if it was signed."""
        if limit is None or self._signed is not None:
            limit = _MOST_BYTES
        content, size = files.read(path, limit, ArtifactError, IntegrityError)
        if size > _MOST_BYTES:
            raise ArtifactError(path, f"must have at most {_MOST_BYTES} bytes, not {size}")
        if self._signed is not None:
            found, wanted = hashlib.sha256(content).hexdigest(), self._signed.get(path.name)
            if found != wanted:
                raise IntegrityError(path, f"must be {wanted}, which was signed", "sha256", found)
        return content


def _unreadable(path: Path, rule: str) -> ArtifactError:
    return ArtifactError(path, f"must be weights that a compile wrote: {rule}")


def _length(content: bytes) -> int:
    return min(int.from_bytes(content[:8], "little"), _MOST_HEADER)


def _header(path: Path, content: bytes) -> dict[str, Any]:
    """Return the header at the start of a file's `content`."""
    text = content[8 : 8 + _length(content)]
    if len(text) < _length(content):
        raise _unreadable(path, "the file is shorter than its header")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, str(error)) from None
    if not isinstance(header, dict):
        raise _unreadable(path, "its header is no object")
    return header


def _array(path: Path, content: bytes, header: Mapping[str, Any], name: str) -> Array:
    """Return the array called `name`, a view of `content`."""
    try:
        field = header[name]
        dtype, shape = numpy_dtype(_DTYPES[field["dtype"]]), [int(extent) for extent in field["shape"]]
        start, end = field["data_offsets"]
        if start < 0 or end - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"the bytes from {start} to {end} are not those of {shape} in {dtype.name}")
        first = 8 + _length(content) + start
        return np.frombuffer(content[first : first + end - start], dtype).reshape(shape)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _unreadable(path, f"{name}: {error}") from None
