"""Figures of CUDA devices that are kept: a file for each, from what ``gpu-check`` measured, and tables of them."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tvm_deconv.bench.figures import line, rounded
from tvm_deconv.bench.gpu import INTEGERS, SETTINGS
from tvm_deconv.problem import Problem

#: The fields of a result, and of its rows, that are kept.
_OF_RESULT = ("device", "capability", "torch", "cudnn", "copy", "when")
_OF_ROW = ("name", "key", "type", "algorithm", "peers", "seconds", "of_floor", "speedup")
_PREFIX = "cuda-"
_LAYOUTS = {"NCX": "N C *X", "NXC": "N *X C"}
_EVERY = (*SETTINGS, *INTEGERS)

Row: TypeAlias = Mapping[str, Any]


def write(result: Row, directory: Path) -> Path:
    """Write the times in a result of ``gpu-check`` to a file in `directory`, named after the device; return it."""
    kept = rounded({key: result[key] for key in _OF_RESULT if key in result})
    head = json.dumps(kept, indent=1).removesuffix("\n}")
    rows = [rounded({key: row[key] for key in _OF_ROW if key in row}) for row in result["rows"] if "of_floor" in row]
    name = re.sub(r"[^a-z0-9]+", "-", result["device"].lower())
    path = directory / f"{_PREFIX}{name}.json"
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    path.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    return path


def read(directory: Path) -> list[Row]:
    """Return the results that `write` left in `directory`, by the names of their files."""
    files = sorted(directory.glob(f"{_PREFIX}*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in files]


def means(results: Iterable[Row]) -> str:
    """Return a table of each device, type and layout: the time of PyTorch's faster format by ours, mean and least."""
    lines = [
        line("device", "type", "layout", "layers", "PyTorch by ours: mean", "worst", "slower"),
        line("---", "---", "---", "---:", "---:", "---:", "---:"),
    ]
    for result in results:
        for setting in _EVERY:
            ratios = [row["speedup"] for row in _of(result, *setting) if "speedup" in row]
            if ratios:
                mean, slower = math.exp(statistics.fmean(map(math.log, ratios))), sum(ratio < 1 for ratio in ratios)
                cells = len(ratios), f"{mean:.2f}", f"{min(ratios):.2f}", slower
                lines.append(line(result["device"], *_words(setting), *cells))
    return "\n".join(lines)


def layers(result: Row) -> str:
    """Return a table of a device: of each layer, in every type and layout, our microseconds and PyTorch's by ours."""
    settings = [setting for setting in _EVERY if any("speedup" in row for row in _of(result, *setting))]
    lines = [
        line("layer", *(" ".join(_words(setting)) for setting in settings)),
        line("---", *["---:"] * len(settings)),
    ]
    cells = [{row["name"]: _cell(row) for row in _of(result, *setting)} for setting in settings]
    names = dict.fromkeys(name for column in cells for name in column)
    lines += [line(name, *(column.get(name, "") for column in cells)) for name in names]
    return "\n".join(lines)


def _words(setting: tuple[str, str]) -> tuple[str, str]:
    """Return a type, and what it races if that is another, and a layout."""
    kind, layout = setting
    return f"{kind}, beside float16" if setting in INTEGERS else kind, f"`{_LAYOUTS[layout]}`"


def _cell(row: Row) -> str:
    ratio = f" ({row['speedup']:.2f})" if "speedup" in row else ""
    return f"{1e6 * row['seconds']['ours']:.3g}{ratio}"


def _of(result: Row, kind: str, layout: str) -> Sequence[Row]:
    """Return the rows of a type and a layout that have times."""
    rows = [row for row in result["rows"] if row["type"] == kind and "of_floor" in row]
    return [row for row in rows if Problem.from_key(row["key"]).data_format == layout]
