"""The command doctor."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import click
from rich.table import Table

from tvm_deconv.artifact import needs
from tvm_deconv.artifact.select import Decision, decision_table
from tvm_deconv.cli.common import console
from tvm_deconv.compiler.launcher import find_compiler
from tvm_deconv.compiler.toolchain import version_text
from tvm_deconv.errors import CompilerNotFound, DeviceError, ProblemError
from tvm_deconv.problem import Problem
from tvm_deconv.runtime.library import Library, load
from tvm_deconv.runtime.verify import checked
from tvm_deconv.targets import (
    CPU_TARGETS,
    MAX_TARGET_VARIABLE,
    CpuTarget,
    Host,
    cuda_capability,
    detect_host,
    max_target,
    microarchitecture,
    native,
)

_PACKAGES = ("tvm_deconv", "numpy", "apache-tvm-ffi", "apache-tvm", "archspec", "onnx", "safetensors", "ml_dtypes")


@click.command()
@click.argument("artifacts", required=False, type=click.Path(exists=True, path_type=Path))
def doctor(artifacts: Path | None) -> None:
    """Report what this machine can compile and run, and which of ARTIFACTS would be selected."""
    console().print(_facts())
    if artifacts is not None:
        library = load(artifacts)
        whole = checked(library)
        for problem in dict.fromkeys(manifest.parsed for manifest in library.manifests):
            click.echo(f"\n{problem.key}\n{decision_table(_decisions(whole, problem))}")


def _facts() -> Table:
    from tvm_deconv.bench.peers import PEERS

    host, cap = detect_host(), max_target()
    table = Table(show_header=False)
    table.add_column("fact")
    table.add_column("value", overflow="fold")
    allowed = len(os.sched_getaffinity(0))
    table.add_row("CPU", f"{host.name}, {host.cores} cores, {host.threads} threads, {allowed} for this process")
    for target in CPU_TARGETS.values():
        table.add_row(target.name, _runs_here(target, host.features, cap))
    try:
        table.add_row("native", native(host).name)
    except ProblemError as error:
        table.add_row("native", str(error))
    table.add_row("microarchitecture", _microarchitecture(host))
    table.add_row(MAX_TARGET_VARIABLE, cap.name if cap else "not set")
    table.add_row("libraries", needs.text(needs.here()))
    table.add_row("compiler", _compiler())
    table.add_row("nvcc", _nvcc())
    table.add_row("CUDA device", _cuda_device())
    table.add_row("Python", platform.python_version())
    for package in dict.fromkeys((*_PACKAGES, *(peer.distribution for peer in PEERS.values()))):
        table.add_row(package, _version(package))
    return table


def _decisions(library: Library, problem: Problem) -> list[Decision]:
    """Return the decisions on artifacts for the problem and on unreadable ones, without those for other problems."""
    return [
        decision
        for decision in library.select(problem)
        if decision.manifest is None or decision.manifest.problem in problem.artifact_keys
    ]


def _runs_here(target: CpuTarget, features: frozenset[str], cap: CpuTarget | None) -> str:
    missing = target.features - features
    if missing:
        return f"no: this CPU lacks {', '.join(sorted(missing))}"
    if cap is not None and target.features - cap.features:
        return f"no: {MAX_TARGET_VARIABLE}={cap.name} excludes it"
    return "yes"


def _microarchitecture(host: Host) -> str:
    try:
        known = microarchitecture(host)
    except ModuleNotFoundError as error:
        return f"unknown: the package {error.name} is not installed"
    return known.name if known else f"none that archspec knows all flags of for {host.vendor}"


def _compiler() -> str:
    try:
        compiler = find_compiler()
    except CompilerNotFound as error:
        return str(error)
    return f"{compiler}: {version_text(compiler).partition(os.linesep)[0]}"


def _nvcc() -> str:
    try:
        from tvm_deconv.compiler.nvcc import find_nvcc, version

        return f"{find_nvcc()}: {version(find_nvcc())}"
    except CompilerNotFound as error:
        return str(error)


def _cuda_device() -> str:
    try:
        return "compute capability {}.{}".format(*cuda_capability())
    except DeviceError as error:
        return str(error)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
