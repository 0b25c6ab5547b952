#!/usr/bin/env python3
"""Show the figures in docs/figures, which `tvm-deconv bench --figures` fills: in tables of documents, in a page.

scripts/figures.py             # prints the table of all machines
scripts/figures.py --write     # README.md, docs/performance.md and docs/figures.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tvm_deconv.bench import figures
from tvm_deconv.bench.page import as_html

ROOT = Path(__file__).parents[1]


def documents() -> dict[Path, str]:
    """Return the documents that show figures, as they should be."""
    reports = figures.read(ROOT / "docs" / "figures")
    machines = figures.machines(reports) if reports else figures.page(reports)
    blocks = {
        "README.md": {"machines": machines},
        "docs/performance.md": {"machines": machines, "types": figures.low_precision(reports.values())},
        "docs/figures.md": {"machines": figures.page(reports)},
    }
    made = {}
    for name, contents in blocks.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for block, content in contents.items():
            text = figures.replaced(text, block, content)
        made[ROOT / name] = text
    return made


def main() -> None:
    """Print the table, or write documents or a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the documents instead")
    parser.add_argument("--html", type=Path, help="write one page with the charts of all instead")
    arguments = parser.parse_args()
    reports = figures.read(ROOT / "docs" / "figures")
    if arguments.write:
        for path, content in documents().items():
            path.write_text(content, encoding="utf-8")
    elif arguments.html:
        arguments.html.write_text(as_html(*reports.values()), encoding="utf-8")
    else:
        print(figures.machines(reports))


if __name__ == "__main__":
    main()
