"""The layers to time: artifacts of a directory, or problems with the artifacts that were built for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tvm_deconv.artifact.manifest import Manifest
from tvm_deconv.artifact.select import Accepted
from tvm_deconv.bench.peers import Task
from tvm_deconv.errors import NoArtifactError
from tvm_deconv.problem import ACTIVATIONS, Epilogue, Problem
from tvm_deconv.problem.dtypes import DTYPES
from tvm_deconv.problem.quantization import Quantization
from tvm_deconv.runtime.library import Library
from tvm_deconv.runtime.verify import decide
from tvm_deconv.targets import of_names

_SEED = 20


@dataclass(frozen=True)
class Layer:
    """A layer to time: its name, the task of the artifact that serves it, and that artifact's target.

    `default` is the task of the artifact that arithmetic alone chooses, without a tuning log: the same `task` if that
    is what was chosen, None if it is not known. `single` is the task of the same layer in float32 by direct kernels,
    for one in another type.
    """

    name: str
    task: Task
    target: str
    default: Task | None = None
    single: Task | None = None


def layers_in(library: Library) -> list[Layer]:
    """Return the artifacts of `library` that this machine runs, each as a layer."""
    layers = []
    for manifest in library.manifests:
        if isinstance(decide(library, manifest), Accepted):
            name = ", ".join(manifest.layers) or manifest.name
            layers.append(Layer(name, _task(library.root, manifest.parsed, manifest), manifest.target))
    return layers


#: The algorithms that a layer in another type is compared with in float32.
DIRECT = ("direct_channels", "direct_folded", "direct_groups", "direct_inputs", "direct_rows")


def in_type(problem: Problem, text: str) -> Problem:
    """Return `problem` in other types: a dtype, or those of data, filter and output such as ``uint8.int8.uint8``.

    Integers that are not quantized have no activation that these do not have. Raises ProblemError.
    """
    dtype, _, quantization = text.partition(".")
    if quantization:
        return problem.replace(dtype=dtype, precision="ieee", quantization=Quantization.parse(quantization))
    if dtype == problem.dtype:
        return problem
    epilogue = problem.epilogue
    if DTYPES[dtype].accumulator == "int32" and not ACTIVATIONS[epilogue.activation].integers:
        epilogue = Epilogue(epilogue.bias)
    return problem.replace(dtype=dtype, precision="ieee", epilogue=epilogue)


def artifacts_of(problems: Mapping[Problem, Sequence[str]], library: Library, target: str) -> dict[Problem, Manifest]:
    """Return the artifact of `library` for `target` that serves each problem. Raises NoArtifactError."""
    chosen = {}
    for problem in problems:
        decisions = library.select(problem)
        accepted = (decision.manifest for decision in decisions if isinstance(decision, Accepted))
        manifest = next((manifest for manifest in accepted if manifest.target == target), None)
        if manifest is None:
            raise NoArtifactError(problem.artifact_key, decisions)
        chosen[problem] = manifest
    return chosen


def is_default(problem: Problem, manifest: Manifest) -> bool:
    """Return whether an artifact has the one schedule that arithmetic alone chooses for the problem."""
    from tvm_deconv.compiler.records import Schedule  # which import TVM; artifacts are timed without
    from tvm_deconv.compiler.selection import default_schedule

    if len(problem.variants) > 1:
        return False
    (target,) = of_names(manifest.target)
    return Schedule.of(manifest.algorithm, manifest.knobs) == default_schedule(target.computes(problem), target)


def in_float32(problem: Problem) -> Problem:
    """Return the problem of the same layer in float32."""
    return problem.replace(dtype="float32", quantization=None)


def layers_of(
    problems: Mapping[Problem, Sequence[str]],
    root: Path,
    chosen: Mapping[Problem, Manifest],
    default_root: Path,
    defaults: Mapping[Problem, Manifest],
    single_root: Path,
    singles: Mapping[Problem, Manifest],
) -> list[Layer]:
    """Return `problems` as layers on their artifacts: those `chosen`, in `root`, and those `defaults` that differ.

    `singles` are the artifacts of problems in float32 that others are compared with.
    """
    layers = []
    for problem, names in problems.items():
        task = _task(root, problem, chosen[problem])
        default = _task(default_root, problem, defaults[problem]) if problem in defaults else task
        if problem in defaults and defaults[problem].sha256 == chosen[problem].sha256:
            default = task
        other = in_float32(problem)
        single = _task(single_root, other, singles[other]) if problem != other and other in singles else None
        layers.append(Layer(", ".join(names), task, chosen[problem].target, default, single))
    return layers


def _task(root: Path, problem: Problem, manifest: Manifest) -> Task:
    return Task(problem, _SEED, root.absolute(), manifest.name)
