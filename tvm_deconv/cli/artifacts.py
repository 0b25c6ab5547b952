"""The commands on artifacts: inspect, sign, pack, verify."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import click

from tvm_deconv.artifact import needs, signing
from tvm_deconv.artifact.manifest import Manifest
from tvm_deconv.artifact.pack import SUFFIX
from tvm_deconv.artifact.select import Accepted, Decision
from tvm_deconv.cli.common import ARTIFACTS, DIRECTORY, advance, end_if_broken, progress_bar
from tvm_deconv.cli.output import JSON, KEYS, Column, Names, Table, echo, echo_json, say
from tvm_deconv.runtime.library import Library, load
from tvm_deconv.runtime.loader import read_verified
from tvm_deconv.runtime.packing import pack_library
from tvm_deconv.runtime.verify import Verdict, checked, decide
from tvm_deconv.runtime.verify import verify as verify_artifact

_KEY = click.Path(exists=True, dir_okay=False, path_type=Path)
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@ARTIFACTS
@KEYS
@JSON
def inspect(artifacts: Path, keys: bool, as_json: bool) -> None:
    """List ARTIFACTS, a directory or a packed file.

    Every library is compared with its manifest, and none is run. Exits with 1 if an artifact is broken.
    """
    library = checked(load(artifacts))
    decisions = [(manifest, decide(library, manifest)) for manifest in library.manifests]
    if as_json:
        echo_json(_as_json(artifacts, library, decisions))
    else:
        _listing(library, decisions, keys).show()
        say(f"digest {library.digest}")
    end_if_broken(library)


def _counts(library: Library) -> str:
    return f"{library.root.name}: {len(library.manifests)} artifacts, {len(library.broken)} broken"


def _as_json(path: Path, library: Library, decisions: Sequence[tuple[Manifest, Decision]]) -> dict[str, object]:
    artifacts = [
        dataclasses.asdict(manifest)
        | {"name": manifest.name, "usable": isinstance(decision, Accepted), "reason": decision.reason}
        | {"precision": manifest.precision}
        for manifest, decision in decisions
    ]
    return {"directory": str(path), "digest": library.digest, "artifacts": artifacts, "broken": _broken(library)}


def _broken(library: Library) -> dict[str, str]:
    return {name: str(error) for name, error in library.broken.items()}


def _listing(library: Library, decisions: Sequence[tuple[Manifest, Decision]], keys: bool) -> Table:
    """Return the table of all artifacts; sizes are in kB."""
    names = Names(keys)
    facts = [Column("target", spare=True), Column("algorithm", spare=True), Column("origin", spare=True)]
    sizes = [
        Column("kB", True),
        Column("workspace kB", True, spare=True),
        Column("scratch kB / thread", True, spare=True),
        Column("needs", spare=True),
    ]
    table = Table(_counts(library), [*names.columns, *facts, *sizes, Column("runs here")])
    for manifest, decision in decisions:
        usable = "yes" if isinstance(decision, Accepted) else f"no: {decision.reason}"
        numbers = [f"{n / 1000:.0f}" for n in (manifest.size, manifest.shared_bytes, manifest.scratch_bytes)]
        permits = manifest.parsed.precision != "ieee"
        precision = f", precision {manifest.precision}" if permits else ""
        told = manifest.target, f"{manifest.algorithm}{precision}", manifest.origin
        table.add(
            *names.cells(manifest.layers, manifest.parsed, manifest.name),
            *told,
            *numbers,
            needs.text(manifest.needs),
            usable,
        )
    for name, error in library.broken.items():
        table.add(*names.cells((), None, name), *[""] * 7, f"no: {error}")
    return table


@click.command()
@DIRECTORY
@click.option("--key", type=_KEY, required=True, help="PEM file of the private key, Ed25519.")
@JSON
def sign(directory: Path, key: Path, as_json: bool) -> None:
    """Sign the artifacts in DIRECTORY.

    The signature is for verify --key and load(..., public_key=). Every library is first compared with its manifest.
    Files of weights beside them are signed too.
    """
    library = load(directory)
    for error in library.broken.values():
        raise error
    for manifest in library.manifests:
        read_verified(library.root / manifest.library, manifest)
    path = signing.sign(library.root, library.digest, key)
    if as_json:
        echo_json({"signature": str(path), "artifacts": len(library.manifests), "digest": library.digest})
    else:
        echo(f"{path}: {len(library.manifests)} artifacts, {library.digest}")


@click.command()
@DIRECTORY
@click.option("--output", "-o", type=_FILE, required=True, help=f"The file to write, such as model{SUFFIX}.")
@JSON
def pack(directory: Path, output: Path, as_json: bool) -> None:
    """Pack the artifacts in DIRECTORY into one file.

    It holds their signature and their weights too, and load() reads it where it lies. Every library is compared with
    its manifest. The file replaces an older one at once.
    """
    library = load(directory)
    try:
        pack_library(library, output)
    except OSError as error:
        rule = f"must be a file that can be written: {error.strerror}"
        raise click.ClickException(f"output={output}: {rule}") from None
    count, size = len(library.manifests), output.stat().st_size
    if as_json:
        echo_json({"file": str(output), "artifacts": count, "bytes": size, "digest": library.digest})
    else:
        echo(f"{output}: {count} artifacts, {size / 1000:.0f} kB, {library.digest}")


@click.command()
@ARTIFACTS
@click.option("--key", type=_KEY, help="PEM file of a public key: refuse artifacts that its owner did not sign.")
@click.option("--seed", type=click.IntRange(0), help="Seed of the random data; by default a fresh one.")
@KEYS
@JSON
def verify(artifacts: Path, key: Path | None, seed: int | None, keys: bool, as_json: bool) -> None:
    """Compare the results of ARTIFACTS with the reference.

    ARTIFACTS are a directory or a packed file. Each runs on random data, and is compared with the reference in
    float64. Of artifacts that this machine cannot run only the digest is checked. Exits with 1 if an artifact is
    wrong or broken, or if none could be run. With --key, exits with 1 before any is run unless they are those that were
    signed.
    """
    library = load(artifacts, public_key=key)
    verdicts: list[Verdict] = []
    with progress_bar("verifying", total=len(library.manifests)) as progress:
        for manifest in library.manifests:
            verdicts.append(verify_artifact(library, manifest, seed))
            advance(progress)
    failed = len(library.broken) + sum(1 for verdict in verdicts if verdict.status == "failed")
    good = sum(1 for verdict in verdicts if verdict.status == "ok")
    skipped = len(verdicts) + len(library.broken) - good - failed
    summary = f"{artifacts}: {good} ok, {failed} failed, {skipped} not for this machine"
    if as_json:
        found = [_verdict_as_json(verdict) for verdict in verdicts]
        echo_json({"directory": str(artifacts), "artifacts": found, "broken": _broken(library)})
    else:
        _verdicts(library, verdicts, keys).show()
    if failed or not good:
        raise click.ClickException(summary)
    if not as_json:
        say(summary)


def _verdict_as_json(verdict: Verdict) -> dict[str, object]:
    manifest = verdict.manifest
    return {
        "name": manifest.name,
        "layers": list(manifest.layers),
        "problem": manifest.problem,
        "status": verdict.status,
        "reason": verdict.reason,
        "deviation": verdict.deviation if verdict.status == "ok" else None,
    }


def _verdicts(library: Library, verdicts: Sequence[Verdict], keys: bool) -> Table:
    """Return the table of what verification found."""
    names = Names(keys)
    table = Table(_counts(library), [*names.columns, Column("verdict"), Column("deviation", right=True)])
    for verdict in verdicts:
        manifest = verdict.manifest
        text = f"{verdict.status}: {verdict.reason}" if verdict.reason else verdict.status
        deviation = f"{verdict.deviation:.1e}" if verdict.status == "ok" else ""
        table.add(*names.cells(manifest.layers, manifest.parsed, manifest.name), text, deviation)
    for name, error in library.broken.items():
        table.add(*names.cells((), None, name), f"failed: {error}", "")
    return table
