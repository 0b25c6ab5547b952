"""What is known of an artifact without loading it, and which artifact serves a problem.

An artifact is a shared library with ``<stem>.json`` beside it, the `Manifest`. The library's name holds the beginning
of its digest, so that a new build never touches the file of the one before it; the manifest is written last and decides
which library is meant. `select` is pure: manifests and CPU flags in, decisions with reasons out.

========================  ==================================================================================
field                     rule
========================  ==================================================================================
``format``                1; a higher number was written by a newer version
``problem``               the ``artifact_key`` of a `Problem`; dynamic extents are ``any`` in it, or ``any(buckets)``
``layers``                names of the layers it serves; informative
``target``                name of the target it was compiled for: a level, a microarchitecture, CUDA devices
``features``              CPU flags it needs, as in ``/proc/cpuinfo``; added to those of a target that is a level
``library``               ``<stem>.<first 16 digits of sha256>.so``, in the same directory
``sha256``, ``size``      of the library: 64 hexadecimal digits; bytes, at most 1 GiB
``algorithm``             name of the compute definition; joined by ``+`` where buckets have different ones
``origin``                ``default`` or ``tuned``
``knobs``                 the schedule's parameters; of several buckets, each behind the bucket and a dot
``packed_shape``/``_dtype``  the filter as "pack" leaves it
``scratch_bytes``         workspace of one thread; of a call, on a CUDA device
``shared_bytes``          workspace of a call besides, for all of its threads
``macs``                  useful multiply-adds of one call
``versions``              of what built it
``recipe``                sha256 of everything that decides the bytes of the library
========================  ==================================================================================
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from tvm_deconv.artifact import files
from tvm_deconv.errors import ManifestError, ProblemError
from tvm_deconv.problem import Problem
from tvm_deconv.targets import Target, of_artifact

FORMAT = 1
MAX_MANIFEST_BYTES = 1 << 20
MAX_LIBRARY_BYTES = 1 << 30
MAX_KEY_LENGTH = 1000
UNWRITTEN = "(not written)"
ORIGINS = ("default", "tuned")

# The storage types that cross the ABI; bfloat16 travels as its bits.
PACKED_DTYPES = ("float64", "float32", "float16", "uint16", "int32", "int16", "int8", "uint8")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"([0-9a-f]{16}-[A-Za-z0-9][A-Za-z0-9._+-]*?)(?:\.json|\.[0-9a-f]{16}\.so)")
_SURROGATE = re.compile("[\ud800-\udfff]")  # alone, as JSON allows it; such a string cannot be written
_INT64 = 1 << 63
_LINE = 64  # alignment in a workspace
_MOST_KEPT = 4096  # problems that are kept parsed


def stem(artifact_key: str, target: str) -> str:
    """Return the file name without suffix of the artifact for a problem's `artifact_key` and a target's name."""
    return f"{hashlib.sha256(artifact_key.encode()).hexdigest()[:16]}-{target}"


def library_name(stem: str, sha256: str) -> str:
    """Return the file name of the library with this digest."""
    return f"{stem}.{sha256[:16]}.so"


def stem_of(name: str) -> str | None:
    """Return the stem of a manifest's or a library's file name; None for other files, which are not ours."""
    found = _FILE.fullmatch(name)
    return found[1] if found else None


# No cached_property: before Python 3.12 that has a lock, which a forked child may find taken for ever.
@lru_cache(_MOST_KEPT)
def _parsed(key: str) -> Problem:
    return Problem.from_key(key)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The facts of one artifact; construction checks every field and raises ManifestError."""

    format: int = FORMAT
    problem: str
    layers: tuple[str, ...] = ()
    target: str
    features: tuple[str, ...]
    library: str
    sha256: str
    size: int
    algorithm: str
    origin: str = "default"
    knobs: Mapping[str, int]
    packed_shape: tuple[int, ...]
    packed_dtype: str
    scratch_bytes: int
    shared_bytes: int = 0
    macs: int
    versions: Mapping[str, str]
    recipe: str

    def __post_init__(self) -> None:
        _check(self.__dict__)
        for name in ("layers", "features", "packed_shape"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def name(self) -> str:
        """The stem of the artifact's file names."""
        return self.library.removesuffix(".so").rpartition(".")[0]

    @property
    def lane_bytes(self) -> int:
        """The part of a workspace that one thread uses: whole lines, at least one."""
        return max(-(-self.scratch_bytes // _LINE), 1) * _LINE

    def workspace_bytes(self, threads: int) -> int:
        """Return the size of a workspace for as many threads, of all calls at one time together."""
        return 2 * _LINE + -(-self.shared_bytes // _LINE) * _LINE + threads * self.lane_bytes

    @property
    def parsed(self) -> Problem:
        """The problem it serves, with its filter as [G, Ci, Co, *K]."""
        return _parsed(self.problem)

    @property
    def known_target(self) -> Target | None:
        """The target it names, with every CPU flag that it needs; None if this version does not know it."""
        return of_artifact(self.target, self.features)

    @property
    def required(self) -> frozenset[str]:
        """Every CPU flag it needs: its own and its level's, since one too few ends in an illegal instruction."""
        return self.known_target.features if self.known_target else frozenset(self.features)

    def to_json(self) -> str:
        """Return the text of the manifest file; `from_json` of it is equal to this."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, path: Path | str = UNWRITTEN) -> Manifest:
        """Parse the text of a manifest file, strictly; ManifestError names the field, its value and the rule."""
        try:
            found = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise ManifestError(path, f"must be JSON: {error}") from None
        if not isinstance(found, dict):
            raise ManifestError(path, "must be a JSON object")
        _check_format(found.get("format"), path)
        known = [field.name for field in fields(cls)]
        for name in found:
            if name not in known:
                raise ManifestError(path, f"is not a field of manifest format {FORMAT}", name, found[name])
        for name in known:
            if name not in found:
                raise ManifestError(path, "is missing", name)
        try:
            return cls(**found)
        except ManifestError as error:
            raise ManifestError(path, error.rule, error.attribute, error.value) from None

    @classmethod
    def read(cls, path: Path | str) -> Manifest:
        """Read and parse a manifest file; ManifestError."""
        return cls.from_json(read_bytes(Path(path)), path)


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a manifest file. Raises ManifestError if it is too large, unreadable or outside."""
    data, size = files.read(path, MAX_MANIFEST_BYTES, ManifestError, ManifestError)
    if size > MAX_MANIFEST_BYTES:
        raise ManifestError(path, f"must be at most {MAX_MANIFEST_BYTES} bytes")
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field appears twice")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _check_format(value: object, path: Path | str = UNWRITTEN) -> None:
    # First of all: nothing else of a newer manifest can be judged by this version's rules.
    if type(value) is not int or value < 1:
        raise ManifestError(path, "must be an integer, at least 1", "format", value)
    if value > FORMAT:
        rule = f"must be at most {FORMAT}: a newer version wrote it, upgrade this one"
        raise ManifestError(path, rule, "format", value)


def _check(found: Mapping[str, Any]) -> None:
    def require(name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ManifestError(UNWRITTEN, rule, name, found[name])

    def is_int(value: object, low: int, high: int = _INT64 - 1) -> bool:
        return type(value) is int and low <= value <= high

    def is_text(value: object, pattern: re.Pattern[str]) -> bool:
        return isinstance(value, str) and pattern.fullmatch(value) is not None

    def is_list(value: object) -> bool:
        return isinstance(value, (list, tuple))

    def is_string(value: object) -> bool:
        return isinstance(value, str) and not _SURROGATE.search(value)

    _check_format(found["format"])
    key = found["problem"]
    require("problem", isinstance(key, str), "must be a string")
    require("problem", len(key) <= MAX_KEY_LENGTH, f"must be at most {MAX_KEY_LENGTH} characters")
    try:
        canonical = _parsed(key).artifact_key
    except ProblemError as error:
        raise ManifestError(UNWRITTEN, f"must be the key of a problem: {error}", "problem", key) from None
    require("problem", key == canonical, f"must be an artifact key, here {canonical}")
    layers = found["layers"]
    require("layers", is_list(layers) and all(map(is_string, layers)), "must be a list of strings")
    require("target", is_text(found["target"], _NAME), "must be the plain name of a target")
    features = found["features"]
    require(
        "features",
        is_list(features) and all(is_text(name, _NAME) for name in features) and len(set(features)) == len(features),
        "must be a list of different CPU flags",
    )
    library = found["library"]
    plain = isinstance(library, str) and library not in ("", ".", "..") and not re.search(r"[/\\\0]", library)
    require("library", plain, "must be a plain file name in the manifest's directory")
    require("sha256", is_text(found["sha256"], _DIGEST), "must be 64 lower-case hexadecimal digits")
    expected = library_name(stem(key, found["target"]), found["sha256"])
    require("library", library == expected, f"must be {expected}, which problem, target and sha256 decide")
    require(
        "size", is_int(found["size"], 1, MAX_LIBRARY_BYTES), f"must be an integer from 1 to {MAX_LIBRARY_BYTES} (bytes)"
    )
    require("algorithm", is_text(found["algorithm"], _NAME), "must be a plain name")
    require("origin", found["origin"] in ORIGINS, f"must be one of {', '.join(ORIGINS)}")
    knobs = found["knobs"]
    require(
        "knobs",
        isinstance(knobs, Mapping) and all(is_string(name) and is_int(value, -_INT64) for name, value in knobs.items()),
        "must map names to integers",
    )
    shape = found["packed_shape"]
    require("packed_shape", is_list(shape) and all(is_int(extent, 0) for extent in shape), "must be a list of extents")
    require("packed_shape", math.prod(shape) < _INT64 // 8, "must hold fewer than 2**60 elements")
    require("packed_dtype", found["packed_dtype"] in PACKED_DTYPES, f"must be one of {', '.join(PACKED_DTYPES)}")
    for name in ("scratch_bytes", "shared_bytes"):
        require(name, is_int(found[name], 0), "must be an integer, at least 0 (bytes)")
    require("macs", is_int(found["macs"], 0), "must be an integer, at least 0")
    versions = found["versions"]
    require(
        "versions",
        isinstance(versions, Mapping) and all(is_string(name) and is_string(value) for name, value in versions.items()),
        "must map names to strings",
    )
    require("recipe", is_text(found["recipe"], _DIGEST), "must be 64 lower-case hexadecimal digits")
