"""Models whose transposed convolutions artifacts compute: what can be swapped, and the report about it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn.utils import parametrize

from tvm_deconv.errors import ProblemError, SourceError
from tvm_deconv.frontends.layers import FoundLayer
from tvm_deconv.frontends.torch import (
    ACTIVATION_MODULES,
    BATCH_NORMS,
    OPERATORS,
    Inputs,
    Trace,
    arguments_in,
    dtype_name,
    trace,
)
from tvm_deconv.problem import ACTIVATIONS, Epilogue, Problem, integers, one_of
from tvm_deconv.problem.dynamic import MOST_VARIANTS
from tvm_deconv.runtime.library import Library
from tvm_deconv.torch.calls import Calls
from tvm_deconv.torch.filters import is_normalised
from tvm_deconv.torch.followers import Follower
from tvm_deconv.torch.fusion import ABSORBED, COMPILED, Fusion, hooked, layer_class, own
from tvm_deconv.torch.measure import Times, times
from tvm_deconv.torch.packed import handle_of
from tvm_deconv.torch.shapes import dynamic_axes

#: A call of a layer, and its problem without what follows it.
_Seen: TypeAlias = tuple[FoundLayer, Problem | None]
#: What computes a layer, or calls of functions, by artifacts.
_Piece: TypeAlias = Fusion | Calls
#: The functions that reach an operator of PyTorch under another name.
_OTHER_NAMES = {"hardtanh": ("relu6",), "clamp": ("clip",)}
#: A model that runs slower than this many times its own speed is left as it was.
_SLOWEST = 0.98
#: Dynamo's limit of programs for one function while choices of layers are compiled: each is a program for each input.
MOST_PROGRAMS = 64
#: The most buckets of an extent that several example inputs give, by the number of spatial axes that are dynamic.
_MOST_BUCKETS = {1: MOST_VARIANTS, 2: math.isqrt(MOST_VARIANTS)}


@dataclass(frozen=True, slots=True)
class Swap:
    """The outcome for one layer.

    It is swapped unless `reason` says why not. `problems` are those of its calls, `missing` those that no artifact
    serves. `absorbed` are the modules that it computes too. `left` are the nodes behind them that an epilogue could
    hold, but that stay with PyTorch: behind hooks, say, or a scale before an activation.

    `share` is the part of the model's time that PyTorch takes for the layer and what it absorbs, and `gain` how many
    times as fast artifacts are; None where nothing was measured.
    """

    name: str
    operator: str
    problems: tuple[Problem, ...] = ()
    missing: tuple[Problem, ...] = ()
    absorbed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    reason: str = ""
    share: float | None = None
    gain: float | None = None


class Report(tuple[Swap, ...]):
    """One `Swap` per layer; it prints as a table.

    `gain` is how many times as fast the whole model is, as measured; None where nothing was measured.
    """

    gain: float | None

    def __new__(cls, swaps: Iterable[Swap], gain: float | None = None) -> Report:
        """Make a report of `swaps`."""
        report = super().__new__(cls, swaps)
        report.gain = gain
        return report

    @property
    def swapped(self) -> list[Swap]:
        """The layers that were swapped."""
        return [swap for swap in self if not swap.reason]

    @property
    def missing(self) -> list[Problem]:
        """The problems to compile for all layers to be swapped."""
        return list(dict.fromkeys(problem for swap in self for problem in swap.missing))

    @property
    def expected(self) -> float | None:
        """The gain of the model that shares and gains of the swapped layers give; None where nothing was measured."""
        if self.gain is None:
            return None
        saved = sum(swap.share * (1 - 1 / swap.gain) for swap in self.swapped if swap.share and swap.gain)
        return 1 / (1 - saved)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("layer", "operator", "swapped", "share", "gain", "absorbed", "left", "why not")]
        for swap in self:
            share = "" if swap.share is None else f"{100 * swap.share:.1f} %"
            gain = "" if swap.gain is None else f"{swap.gain:.2f}"
            nodes = map(" ".join, (swap.absorbed, swap.left))
            rows.append((swap.name, swap.operator, "no" if swap.reason else "yes", share, gain, *nodes, swap.reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(f"{word:{width}}" for word, width in zip(row, widths, strict=True)) for row in rows]
        if self.gain is not None:
            lines.append(f"the model: {self.gain:.2f} times as fast, {self.expected:.2f} expected")
        return "\n".join(map(str.rstrip, lines))


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A layer that could be swapped: with the modules `parts`, the layer first, or by `calls` in that of `owner`."""

    swap: Swap
    parts: tuple[nn.Module, ...] = ()
    owner: nn.Module | None = None
    calls: int = 0
    follower: Follower | None = None


def problems(model: nn.Module, *inputs: Inputs, dynamic: Any = ()) -> list[Problem]:
    """Return the problems to compile, so that `replace` can swap the layers of `model`.

    `model` must be in evaluation mode; it is run once on each of the `inputs`, without gradients: a sequence of
    arguments, or a mapping of keyword arguments.

    `dynamic` are the axes of the layers' data that each call decides: 0 is the batch, 1 the first spatial axis. The
    extents that several inputs give along a spatial axis become its buckets. Or it is the `dynamic_shapes` of
    torch.export.export: then each layer has the axes that follow from these, with buckets from their ranges; the model
    is exported for that. Raises SourceError, ProblemError.
    """
    traced = trace(model, *inputs)
    swaps = [candidate.swap for candidate in _candidates(model, traced) if not candidate.swap.reason]
    if isinstance(dynamic, Sequence) and all(isinstance(axis, int) for axis in dynamic):
        axes = integers("dynamic", dynamic, 0)
        found = list(dict.fromkeys(problem for swap in swaps for problem in swap.problems))
        greatest = max((problem.rank for problem in found), default=0)
        if found and any(axis > greatest for axis in axes):
            raise ProblemError("dynamic", axes, f"must be axes from 0 to {greatest}")
        return _variable(found, axes) if axes else found
    if len(inputs) != 1:
        raise SourceError("inputs", len(inputs), "must be one example where dynamic has the shapes of torch.export")
    exported = dynamic_axes(model, inputs[0], dynamic)
    if len(exported) != len(traced.layers):
        rule = f"must be the number of transposed convolutions that run, {len(traced.layers)}"
        raise SourceError("exported", len(exported), rule)
    of_layers = {layer.name: free for layer, free in zip(traced.layers, exported, strict=True)}
    return list(dict.fromkeys(_freed(problem, of_layers[swap.name]) for swap in swaps for problem in swap.problems))


def _freed(problem: Problem, axes: Mapping[int, tuple[int, ...]]) -> Problem:
    """Return the problem with dynamic `axes`, which have buckets."""
    buckets = [axes.get(axis + 1, ()) for axis in range(problem.rank)]
    return problem.replace(dynamic=list(axes), buckets=buckets if any(buckets) else ())


def _variable(found: Iterable[Problem], axes: Sequence[int]) -> list[Problem]:
    """Return the problems with dynamic `axes`, each once, with the extents of `found` as buckets."""
    extents: dict[Problem, list[Problem]] = {}
    for problem in found:
        variable = problem.replace(dynamic=[axis for axis in axes if axis <= problem.rank])
        extents.setdefault(variable, []).append(problem)
    made = []
    for variable, alike in extents.items():
        most = _MOST_BUCKETS.get(len(variable.dynamic_axes), 1)
        buckets = [
            _thinned({problem.data_spatial[axis] for problem in alike}, most) if axis in variable.dynamic_axes else ()
            for axis in range(variable.rank)
        ]
        several = any(len(extents) > 1 for extents in buckets)
        made.append(variable.replace(buckets=buckets) if several else variable)
    return made


def _thinned(extents: Iterable[int], most: int) -> tuple[int, ...]:
    """Return up to `most` of the `extents`, the largest among them."""
    falling = sorted(extents, reverse=True)
    return tuple(falling[:: math.ceil(len(falling) / most)])


def replace(
    model: nn.Module,
    library: Library,
    *inputs: Inputs,
    fallback: Literal["torch"] | None = None,
    measure: bool = True,
    compiled: bool = False,
) -> Report:
    """Let artifacts of `library` compute the transposed convolutions of `model`, in place; report on each layer.

    The model is run on each of the `inputs` (a sequence of arguments, or a mapping of keyword arguments), in evaluation
    mode and without gradients, to see the layers, their shapes and the operators behind them. A layer is swapped if
    artifacts serve all of its calls; with ``fallback="torch"``, if they serve one. With it PyTorch computes shapes that
    no artifact serves, now and later; else those raise NoArtifactError. A batch normalisation and an activation that
    always follow are absorbed. Calls of functions, and layers of classes of your own, are taken inside the forward of
    their module.

    If `measure` is true, the model is then run a number of times with and without artifacts. A layer that they do not
    make faster is left to PyTorch, and so are all if the whole model becomes slower. If `compiled` is true, it is run
    as `torch.compile` makes it, once as it is and once with artifacts: as long as it gains nothing, the half of the
    layers is left that gains least by itself in the model as it is. Then all that PyTorch has compiled is forgotten
    (`torch.compiler.reset`), since it compiles a function a few times only.

    Modules keep their place, names, parameters and hooks, and change their class. In training mode they do what they
    did before. Parameters made in inference mode become ordinary ones, since PyTorch does not count writes of those.
    Raises SourceError, ProblemError, and the errors of loading an artifact; then nothing is swapped.
    """
    allowed = fallback is not None and bool(one_of("fallback", fallback, ("torch",)))
    handle = handle_of(library)
    candidates = _candidates(model, trace(model, *inputs))
    with torch.inference_mode(False):
        own(model, (part for candidate in candidates for part in candidate.parts))
    plan = _Plan(handle, allowed)
    report = Report(map(plan.add, candidates))
    try:
        for piece in plan.pieces:
            piece.install()
        run = _runner(model, inputs)
        plan.name(run)
        if not measure or not plan.pieces:
            return report
        if not compiled:
            return plan.measured(report, run, None)
        with _many_programs():
            return plan.measured(report, run, _runner(torch.compile(model, dynamic=False), inputs))
    except BaseException:
        plan.remove(plan.pieces)
        raise


class _Plan:
    """What is to be swapped: `pieces`, in the order of the rows; each row may have one."""

    def __init__(self, library: str, fallback: bool) -> None:
        self.pieces: list[_Piece] = []
        self._library = library
        self._fallback = fallback
        self._rows: list[_Piece | None] = []
        self._calls = Counter[Calls]()

    def add(self, candidate: _Candidate) -> Swap:
        """Add a layer if artifacts serve it, and return its row."""
        swap, piece = candidate.swap, None
        if not swap.reason:
            piece = self._piece(candidate)
            missing = tuple(problem for problem in swap.problems if not piece.serves(problem))
            swap = dataclasses.replace(swap, missing=missing)
            if missing and not (self._fallback and len(missing) < len(swap.problems)):
                keys = ", ".join(problem.key for problem in missing)
                swap = dataclasses.replace(swap, absorbed=(), left=(), reason=f"no artifact serves {keys}")
                piece = None
            elif piece not in self.pieces:
                self.pieces.append(piece)
            if isinstance(piece, Calls):
                self._calls[piece] += candidate.calls
        self._rows.append(piece)
        return swap

    def _piece(self, candidate: _Candidate) -> _Piece:
        if candidate.owner is None:
            epilogue = candidate.swap.problems[0].epilogue
            return Fusion(candidate.parts, epilogue, self._library, self._fallback, candidate.follower)
        others = (piece for piece in self.pieces if isinstance(piece, Calls) and piece.parts == (candidate.owner,))
        return next(others, None) or Calls(candidate.owner, self._library)

    def remove(self, pieces: Iterable[_Piece]) -> None:
        """Make the modules of `pieces` what they were."""
        for piece in list(pieces):
            if piece.installed:
                piece.remove()
            self.pieces.remove(piece)

    def name(self, run: Callable[[], None]) -> None:
        """Take calls of functions by their names, where `run` calls all of them so."""
        if self._calls:
            run()
        for piece, calls in self._calls.items():
            piece.by_name = piece.taken >= calls

    def measured(self, report: Report, run: Callable[[], None], compiled: Callable[[], None] | None) -> Report:
        """Leave the layers that artifacts do not make faster, and return the report with what was measured.

        `compiled` runs the model as it is compiled, if that is what shall become faster.
        """
        whole, parts = times(run, self.pieces)
        median = statistics.median(whole.torch)
        by_piece = dict(zip(self.pieces, parts, strict=True))
        slower = self._slower(by_piece) if compiled is None else self._slower_compiled(by_piece, compiled)
        self.remove(slower)
        if (slower or compiled) and self.pieces:
            whole, _ = times(compiled or run, self.pieces, inside=compiled is None)
        every = bool(self.pieces) and whole.gain < _SLOWEST
        if every:
            self.remove(self.pieces)
        rows = []
        for swap, piece in zip(report, self._rows, strict=True):
            if piece is not None:
                spent = by_piece[piece]
                reason = slower.get(piece, "artifacts make the model slower" if every else "")
                share = statistics.median(spent.torch) / median / self._rows.count(piece)
                swap = dataclasses.replace(swap, reason=reason, share=share, gain=spent.gain)
            rows.append(swap)
        return Report(rows, whole.gain if self.pieces else 1.0)

    def _slower(self, spent: Mapping[_Piece, Times]) -> dict[_Piece, str]:
        """Return the pieces that artifacts make no faster, with the reason."""
        slower = [piece for piece in self.pieces if spent[piece].gain <= 1]
        return dict.fromkeys(slower, "artifacts make it no faster")

    def _slower_compiled(self, spent: Mapping[_Piece, Times], compiled: Callable[[], None]) -> dict[_Piece, str]:
        """Return the pieces that must go for the compiled model to gain, with the reasons.

        They are switched off: a module that changes would be compiled again in both of its forms.
        """
        slower = {
            piece: "PyTorch computes it in compiled programs" for piece in self.pieces if not piece.stays_in_programs
        }
        rest = [piece for piece in self.pieces if piece not in slower]
        trying = sorted(rest, key=lambda piece: _saved(spent[piece]))
        while trying and times(compiled, trying, inside=False)[0].gain <= 1:
            left, trying = trying[: (len(trying) + 1) // 2], trying[(len(trying) + 1) // 2 :]
            for piece in left:
                piece.switched_off = True
            slower |= dict.fromkeys(left, "artifacts make the compiled model no faster")
        return slower


@contextlib.contextmanager
def _many_programs() -> Iterator[None]:
    """Let Dynamo compile a function as often as there are choices of layers, and forget the programs afterwards.

    At its limit it runs functions as they are, and logs that once. Programs that stayed would count for the caller's.
    """
    config: Any = torch._dynamo.config
    try:
        with config.patch(cache_size_limit=max(config.cache_size_limit, MOST_PROGRAMS)):
            yield
    finally:
        torch.compiler.reset()


def _saved(spent: Times) -> float:
    return statistics.median(spent.torch) - statistics.median(spent.swapped)


def _runner(model: nn.Module, inputs: Sequence[Inputs]) -> Callable[[], None]:
    """Return a function that runs a model on its inputs."""
    calls = [arguments_in(given) for given in inputs]

    def run() -> None:
        with torch.no_grad():
            for arguments, keywords in calls:
                model(*arguments, **keywords)

    return run


def _candidates(model: nn.Module, traced: Trace) -> list[_Candidate]:
    modules = dict(model.named_modules())
    modules.setdefault(type(model).__name__, model)  # the name that a model has if it is a layer itself
    calls: dict[str, list[_Seen]] = {}
    for layer, bare in zip(traced.layers, traced.bare, strict=True):
        calls.setdefault(layer.name, []).append((layer, bare))
    candidates = [_candidate(seen, modules, traced) for seen in calls.values()]
    idle = [name for name, part in modules.items() if name and type(part) in OPERATORS and name not in calls]
    return candidates + [_Candidate(Swap(name, type(modules[name]).__name__, reason="did not run")) for name in idle]


def _candidate(seen: list[_Seen], modules: Mapping[str, nn.Module], traced: Trace) -> _Candidate:
    """Return the candidate for the layer whose calls were `seen`."""
    layers = [layer for layer, _ in seen]
    first, part = layers[0], modules.get(layers[0].name)
    reason = next((layer.reason for layer in layers if layer.reason), "")
    if not reason and not _is_plain(part):
        return _calling(seen, part or modules[first.name.rpartition(".")[0]])
    reason = reason or next(filter(None, (_reason(part, layer.problem) for layer in layers)), "")
    if reason or part is None:
        return _Candidate(Swap(first.name, first.operator, reason=reason))
    parts = _absorbing(part, layers, modules, traced.runs)
    count = len(parts) - 1
    asked = [layer.problem for layer in layers if layer.problem is not None]
    follower = None
    if not isinstance(parts[-1], ACTIVATION_MODULES):  # which ends what is fused
        follower = None if hooked(parts[-1]) else _follower(layers, count, modules, traced.bodies)
    if follower is not None:
        count = len(first.fused)
    elif not isinstance(parts[-1], ACTIVATION_MODULES):
        epilogue = Epilogue(bias=part.bias is not None or isinstance(parts[-1], BATCH_NORMS))
        asked = [problem.replace(epilogue=epilogue) for problem in asked]
    row = (first.name, first.operator, tuple(dict.fromkeys(asked)), (), first.fused[:count], first.fused[count:])
    return _Candidate(Swap(*row), tuple(parts), follower=follower)


def _follower(
    layers: list[FoundLayer], count: int, modules: Mapping[str, nn.Module], bodies: Mapping[str, tuple[str, ...]]
) -> Follower | None:
    """Return who computes the activation that alone follows the first `count` nodes behind a layer, if it can wait."""
    first, rest = layers[0], layers[0].fused[count:]
    if first.problem is None or not rest or any(layer.fused[count:] != rest for layer in layers):
        return None
    activation = ACTIVATIONS[first.problem.epilogue.activation]
    shared = modules.get(rest[0])
    if type(shared) in ABSORBED and isinstance(shared, ACTIVATION_MODULES):
        return Follower(shared) if len(rest) == 1 and not hooked(shared) and _is_python(shared) else None
    owner, _, _ = rest[0].rpartition(".")
    functions = tuple(name.removeprefix(f"{owner}.").removesuffix("()") for name in rest)
    names = {operator.name for operator in activation.torch if not operator.inputs}
    gate = (*activation.gate, "mul") if activation.gate else None
    module = modules.get(owner, modules[""])
    if (functions != gate and (len(functions) > 1 or not names & set(functions))) or not _is_python(module):
        return None
    if bodies.get(owner) == rest and not hooked(module) and next(module.parameters(), None) is None:
        return Follower(module)
    return Follower(module, {*names, *_OTHER_NAMES.get(functions[0], ())}) if functions != gate else None


def _calling(seen: list[_Seen], owner: nn.Module) -> _Candidate:
    """Return the candidate for calls of a function in the forward of `owner`."""
    first, _ = seen[0]
    reason = ""
    if not _is_python(owner):
        reason = f"is a call in {type(owner).__name__}, which is no module of Python code: call conv_transpose there"
    asked = tuple(dict.fromkeys(bare for _, bare in seen if bare is not None))
    left = first.fused
    return _Candidate(
        Swap(first.name, first.operator, () if reason else asked, (), (), left, reason), owner=owner, calls=len(seen)
    )


def _absorbing(
    part: nn.Module, layers: list[FoundLayer], modules: Mapping[str, nn.Module], runs: Counter[str]
) -> list[nn.Module]:
    """Return the module of a layer and those behind it that it absorbs."""
    parts = [part]
    for name, *others in zip(*(layer.fused for layer in layers), strict=False):
        follower = modules.get(name)
        known = follower is not None and type(follower) in ABSORBED and not set(others) - {name}
        # A hook would see results of the whole fusion. A module that ran more often also does something else.
        alone = known and runs[name] == len(layers) and not hooked(parts[-1]) and not hooked(follower)
        if not alone or (len(parts) > 1 and isinstance(follower, BATCH_NORMS)):
            break
        parts.append(follower)
    return parts


def _is_python(module: nn.Module) -> bool:
    """Tell whether the forward of `module` is that of its class, in Python."""
    return "forward" not in vars(module) and not isinstance(module, (torch.jit.ScriptModule, torch.fx.GraphModule))


def _is_plain(part: nn.Module | None) -> bool:
    """Tell whether `part` is a layer whose forward is PyTorch's, on a filter that is a parameter or normalised."""
    if part is None or layer_class(part) not in COMPILED or "forward" in vars(part):
        return False
    return is_normalised(part) or ("weight" in part._parameters and not parametrize.is_parametrized(part))


def _reason(part: nn.Module | None, problem: Problem | None) -> str:
    """Return the reason why a layer that `part` computes cannot be swapped; empty if it can."""
    dtype = "" if part is None else dtype_name(part.weight)
    if problem is not None and dtype != problem.dtype:
        return f"runs in {problem.dtype} with a filter of {dtype}: convert the module instead of autocast"
    return ""
