"""The commands on artifacts: inspect, sign, pack, verify."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import click
from rich.table import Table

from tvm_deconv.artifact import needs, signing
from tvm_deconv.artifact.manifest import Manifest
from tvm_deconv.artifact.pack import SUFFIX
from tvm_deconv.artifact.select import Accepted, Decision
from tvm_deconv.cli.common import ARTIFACTS, DIRECTORY, advance, console, progress_bar
from tvm_deconv.runtime.library import Library, load
from tvm_deconv.runtime.loader import read_verified
from tvm_deconv.runtime.packing import pack_library
from tvm_deconv.runtime.verify import Verdict, checked, decide
from tvm_deconv.runtime.verify import verify as verify_artifact

_KEY = click.Path(exists=True, dir_okay=False, path_type=Path)
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@ARTIFACTS
@click.option("--json", "as_json", is_flag=True, help="Print manifests and decisions as JSON.")
def inspect(artifacts: Path, as_json: bool) -> None:
    """List ARTIFACTS, a directory or a packed file, and whether this machine can run them.

    Every library is compared with its manifest, and none is run.
    """
    library = checked(load(artifacts))
    decisions = [(manifest, decide(library, manifest)) for manifest in library.manifests]
    if as_json:
        click.echo(json.dumps(_as_json(artifacts, library, decisions), indent=2))
    else:
        console().print(_listing(library, decisions))
        click.echo(f"digest {library.digest}")


def _as_json(path: Path, library: Library, decisions: Sequence[tuple[Manifest, Decision]]) -> dict[str, object]:
    artifacts = [
        dataclasses.asdict(manifest)
        | {"name": manifest.name, "usable": isinstance(decision, Accepted), "reason": decision.reason}
        for manifest, decision in decisions
    ]
    broken = {name: str(error) for name, error in library.broken.items()}
    return {"directory": str(path), "digest": library.digest, "artifacts": artifacts, "broken": broken}


def _listing(library: Library, decisions: Sequence[tuple[Manifest, Decision]]) -> Table:
    """Return the table of all artifacts; sizes are in kB."""
    table = Table(title=repr(library), title_justify="left")
    for name in ("artifact", "layers", "problem", "algorithm", "origin"):
        table.add_column(name, overflow="fold")
    for name in ("kB", "workspace, kB", "scratch / thread, kB"):
        table.add_column(name, justify="right")
    table.add_column("needs", overflow="fold")
    table.add_column("runs here", overflow="fold")
    for manifest, decision in decisions:
        usable = "yes" if isinstance(decision, Accepted) else f"no: {decision.reason}"
        sizes = [f"{n / 1000:.0f}" for n in (manifest.size, manifest.shared_bytes, manifest.scratch_bytes)]
        layers = ", ".join(manifest.layers)
        facts = (manifest.name, layers, manifest.problem, manifest.algorithm, manifest.origin)
        table.add_row(*facts, *sizes, needs.text(manifest.needs), usable)
    for name, error in library.broken.items():
        table.add_row(name, *[""] * 8, f"no: {error}")
    return table


@click.command()
@DIRECTORY
@click.option("--key", type=_KEY, required=True, help="PEM file of the private key, Ed25519.")
def sign(directory: Path, key: Path) -> None:
    """Sign the artifacts in DIRECTORY, for verify --key and load(..., public_key=).

    Every library is first compared with its manifest. Files of weights beside them are signed too.
    """
    library = load(directory)
    for error in library.broken.values():
        raise error
    for manifest in library.manifests:
        read_verified(library.root / manifest.library, manifest)
    path = signing.sign(library.root, library.digest, key)
    click.echo(f"{path}: {len(library.manifests)} artifacts, {library.digest}")


@click.command()
@DIRECTORY
@click.option("--output", "-o", type=_FILE, required=True, help=f"The file to write, such as model{SUFFIX}.")
def pack(directory: Path, output: Path) -> None:
    """Pack the artifacts in DIRECTORY, their signature and weights into one file, which load() reads in place.

    Every library is compared with its manifest. The file replaces an older one at once.
    """
    library = load(directory)
    pack_library(library, output)
    size = output.stat().st_size / 1000
    click.echo(f"{output}: {len(library.manifests)} artifacts, {size:.0f} kB, {library.digest}")


@click.command()
@ARTIFACTS
@click.option("--key", type=_KEY, help="PEM file of a public key: refuse artifacts that its owner did not sign.")
@click.option("--seed", type=click.IntRange(0), help="Seed of the random data; by default a fresh one.")
def verify(artifacts: Path, key: Path | None, seed: int | None) -> None:
    """Run each of ARTIFACTS, a directory or a packed file, on random data and compare with the reference.

    Of artifacts that this machine cannot run only the digest is checked. Exits with 1 if an artifact is wrong or
    broken, or if none could be run. With --key, exits with 1 before any is run unless they are those that were signed.
    """
    library = load(artifacts, public_key=key)
    verdicts: list[Verdict] = []
    with progress_bar("verifying", total=len(library.manifests)) as progress:
        for manifest in library.manifests:
            verdicts.append(verify_artifact(library, manifest, seed))
            advance(progress)
    console().print(_verdicts(library, verdicts))
    failed = len(library.broken) + sum(1 for verdict in verdicts if verdict.status == "failed")
    good = sum(1 for verdict in verdicts if verdict.status == "ok")
    skipped = len(verdicts) + len(library.broken) - good - failed
    summary = f"{artifacts}: {good} ok, {failed} failed, {skipped} not for this machine"
    if failed or not good:
        raise click.ClickException(summary)
    click.echo(summary)


def _verdicts(library: Library, verdicts: Sequence[Verdict]) -> Table:
    """Return the table of what verification found."""
    table = Table(title=repr(library), title_justify="left")
    for name in ("artifact", "layers", "problem", "verdict"):
        table.add_column(name, overflow="fold")
    table.add_column("deviation", justify="right")
    for verdict in verdicts:
        manifest = verdict.manifest
        text = f"{verdict.status}: {verdict.reason}" if verdict.reason else verdict.status
        deviation = f"{verdict.deviation:.1e}" if verdict.status == "ok" else ""
        table.add_row(manifest.name, ", ".join(manifest.layers), manifest.problem, text, deviation)
    for name, error in library.broken.items():
        table.add_row(name, "", "", f"failed: {error}", "")
    return table
