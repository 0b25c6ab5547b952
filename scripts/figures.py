#!/usr/bin/env python3
"""Show the figures in docs/figures, which `tvm-deconv bench --figures` fills: in tables of documents, in a page.

Those of CUDA devices are docs/cuda-*.json, which `scripts/gpu-check run --figures docs` writes.

scripts/figures.py             # prints the table of all machines
scripts/figures.py --write     # README.md, docs/performance.md, docs/figures.md and docs/cuda.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tvm_deconv.bench import figures, gpu_figures
from tvm_deconv.bench.page import as_html
from tvm_deconv.bench.results import Report

ROOT = Path(__file__).parents[1]
#: The file of figures that the README shows some layers of.
SHOWN = "zen5-x86-64-v4-ncx-1"
#: What the names begin with of the files whose layers are compared with the floors of words.
WORDS = "types/zen4-x86-64-v4-bf16-"
#: These layers, one or two of each kind.
LAYERS = (
    "pytorch-unet/up1.up",
    "hifi-gan_v1/ups.0",
    "cyclegan_resnet/up1",
    "centernet_dla-34/dla_up.ida_2.up",
    "bigvgan_anti-alias/activation1d.upsample_@768ch",
    "psmnet/dres2.conv5",
    "fcn-8s/upscore8",
    "simplebaseline_r50/deconv.6",
    "fsrcnn_x3/last_part",
)


def documents() -> dict[Path, str]:
    """Return the documents that show figures, as they should be."""
    reports = figures.read(ROOT / "docs" / "figures")
    machines, main = figures.machines(reports), figures.machines(figures.of_main_list(reports))
    devices = gpu_figures.read(ROOT / "docs")
    means = gpu_figures.means(devices)
    blocks = {
        "README.md": {"layers": shown(reports[SHOWN]), "machines": main, "devices": means},
        "docs/cuda.md": {"devices": means, "layers": gpu_figures.layers(devices[0])},
        "docs/performance.md": {
            "machines": machines,
            "types": figures.low_precision(reports.values()),
            "floors": figures.word_floors(report for name, report in reports.items() if name.startswith(WORDS)),
        },
        "docs/figures.md": {"machines": figures.page(reports)},
    }
    made = {}
    for name, contents in blocks.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for block, content in contents.items():
            text = figures.replaced(text, block, content)
        made[ROOT / name] = text
    return made


def shown(report: Report) -> str:
    """Return what the README says of the layers of a report with peers."""
    ratios = report.chosen
    assert ratios is not None
    means = f"Geometric mean {ratios.mean:.2f} over {len(report.rows)} real layers, the worst {ratios.least:.2f}."
    return f"{means} Some of them:\n\n{figures.some_layers(report, LAYERS)}"


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
