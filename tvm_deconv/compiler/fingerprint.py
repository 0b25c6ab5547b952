"""Digests that tell if something built or measured earlier still holds.

`recipe` changes with everything that decides the bytes of an artifact: one with another recipe is built again.
`kernel_digest` changes with the code of the kernels alone, not with its text: tuning records hold as long as it does.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_deconv.artifact.sources import files_of, source_digest
from tvm_deconv.problem import Problem
from tvm_deconv.targets import Target

if TYPE_CHECKING:
    from tvm_deconv.compiler.selection import Choice

_TVM = ("apache-tvm", "apache-tvm-ffi")


def recipe(problem: Problem, target: Target, choice: Choice, flags: Sequence[str]) -> str:
    """Return the sha256 of everything that decides the library and its manifest, except the linker.

    `flags` are the backend's: options and versions of its compilers. Every field of the target counts, since default
    plans are derived from cache and register sizes.
    """
    deciding = (
        problem.artifact_key,
        surroundings(target),
        tuple(flags),
        [tuple(part.schedule or ()) for part in choice.parts or [choice]],
        choice.origin,
        choice.algorithms,
    )
    return hashlib.sha256(repr(deciding).encode()).hexdigest()


def surroundings(target: Target) -> tuple[object, ...]:
    """Return what decides every artifact for `target`: its fields, the versions of TVM, the source text."""
    return _facts(target), [version(package) for package in _TVM], source_digest()


def _facts(target: Target) -> list[tuple[str, object]]:
    """Return the fields of `target`, with sets in an order that is the same in every process."""
    values = {field.name: getattr(target, field.name) for field in fields(target)}
    return [(name, sorted(value) if isinstance(value, frozenset) else value) for name, value in values.items()]


@cache
def kernel_digest(backend: str) -> str:
    """Return the digest of the code that decides kernels, the `sources` of tuning records: 12 hexadecimal digits.

    It is of the definitions, of the schedules of one backend and of what all schedules share. Raises
    ModuleNotFoundError for a name that is no backend's.
    """
    shared = [path for path in files_of(["schedules"]) if path.parent.name == "schedules"]
    return code_digest([*files_of(["compute", f"schedules.{backend}"]), *shared])


def code_digest(files: Iterable[Path]) -> str:
    """Return a digest of the statements of Python files, and of the bytes of all others: 12 hexadecimal digits.

    It is of the sorted top-level statements of all files together, without imports, comments, docstrings and positions.
    So it stays when code moves between files or is documented, and changes with any change of code.
    """
    parts: list[str] = []
    for path in files:
        if path.suffix == ".py":
            parts += statements(path.read_text(encoding="utf-8"))
        else:
            parts.append(hashlib.sha256(path.read_bytes()).hexdigest())
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:12]


def statements(source: str) -> list[str]:
    """Return the top-level statements of a module in a form without imports, docstrings and positions."""
    return [_canonical(node) for node in ast.parse(source).body if not _says_nothing(node)]


def _says_nothing(node: ast.AST) -> bool:
    """Return True for imports and for strings that stand alone, which are docstrings."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _canonical(node: Any) -> str:
    """Return the text of a syntax tree; unlike that of `ast.dump` it is the same in all versions of Python.

    Fields without a value are left out: newer versions have more of them.
    """
    if isinstance(node, list):
        return f"[{','.join(_canonical(item) for item in node if not _says_nothing(item))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    present = ((name, getattr(node, name, None)) for name in node._fields)
    inner = ",".join(f"{name}={_canonical(value)}" for name, value in present if value is not None and value != [])
    return f"{type(node).__name__}({inner})"
