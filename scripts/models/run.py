"""Time a model in one framework as it is and with artifacts, in turns, and compare the outputs."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import tvm_deconv as td
from models.catalogue import Model
from models.frameworks import PAIRS, PAUSE, Pair
from tvm_deconv.bench.figures import replaced

#: Largest allowed deviation of an output, as a part of its largest element.
TOLERANCE = 2e-3
_LEAST_TURNS = 5
#: Seconds of calls that are not counted: the second call of a small model still takes a tenth longer than the fifth.
_WARMING = 0.01


@dataclass(frozen=True)
class Timed:
    """A model in a framework, on a number of threads: median seconds of a call as it is, and with artifacts.

    `ratio` is how many times as fast the model is with artifacts, the median of the turns. `swapped` of `layers`
    transposed convolutions ran on artifacts; `left` are the others, with the reasons. `deviation` is the largest
    difference between the outputs, as a part of the largest element. `share` is the part of the original's time that
    transposed convolutions take, and `gain` how many times as fast artifacts are in them; None where the framework does
    not tell.
    """

    model: str
    framework: str
    threads: int
    original: float
    ours: float
    ratio: float
    swapped: int
    layers: int
    deviation: float
    share: float | None = None
    gain: float | None = None
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def expected(self) -> float | None:
        """The ratio that follows from share and gain."""
        return 1 / (1 - self.share * (1 - 1 / self.gain)) if self.share and self.gain else None

    @property
    def right(self) -> bool:
        """True if both outputs agree."""
        return self.deviation <= TOLERANCE  # not for NaN


def timed(model: Model, framework: str, threads: int, seconds: float, keep: Path | None = None) -> Timed:
    """Make a model, compile its layers for this machine, and time it for `seconds`; raise what the framework raises.

    The folder `keep` holds exported models and artifacts for later calls.
    """
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(threads)
    td.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        folder = (keep or Path(scratch)) / model.name
        folder.mkdir(parents=True, exist_ok=True)
        made, x = model.make(), torch.randn(model.shape)
        pair = PAIRS[framework](made, x, folder, threads)
        expected, found = (np.asarray(call(), np.float64) for call in (pair.original, pair.ours))
        deviation = float(np.abs(found - expected).max() / np.abs(expected).max())
        times = _turns(pair, seconds)
        share, gain = pair.profile()
    of = pair.swapped, pair.swapped + len(pair.left)
    return Timed(model.name, framework, threads, *times, *of, deviation, share, gain, pair.left)


def _turns(pair: Pair, seconds: float) -> tuple[float, float, float]:
    """Return the medians of both calls, which take turns, and of their ratio.

    Each call follows a pause and some that are not counted.
    """
    found: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while len(found[0]) < _LEAST_TURNS or time.perf_counter() < end:
        for times, call in zip(found, (pair.original, pair.ours), strict=True):
            time.sleep(PAUSE)
            warm = time.perf_counter() + _WARMING
            call()
            while time.perf_counter() < warm:
                call()
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    ratios = [original / ours for original, ours in zip(*found, strict=True)]
    return statistics.median(found[0]), statistics.median(found[1]), statistics.median(ratios)


def table(rows: list[Timed]) -> str:
    """Return rows as a Markdown table, and the geometric mean of their ratios."""
    lines = [
        "| model | framework | threads | as it is, ms | with artifacts, ms | ratio | expected | share | layers |",
        "|---|---|" + "---:|" * 7,
    ]
    for row in rows:
        times = f"{1e3 * row.original:.3g} | {1e3 * row.ours:.3g} | {row.ratio:.2f}"
        expected = "" if row.expected is None else f"{row.expected:.2f}"
        share = "" if row.share is None else f"{100 * row.share:.1f} %"
        wrong = "" if row.right else f", WRONG by {row.deviation:.1e}"
        layers = f"{row.swapped} of {row.layers}{wrong}"
        lines.append(f"| {row.model} | {row.framework} | {row.threads} | {times} | {expected} | {share} | {layers} |")
    if rows:
        mean = math.exp(statistics.fmean(math.log(row.ratio) for row in rows))
        lines.append(f"\nGeometric mean {mean:.2f}, least {min(row.ratio for row in rows):.2f}, of {len(rows)}.")
    return "\n".join(lines)


def document(text: str, rows: Sequence[Timed]) -> str:
    """Return a document with tables of the rows between its marks: one for each framework."""
    parts = []
    for framework in dict.fromkeys(row.framework for row in rows):
        threads = sorted({row.threads for row in rows if row.framework == framework})
        lines = [
            f"{framework}:\n",
            "| model | " + " | ".join(f"{count} thread{'s' if count > 1 else ''}" for count in threads) + " |",
            "|---|" + "---|" * len(threads),
        ]
        for model in dict.fromkeys(row.model for row in rows if row.framework == framework):
            found = {row.threads: row for row in rows if (row.model, row.framework) == (model, framework)}
            lines.append(f"| {model} | " + " | ".join(_cell(found.get(count)) for count in threads) + " |")
        parts.append("\n".join(lines))
    return replaced(text, "models", "\n\n".join(parts))


def _cell(row: Timed | None) -> str:
    """Return times, ratio, layers, and what the layers predict."""
    if row is None:
        return ""
    share = "" if row.share is None else f", {100 * row.share:.0f} %"
    expected = "" if row.expected is None or not row.swapped else f", expected {row.expected:.2f}"
    times = f"{1e3 * row.original:.3g} / {1e3 * row.ours:.3g} = **{row.ratio:.2f}**"
    return f"{times}; {row.swapped} of {row.layers}{share}{expected}"
