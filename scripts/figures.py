#!/usr/bin/env python3
"""Write the tables of docs/figures, which `tvm-deconv bench --figures` fills, into the documents that show them.

scripts/figures.py             # prints the table of all machines
scripts/figures.py --write     # README.md, docs/performance.md and docs/figures.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tvm_deconv.bench import figures

ROOT = Path(__file__).parents[1]


def documents() -> dict[Path, str]:
    """Return the documents that show figures, as they should be."""
    reports = figures.read(ROOT / "docs" / "figures")
    machines = figures.machines(reports.values()) if reports else figures.page(reports)
    blocks = {"README.md": machines, "docs/performance.md": machines, "docs/figures.md": figures.page(reports)}
    return {
        ROOT / name: figures.replaced((ROOT / name).read_text(encoding="utf-8"), "machines", content)
        for name, content in blocks.items()
    }


def main() -> None:
    """Print the table, or write the documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the documents instead")
    if parser.parse_args().write:
        for path, content in documents().items():
            path.write_text(content, encoding="utf-8")
    else:
        print(figures.machines(figures.read(ROOT / "docs" / "figures").values()))


if __name__ == "__main__":
    main()
