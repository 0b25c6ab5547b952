"""The command clean."""

from __future__ import annotations

from pathlib import Path

import click

from tvm_deconv.cli.common import DIRECTORY
from tvm_deconv.cli.output import JSON, echo, echo_json, say


@click.command()
@DIRECTORY
@JSON
def clean(directory: Path, as_json: bool) -> None:
    """Remove from DIRECTORY what no artifact needs any more.

    That is: what killed builds left, manifests that do not read or whose library is missing, and libraries without a
    manifest. Artifacts of another version of the format, weights and other files stay.
    """
    from tvm_deconv.compiler import output

    removed = output.clean(directory)
    if as_json:
        echo_json({"directory": str(directory), "removed": [path.name for path in removed]})
        return
    for path in removed:
        echo(path.name)
    say(f"{directory}: {len(removed)} removed")
