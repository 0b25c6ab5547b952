"""A chart of the ratios of models, as a file of SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from models.frameworks import FRAMEWORKS
from models.run import Timed

_COLOURS = dict(zip(FRAMEWORKS, ("#d9730d", "#98a2b3", "#2a6fdb", "#2e8b57"), strict=True))
_TICKS = (0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0)


def plot(rows: Sequence[Timed], path: Path) -> None:
    """Write a point for each row: models from above, ratios to the right, full points for one thread."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "models"  # equal rows make equal files
    from matplotlib import pyplot

    models = list(dict.fromkeys(row.model for row in rows))
    figure, axes = pyplot.subplots(figsize=(8, 0.9 + 0.3 * len(models)), layout="constrained")
    axes.axvline(1.0, color="gray", linewidth=1)
    for framework, colour in _COLOURS.items():
        for threads in sorted({row.threads for row in rows}):
            found = [row for row in rows if (row.framework, row.threads) == (framework, threads)]
            if found:
                face = colour if threads == 1 else "none"
                name = f"{framework}, {threads} thread{'s' if threads > 1 else ''}"
                places = [models.index(row.model) for row in found]
                ratios = [row.ratio for row in found]
                axes.scatter(ratios, places, s=30, facecolors=face, edgecolors=colour, label=name, zorder=2)
    axes.set_xscale("log")
    axes.set_xticks(_TICKS, [str(tick) for tick in _TICKS])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(models)), models)
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    axes.set_xlabel("times as fast as the model without artifacts")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
