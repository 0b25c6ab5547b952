"""Every error raised on purpose.

    DeconvError
    ├── ProblemError      (ValueError)    a problem that no operator defines: attribute, shape, key
    ├── TensorError       (ValueError)    an array that does not fit the problem, at bind or call
    │   └── TensorTypeError (TypeError)   ... because of its dtype or kind
    ├── SourceError       (ValueError)    a model or problem file that cannot be read
    ├── BuildError        (RuntimeError)  a compilation that failed
    │   └── CompilerNotFound              ... because the machine has no C++ compiler, or no nvcc
    ├── RemoteError       (RuntimeError)  no server to measure on
    ├── ArtifactError     (RuntimeError)  a file of an artifact that cannot be used
    │   ├── ManifestError                 ... because the manifest does not read
    │   └── IntegrityError                ... because the bytes are not those that were written
    ├── DeviceError       (RuntimeError)  a device that is missing, or that failed
    └── NoArtifactError   (LookupError)   no artifact serves the problem

The text is always ``<attribute>=<value>: <rule>``, and printable for any content of a file. All errors survive
pickling, since builds run in other processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

_LONGEST_VALUE = 120
_MOST_CANDIDATES = 20


def printable(text: str) -> str:
    """Return `text` with its control characters and lone surrogates escaped, fit for a log or a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    """Return lines of text, each of them `printable`."""
    return "\n".join(map(printable, text.split("\n")))


def _shown(value: object) -> str:
    """Return `value` in a line: a path whole, for it names a file, and anything else cut."""
    return printable(str(value)) if isinstance(value, Path) else _short(repr(value))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


class DeconvError(Exception):
    """The name of the thing that is wrong (`attribute`), its `value`, and the `rule` that it breaks."""

    def __init__(self, attribute: str, value: object, rule: str) -> None:
        super().__init__(attribute, value, rule)
        self.attribute = attribute
        self.value = value
        self.rule = rule

    def __str__(self) -> str:
        return f"{_short(printable(str(self.attribute)))}={_shown(self.value)}: {printable_lines(str(self.rule))}"


class ProblemError(DeconvError, ValueError):
    """An attribute, a shape or a key that describes no transposed convolution."""


class TensorError(DeconvError, ValueError):
    """An array that does not fit its problem; `argument` is the name of the parameter."""

    @property
    def argument(self) -> str:
        """The parameter that was refused."""
        return self.attribute


class TensorTypeError(TensorError, TypeError):
    """An array of a wrong dtype, or something that is no array."""


class SourceError(DeconvError, ValueError):
    """A model file or a list of problems that cannot be read."""


class BuildError(DeconvError, RuntimeError):
    """Problems that could not be compiled; `outcomes` has one outcome for each problem, if there are several."""

    outcomes: Sequence[object] = ()


class CompilerNotFound(BuildError):
    """No C++ compiler to link a shared library with, or no nvcc to compile CUDA with."""


class RemoteError(DeconvError, RuntimeError):
    """No server to measure on: no tracker, none with the key, or none that answers."""


class ArtifactError(DeconvError, RuntimeError):
    """A file of an artifact that cannot be used; `path` is that file.

    `attribute` and `value` are the fact inside the file, if there is one.
    """

    def __init__(self, path: Path | str, rule: str, attribute: str = "path", value: object = None) -> None:
        self.path = Path(path)
        super().__init__(attribute, self.path if attribute == "path" else value, rule)
        self.args = (path, rule, attribute, value)

    def __str__(self) -> str:
        text = super().__str__()
        return text if self.attribute == "path" else f"{text} (in {printable(str(self.path))})"


class ManifestError(ArtifactError):
    """A manifest that does not read: unknown fields, a newer format, a path that leaves its folder."""


class IntegrityError(ArtifactError):
    """A shared library whose bytes are not those its manifest was written for."""


class DeviceError(DeconvError, RuntimeError):
    """A device that this machine does not have or cannot use, or a call that failed on it."""


class NoArtifactError(DeconvError, LookupError):
    """No artifact serves the problem `value`; `decisions` has the reasons, the nearest candidate first.

    The text shows the first 20 of them.
    """

    def __init__(self, problem: str, decisions: Iterable[object] = ()) -> None:
        self.decisions = list(decisions)
        rule = "no artifact serves this problem" if self.decisions else "no artifact serves it: there are no candidates"
        super().__init__("problem", problem, rule)
        self.args = (problem, self.decisions)

    def __str__(self) -> str:
        lines = [f"problem={self.value}: {self.rule}", *map(str, self.decisions[:_MOST_CANDIDATES])]
        more = len(self.decisions) - _MOST_CANDIDATES
        return "\n  ".join([*lines, f"and {more} more"] if more > 0 else lines)
