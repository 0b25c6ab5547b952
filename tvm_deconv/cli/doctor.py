"""The command doctor."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import click

from tvm_deconv.artifact import needs
from tvm_deconv.artifact.select import Accepted, Decision, decision_table
from tvm_deconv.cli.common import end_if_broken
from tvm_deconv.cli.output import JSON, Column, Table, echo, echo_json
from tvm_deconv.compiler.launcher import find_compiler
from tvm_deconv.compiler.toolchain import version_text
from tvm_deconv.errors import CompilerNotFound, DeviceError, ProblemError
from tvm_deconv.problem import Problem
from tvm_deconv.problem.words import words
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
from tvm_deconv.targets.ancestry import name_of

_PACKAGES = ("tvm_deconv", "numpy", "apache-tvm-ffi", "apache-tvm", "archspec", "onnx", "safetensors", "ml_dtypes")


@click.command()
@click.argument("artifacts", required=False, type=click.Path(exists=True, path_type=Path))
@JSON
def doctor(artifacts: Path | None, as_json: bool) -> None:
    """Report what this machine can compile and run.

    With ARTIFACTS, a directory or a packed file, also which of them would be selected; exits with 1 if one is broken.
    """
    if artifacts is None:
        _report(_facts(), {}, as_json)
        return
    library = load(artifacts)
    whole = checked(library)
    _report(_facts(), _chosen(library, whole), as_json)
    end_if_broken(whole)


def _report(facts: dict[str, str], chosen: dict[Problem, list[Decision]], as_json: bool) -> None:
    """Print what is known of this machine, and the decisions for each problem."""
    if as_json:
        decided = {
            problem.key: [
                {"artifact": one.name, "usable": isinstance(one, Accepted), "reason": one.reason} for one in all_
            ]
            for problem, all_ in chosen.items()
        }
        echo_json({"facts": facts, "problems": decided})
        return
    table = Table("", [Column("fact"), Column("value")])
    for fact, value in facts.items():
        table.add(fact, value)
    table.show()
    for problem, decisions in chosen.items():
        names = {name: None for one in decisions if one.manifest for name in one.manifest.layers}
        echo(f"\n{', '.join([*names, words(problem)])}\n{decision_table(decisions)}")


def _facts() -> dict[str, str]:
    """Return what is known of this machine and this installation, by names for people."""
    from tvm_deconv.bench.peers import PEERS

    host, cap = detect_host(), max_target()
    allowed = len(os.sched_getaffinity(0))
    facts = {"CPU": f"{host.name}, {host.cores} cores, {host.threads} threads, {allowed} for this process"}
    facts |= {target.name: _runs_here(target, host.features, cap) for target in CPU_TARGETS.values()}
    try:
        facts["native"] = native(host).name
    except ProblemError as error:
        facts["native"] = str(error)
    packages = dict.fromkeys((*_PACKAGES, *(peer.distribution for peer in PEERS.values())))
    return facts | {
        "microarchitecture": _microarchitecture(host),
        MAX_TARGET_VARIABLE: cap.name if cap else "not set",
        "libraries": needs.text(needs.here()),
        "compiler": _compiler(),
        "nvcc": _nvcc(),
        "CUDA device": _cuda_device(),
        "Python": platform.python_version(),
        **{package: _version(package) for package in packages},
    }


def _chosen(library: Library, whole: Library) -> dict[Problem, list[Decision]]:
    """Return the decisions of the `whole` artifacts for each problem that an artifact of the library is for."""
    problems = dict.fromkeys(manifest.parsed for manifest in library.manifests)
    return {problem: _decisions(whole, problem) for problem in problems}


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
    name = name_of(host) or "unknown"
    try:
        target = microarchitecture(host)
    except ModuleNotFoundError as error:
        return f"{name}; as a target: unknown, the package {error.name} is not installed"
    return f"{name}; as a target: {target.name if target else 'none, it lacks flags of each'}"


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
