"""The manifest: the facts of an artifact that are known without loading it.

An artifact is a shared library with ``<stem>.json`` beside it, the `Manifest`. The library's name holds the beginning
of its digest, so that a new build never touches the file of the one before it. The manifest is written last and names
the library that is meant.

========================  ==================================================================================
field                     rule
========================  ==================================================================================
``format``                2; 1 has no ``needs``; a higher number was written by a newer version.
``problem``               the ``artifact_key`` of a `Problem`; dynamic extents are ``any`` in it, or ``any(buckets)``.
``layers``                names of the layers it serves; informative.
``target``                name of the target it was compiled for: a level, a microarchitecture, CUDA devices.
``features``              CPU flags it needs, as in ``/proc/cpuinfo``; added to those of a target that is a level.
``needs``                 versions of the system's libraries that it needs, by family: see `artifact.needs`.
``library``               ``<stem>.<first 16 digits of sha256>.so``, in the same directory.
``sha256``, ``size``      of the library: 64 hexadecimal digits; bytes, at most 1 GiB.
``algorithm``             name of the compute definition; joined by ``+`` if buckets have different ones.
``origin``                ``default`` or ``tuned``.
``knobs``                 the schedule's parameters; of several buckets, each behind the bucket and a dot.
``packed_shape``/``_dtype``  the filter after "pack".
``scratch_bytes``         workspace of one thread; of a call, on a CUDA device; at most 1 TiB.
``shared_bytes``          further workspace of a call, which all of its threads share.
``macs``                  useful multiply-adds of one call.
``versions``              of the packages and compilers that built it.
``recipe``                sha256 of everything that decides the bytes of the library.
========================  ==================================================================================
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tvm_deconv.artifact import files
from tvm_deconv.artifact.needs import FAMILIES, NUMBERS
from tvm_deconv.errors import ManifestError, ProblemError
from tvm_deconv.problem import Problem
from tvm_deconv.targets import Target, of_artifact

FORMAT = 2
_WITHOUT_NEEDS = 1  # an earlier format
MAX_MANIFEST_BYTES = 1 << 20
MAX_LIBRARY_BYTES = 1 << 30
MAX_KEY_LENGTH = 1000
MAX_WORKSPACE_BYTES = 1 << 40
UNWRITTEN = "(not written)"
ORIGINS = ("default", "tuned")

# The storage types that cross the ABI; bfloat16 travels as its bits.
PACKED_DTYPES = ("float64", "float32", "float16", "uint16", "int32", "int16", "int8", "uint8")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
_VERSION = re.compile(NUMBERS)
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
    match = _FILE.fullmatch(name)
    return match[1] if match else None


# No cached_property: before Python 3.12 that has a lock, which a forked child may find taken forever.
@lru_cache(_MOST_KEPT)
def _parsed(key: str) -> Problem:
    return Problem.from_key(key)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The facts of one artifact. Construction checks every field and raises ManifestError."""

    format: int = FORMAT
    problem: str
    layers: tuple[str, ...] = ()
    target: str
    features: tuple[str, ...]
    needs: Mapping[str, str]
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
    def states_needs(self) -> bool:
        """Whether its format says what it needs of the system."""
        return self.format != _WITHOUT_NEEDS

    @property
    def lane_bytes(self) -> int:
        """The part of a workspace that one thread uses: whole lines, at least one."""
        return max(-(-self.scratch_bytes // _LINE), 1) * _LINE

    def workspace_bytes(self, threads: int) -> int:
        """Return the bytes of a workspace for `threads` threads in all concurrent calls together."""
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
    def precision(self) -> str:
        """The precision in which it multiplies: what its problem permits, or more exact."""
        target = self.known_target
        return target.multiplies_in(self.parsed, self.algorithm) if target else self.parsed.precision

    @property
    def required(self) -> frozenset[str]:
        """Every CPU flag it needs: its own and its level's, since one too few ends in an illegal instruction."""
        return self.known_target.features if self.known_target else frozenset(self.features)

    def to_json(self) -> str:
        """Return the text of the manifest file; `from_json` is the inverse."""
        values = asdict(self)
        if not self.states_needs:
            del values["needs"]
        return json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, path: Path | str = UNWRITTEN) -> Manifest:
        """Parse the text of a manifest file. Raises ManifestError with the field, its value and the rule."""
        try:
            values = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise ManifestError(path, f"must be JSON: {error}") from None
        if not isinstance(values, dict):
            raise ManifestError(path, "must be a JSON object")
        _check_format(values.get("format"), path)
        known = [field.name for field in fields(cls)]
        if values["format"] == _WITHOUT_NEEDS:
            known.remove("needs")
        for name in values:
            if name not in known:
                raise ManifestError(path, f"is not a field of manifest format {values['format']}", name, values[name])
        for name in known:
            if name not in values:
                raise ManifestError(path, "is missing", name)
        try:
            values.setdefault("needs", {})
            return cls(**values)
        except ManifestError as error:
            raise ManifestError(path, error.rule, error.attribute, error.value) from None

    @classmethod
    def read(cls, path: Path | str, *, private: bool = False) -> Manifest:
        """Read and parse a manifest file, which must be this user's alone if it is `private`. Raises ManifestError."""
        return cls.from_json(read_bytes(Path(path), private=private), path)


def read_bytes(path: Path, *, private: bool = False) -> bytes:
    """Return the bytes of a manifest file. Raises ManifestError if it is too large, unreadable or outside."""
    data, size = files.read(path, MAX_MANIFEST_BYTES, ManifestError, ManifestError, private=private)
    if size > MAX_MANIFEST_BYTES:
        raise ManifestError(path, f"must be at most {MAX_MANIFEST_BYTES} bytes")
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a field appears twice")
    return values


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _check_format(value: object, path: Path | str = UNWRITTEN) -> None:
    # First of all: nothing else of a newer manifest can be judged by this version's rules.
    if type(value) is not int or value < 1:
        raise ManifestError(path, "must be an integer, at least 1", "format", value)
    if value > FORMAT:
        rule = f"must be at most {FORMAT}: a newer version wrote it, upgrade this one"
        raise ManifestError(path, rule, "format", value)


class _Rule(NamedTuple):
    """A condition that the value of a field must meet, and its text."""

    field: str
    holds: Callable[[Any], bool]
    text: str


def _is_int(value: object, low: int, high: int = _INT64 - 1) -> bool:
    return type(value) is int and low <= value <= high


def _is_workspace(value: object) -> bool:
    return _is_int(value, 0, MAX_WORKSPACE_BYTES)


def _is_text(value: object, pattern: re.Pattern[str]) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_string(value: object) -> bool:
    return isinstance(value, str) and not _SURROGATE.search(value)


def _is_list(value: object, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, (list, tuple)) and all(map(holds, value))


def _is_map(value: object, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, Mapping) and all(_is_string(name) and holds(item) for name, item in value.items())


def _is_feature_list(value: Any) -> bool:
    return _is_list(value, lambda name: _is_text(name, _NAME)) and len(set(value)) == len(value)


def _is_needs(value: Any) -> bool:
    return _is_map(value, lambda version: _is_text(version, _VERSION)) and set(value) <= set(FAMILIES)


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and value not in ("", ".", "..") and not re.search(r"[/\\\0]", value)


#: The rules of the fields that make up the name of the library, and of the others, in the order of the checks.
_NAMING_RULES = (
    _Rule("layers", lambda value: _is_list(value, _is_string), "must be a list of strings"),
    _Rule("target", lambda value: _is_text(value, _NAME), "must be the plain name of a target"),
    _Rule("features", _is_feature_list, "must be a list of different CPU flags"),
    _Rule("needs", _is_needs, f"must map names of {', '.join(FAMILIES)} to versions"),
    _Rule("library", _is_file_name, "must be a plain file name in the manifest's directory"),
    _Rule("sha256", lambda value: _is_text(value, _DIGEST), "must be 64 lower-case hexadecimal digits"),
)
_RULES = (
    _Rule(
        "size",
        lambda value: _is_int(value, 1, MAX_LIBRARY_BYTES),
        f"must be an integer from 1 to {MAX_LIBRARY_BYTES} (bytes)",
    ),
    _Rule("algorithm", lambda value: _is_text(value, _NAME), "must be a plain name"),
    _Rule("origin", lambda value: value in ORIGINS, f"must be one of {', '.join(ORIGINS)}"),
    _Rule(
        "knobs",
        lambda value: _is_map(value, lambda number: _is_int(number, -_INT64)),
        "must map names to integers",
    ),
    _Rule(
        "packed_shape",
        lambda value: _is_list(value, lambda extent: _is_int(extent, 0)),
        "must be a list of extents",
    ),
    _Rule("packed_shape", lambda value: math.prod(value) < _INT64 // 8, "must hold fewer than 2**60 elements"),
    _Rule("packed_dtype", lambda value: value in PACKED_DTYPES, f"must be one of {', '.join(PACKED_DTYPES)}"),
    _Rule("scratch_bytes", _is_workspace, f"must be an integer from 0 to {MAX_WORKSPACE_BYTES} (bytes)"),
    _Rule("shared_bytes", _is_workspace, f"must be an integer from 0 to {MAX_WORKSPACE_BYTES} (bytes)"),
    _Rule("macs", lambda value: _is_int(value, 0), "must be an integer, at least 0"),
    _Rule("versions", lambda value: _is_map(value, _is_string), "must map names to strings"),
    _Rule("recipe", lambda value: _is_text(value, _DIGEST), "must be 64 lower-case hexadecimal digits"),
)


def _check(values: Mapping[str, Any]) -> None:
    """Raise ManifestError for the first field whose value breaks a rule."""
    _check_format(values["format"])
    _check_problem(values["problem"])
    _check_rules(_NAMING_RULES, values)
    expected = library_name(stem(values["problem"], values["target"]), values["sha256"])
    if values["library"] != expected:
        rule = f"must be {expected}, which problem, target and sha256 decide"
        raise ManifestError(UNWRITTEN, rule, "library", values["library"])
    _check_rules(_RULES, values)


def _check_rules(rules: Iterable[_Rule], values: Mapping[str, Any]) -> None:
    for rule in rules:
        value = values[rule.field]
        if not rule.holds(value):
            raise ManifestError(UNWRITTEN, rule.text, rule.field, value)


def _check_problem(key: Any) -> None:
    """Raise ManifestError unless `key` is an artifact key."""
    if not isinstance(key, str):
        raise ManifestError(UNWRITTEN, "must be a string", "problem", key)
    if len(key) > MAX_KEY_LENGTH:
        raise ManifestError(UNWRITTEN, f"must be at most {MAX_KEY_LENGTH} characters", "problem", key)
    try:
        canonical = _parsed(key).artifact_key
    except ProblemError as error:
        raise ManifestError(UNWRITTEN, f"must be the key of a problem: {error}", "problem", key) from None
    if key != canonical:
        raise ManifestError(UNWRITTEN, f"must be an artifact key, here {canonical}", "problem", key)
