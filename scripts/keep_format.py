#!/usr/bin/env python3
"""Keep an artifact of the present format in tests/artifact/formats, which later versions must read: `keep_format.py`.

Part of each release whose format is new (docs/releasing.md). A kept one is never written again: it is what users have.
"""

import sys
import tarfile
import tempfile
from pathlib import Path

import tvm_deconv as td
from tvm_deconv.artifact.manifest import FORMAT

KEPT = Path(__file__).parents[1] / "tests" / "artifact" / "formats"
PROBLEM = td.Problem.from_openvino(
    (1, 2, 5, 6),
    (2, 3, 3, 3),
    strides=(2, 2),
    pads_begin=(1, 1),
    pads_end=(1, 1),
    epilogue=td.Epilogue(bias=True, activation="relu"),
)


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return an entry without the names of who made it."""
    return member.replace(uid=0, gid=0, uname="", gname="", mtime=0, deep=False)


if __name__ == "__main__":
    path = KEPT / f"{FORMAT}.tar.xz"
    KEPT.mkdir(exist_ok=True)
    if path.exists():
        sys.exit(f"error: {path} is there; an artifact of another content needs another format number")
    with tempfile.TemporaryDirectory() as folder:
        td.compile([PROBLEM], target="x86-64-v3", output=folder)
        files = sorted(each for each in Path(folder).iterdir() if each.suffix in (".json", ".so"))
        with tarfile.open(path, "w:xz", preset=9) as archive:
            for each in files:
                archive.add(each, each.name, filter=anonymous)
    print(f"{path}: {path.stat().st_size} bytes")
