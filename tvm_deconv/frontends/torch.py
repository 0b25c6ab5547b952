"""PyTorch modules: transposed convolutions and the operators that follow them, seen in one run on example inputs.

The run is recorded operator by operator, below autograd and autocast. So a layer is found however it is called: as a
module, as a function, inside a parametrization. Shapes, dtypes, memory formats and constants are those of the run. A
tensor that a hook or a closure keeps for later does not count as used; outputs and attributes of modules do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from tvm_deconv.errors import ProblemError, SourceError
from tvm_deconv.frontends.folding import absorb
from tvm_deconv.frontends.graph import ADD, BATCH_NORM, MULTIPLY, SUBTRACT, Graph, Node, arguments_of
from tvm_deconv.frontends.layers import FoundLayer, uncovered
from tvm_deconv.frontends.packages import cast, missing_package
from tvm_deconv.problem import ACTIVATIONS, Array, Epilogue, Problem
from tvm_deconv.problem.arrays import numpy_dtype

try:
    import torch
    from torch import nn
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.weak import WeakTensorKeyDictionary
except ImportError:
    raise missing_package("a module", "torch") from None
from tvm_deconv.frontends.torch_integers import NAMESPACE, Integers, integers_of, on_integers

OPERATORS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
ACTIVATION_MODULES: tuple[type[nn.Module], ...] = tuple(
    getattr(nn, name) for activation in ACTIVATIONS.values() for name in activation.torch_modules
)
#: Modules that are one node each, which has the module's name.
_LEAVES = (*OPERATORS, *BATCH_NORMS, *ACTIVATION_MODULES)

#: operator -> that of a `Node`
_ARITHMETIC = {"add": ADD, "sub": SUBTRACT, "mul": MULTIPLY}
#: operator -> the activation that it computes, and how
_ACTIVATIONS = {
    operator.name: (name, operator) for name, activation in ACTIVATIONS.items() for operator in activation.torch
}
#: The names of transposed convolutions in namespaces besides PyTorch's own.
_TRANSPOSED = re.compile("conv_?transpose|convolution_transpose")
#: The forms of batch normalisation: each begins with data, gamma, beta, mean, variance and ends with epsilon.
_BATCH_NORM = ("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit_no_training")


#: What a model is called with: its arguments, or its keyword arguments by name.
Inputs: TypeAlias = Sequence[object] | Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Trace:
    """The layers of all runs, in their order; `runs` counts by name the nodes that an epilogue could hold.

    `bare` are the problems of the layers without what follows them. `bodies` has the modules that are a chain of
    operators from their only argument to their result, with the names of these.
    """

    layers: list[FoundLayer]
    runs: Counter[str]
    bare: list[Problem | None]
    bodies: dict[str, tuple[str, ...]]


def scan_module(module: object, inputs: Inputs) -> list[FoundLayer]:
    """Return the transposed convolutions that ``module(*inputs)`` runs, in the order of the calls.

    A mapping of `inputs` gives keyword arguments. The module must be in evaluation mode; it is run once, without
    gradients, and left as it was.
    """
    return trace(module, inputs).layers


def trace(module: object, *examples: Inputs) -> Trace:
    """Run the module on each of the `examples` and return the layers and the counts of nodes.

    Raises SourceError as `scan_module`.
    """
    if not isinstance(module, nn.Module):
        raise SourceError("source", type(module).__name__, "must be a path or an nn.Module")
    # An exported program has decided that in its graph, and has an eval() of its own, which refuses.
    if "eval" not in vars(module) and any(part.training for part in module.modules()):
        raise SourceError("training", True, "must be False all over the module: call module.eval() first")
    if not examples:
        raise SourceError("inputs", examples, "must be at least one example of what the module is called with")
    layers: list[FoundLayer] = []
    runs = Counter[str]()
    bare: list[Problem | None] = []
    bodies: dict[str, set[tuple[str, ...]]] = {}
    for arguments, keywords in map(arguments_in, examples):
        names = {part: name or type(part).__name__ for name, part in module.named_modules()}
        recorder = _Recorder([*module.parameters(), *module.buffers()], (names.pop(module), module))
        with torch.no_grad(), recorder, _watched(names, recorder):
            outputs = module(*arguments, **keywords)
        # The program gets the outputs, also inside an object; the modules keep their attributes.
        objects = [vars(leaf) for leaf in tree_leaves(outputs) if hasattr(leaf, "__dict__")]
        traced = recorder.trace([outputs, objects, [vars(part) for part in module.modules()]])
        layers += traced.layers
        runs += traced.runs
        bare += traced.bare
        for name, several in recorder.bodies.items():
            bodies.setdefault(name, set()).update(several)
    alike = {name: body for name, (body, *others) in bodies.items() if body and not others}
    return Trace(layers, runs, bare, alike)


def arguments_in(inputs: Inputs) -> tuple[Sequence[object], Mapping[str, object]]:
    """Return the positional and keyword arguments that `inputs` are. Raises SourceError."""
    if isinstance(inputs, Mapping):
        return (), inputs
    if isinstance(inputs, Sequence) and not isinstance(inputs, str):
        return inputs, {}
    rule = "must be a sequence of the model's arguments, or a mapping of its keyword arguments"
    raise SourceError("inputs", type(inputs).__name__, rule)


@contextlib.contextmanager
def _watched(names: Mapping[nn.Module, str], recorder: _Recorder) -> Iterator[None]:
    """Tell `recorder` which modules are running inside the whole."""
    with contextlib.ExitStack() as hooks:
        for part in names:
            if not isinstance(part, torch.jit.ScriptModule):  # those take no hooks
                before = part.register_forward_pre_hook(lambda part, _: recorder.enter(names[part], part))
                after = part.register_forward_hook(
                    lambda _, *called: recorder.leave(*called), with_kwargs=True, always_call=True
                )
                hooks.callback(before.remove)
                hooks.callback(after.remove)
        yield


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """A recorder that makes a `Node` of each operator that runs; the tensors of nodes are a number and a version.

    A constant is a parameter, a buffer, or the result of a deterministic operator on constants alone.
    """

    def __init__(self, constants: Sequence[torch.Tensor], whole: tuple[str, nn.Module]) -> None:
        super().__init__()
        self.stack = [whole]
        self.bodies: dict[str, set[tuple[str, ...]]] = {}
        self._nodes: list[Node] = []
        self._begins: list[int] = []
        self._layers: list[tuple[Node, FoundLayer]] = []
        self._integers: dict[Hashable, Integers | None] = {}
        self._values: dict[Hashable, Array] = {}
        self._count = itertools.count()
        self._numbers = WeakTensorKeyDictionary()
        self._constant = WeakTensorKeyDictionary(dict.fromkeys(constants, True))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and record it."""
        del types
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # where operators made of others come whole
            with self:
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        called = func._schema.name.removeprefix("aten::").rstrip("_")
        tensors = _tensors((args, kwargs))
        node = _node(called, args, kwargs)
        operands = self._normal(*args[:5]) if node.op == BATCH_NORM else tensors
        # Constants of other operators would only be in the way: weights of any size.
        inputs = tuple(map(self._operand if node.op else self._key, operands))
        layer = None
        if called == "convolution" and args[6]:
            called = f"conv_transpose{args[0].dim() - 2}d"
            layer = self._layer(called, *args)
        elif "::" in called and _TRANSPOSED.search(called):
            layer = self._foreign(called)
        output = func(*args, **kwargs)
        made = _tensors(output)
        fixed = bool(tensors) and all(map(self._is_constant, tensors))
        self._constant.update(dict.fromkeys(made, fixed and torch.Tag.nondeterministic_seeded not in func.tags))
        if node.op and made[0].dtype != tensors[0].dtype:
            node = _OTHER  # a constant of another type has changed the type
        key = self._key(made[0]) if made else None
        if called.startswith(NAMESPACE):
            self._integers[key] = integers_of(func, args, kwargs, self._value)
        constants = _ACTIVATIONS[called][1].inputs if node.op in ACTIVATIONS else ()
        node = dataclasses.replace(
            node,
            name=self._name(called),
            inputs=inputs,
            output=key,
            operands=tuple(zip(inputs[1:], constants, strict=False)),
        )
        self._nodes.append(node)
        if layer is not None:
            self._layers.append((node, layer))
        return output

    def enter(self, name: str, part: nn.Module) -> None:
        """Let `part` be the innermost module that runs."""
        self.stack.append((name, part))
        self._begins.append(len(self._nodes))

    def leave(self, arguments: tuple[object, ...], keywords: Mapping[str, object], output: object) -> None:
        """End the innermost module; keep the names of its nodes if they lead from its only argument to its output."""
        name, _ = self.stack.pop()
        nodes = self._nodes[self._begins.pop() :]
        body: tuple[str, ...] = ()
        if len(arguments) == 1 and not keywords and isinstance(output, torch.Tensor) and nodes:
            numbers = [self._numbers.get(tensor) for tensor in _tensors(arguments)]
            taken = [key[0] for key in nodes[0].inputs if isinstance(key, tuple)] == numbers[:1]
            body = tuple(node.name for node in nodes) if taken and nodes[-1].output == self._key(output) else ()
        self.bodies.setdefault(name, set()).add(body)

    def trace(self, left: object) -> Trace:
        """Return the layers with their epilogues, after the run; `left` holds the tensors that others may use."""
        results = Node("", "", tuple(map(self._key, _tensors(left))), None)
        graph = Graph([*self._nodes, results], self._values.get)
        layers = []
        for node, layer in self._layers:
            layers.append(layer if layer.problem is None else self._absorbed(layer, layer.problem, node, graph))
        runs = Counter(node.name for node in self._nodes if node.op)
        return Trace(layers, runs, [layer.problem for _, layer in self._layers], {})

    def _absorbed(self, layer: FoundLayer, problem: Problem, node: Node, graph: Graph) -> FoundLayer:
        """Return the layer of `problem` with its epilogue, on integers where its data are dequantized ones.

        It has a note where it then stays as it is.
        """
        steps = [*graph.steps(node.output, problem.rank + 2, *problem.bias_shape)]
        absorbed = absorb(layer, steps)
        data, filter = map(self._integers.get, node.inputs[:2])
        if data is None:
            return absorbed
        ends = {sum(len(step.nodes) for step in steps[: i + 1]): step.output for i, step in enumerate(steps)}
        after = graph.only_user(ends.get(len(absorbed.fused), node.output))
        output = self._integers.get(after.output) if after is not None else None
        made: FoundLayer | str = "a scale behind it must be folded into its filter before that is quantized"
        if absorbed.filter is layer.filter:
            made = on_integers(absorbed, data, filter, output, after)
        if isinstance(made, str):
            return dataclasses.replace(absorbed, note=f"as {problem.dtype}: its data are dequantized: {made}")
        return made

    def _value(self, tensor: torch.Tensor) -> Array | None:
        """Return the value of a constant, None of another tensor."""
        return array(tensor) if self._is_constant(tensor) else None

    def _key(self, tensor: torch.Tensor) -> Hashable:
        if tensor not in self._numbers:
            self._numbers[tensor] = next(self._count)
        return self._numbers[tensor], 0 if tensor.is_inference() else tensor._version

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        return bool(self._constant.get(tensor, False))

    def _operand(self, tensor: torch.Tensor) -> Hashable:
        """Return the key of an input; keep its value if it is a constant."""
        key = self._key(tensor)
        if self._is_constant(tensor) and key not in self._values:
            self._values[key] = array(tensor)
        return key

    def _normal(
        self,
        data: torch.Tensor,
        gamma: torch.Tensor | None,
        beta: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Return the operands of a batch normalisation; add a gamma of ones and a beta of zeros if they are missing."""
        if gamma is None:
            self._constant[gamma := torch.ones_like(mean)] = True
        if beta is None:
            self._constant[beta := torch.zeros_like(mean)] = True
        return [data, gamma, beta, mean, variance]

    def _name(self, called: str) -> str:
        """Return the name of the module that runs, and of the function behind it unless the module is one operator."""
        name, part = self.stack[-1]
        if isinstance(part, _LEAVES):
            return name
        return f"{called}()" if len(self.stack) == 1 else f"{name}.{called}()"

    def _foreign(self, called: str) -> FoundLayer:
        """Return the layer of an operator that is not PyTorch's own, which is not covered."""
        name, part = self.stack[-1]
        kind = type(part).__name__
        is_layer = "ConvTranspose" in kind
        return uncovered(name if is_layer else self._name(called), kind if is_layer else called, _reason_of(called))

    def _layer(
        self,
        called: str,
        data: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
    ) -> FoundLayer:
        del transposed
        name = self._name(called)
        base = next((base for base in OPERATORS if isinstance(self.stack[-1][1], base)), None)
        operator = called if base is None else base.__name__
        try:
            problem = Problem.from_torch(
                tuple(data.shape),
                tuple(weight.shape),
                stride=stride,
                padding=padding,
                output_padding=output_padding,
                groups=groups,
                dilation=dilation,
                dtype=dtype_name(data),
                epilogue=Epilogue(bias=bias is not None),
            ).replace(data_format="NXC" if channels_last(data) else "NCX")
        except ProblemError as error:
            return uncovered(name, operator, str(error))
        filter = array(weight) if self._is_constant(weight) else None
        known = bias is not None and self._is_constant(bias)
        return FoundLayer(
            name, operator, problem, filter, cast(array(bias), problem.accumulate_dtype) if known else None
        )


def _reason_of(called: str) -> str:
    """Return the reason why the operator `called` of another namespace is not covered."""
    if called.startswith("tvm_deconv::"):
        return "is computed by an artifact already"
    if called.startswith("quantized::"):
        return f"runs quantised, as {called}: take the float model, before torch.ao.quantization.convert"
    return f"runs as {called}, which is no operator of plain PyTorch: take the model before it was converted"


def memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """Return the format of a result for `tensor`, of shape ``[N, C, *X]``: channels last if `tensor` has that alone."""
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim(), torch.contiguous_format)
    last = not tensor.is_contiguous() and tensor.is_contiguous(memory_format=form)
    return form if last else torch.contiguous_format


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of the dtype of `tensor`, as problems have it."""
    return str(tensor.dtype).removeprefix("torch.")


def channels_last(tensor: torch.Tensor) -> bool:
    """Tell whether the channels of `tensor`, of shape ``[N, C, *X]``, come last in memory."""
    return memory_format(tensor) is not torch.contiguous_format


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


#: An operator that no epilogue holds; the recorder adds names and tensors.
_OTHER = Node("", "", (), None)


def _node(called: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Node:
    """Return operator and numbers of a node, without its name and its tensors."""
    if called in _BATCH_NORM:
        training = args[5] is True or args[3] is None
        return _OTHER if training else dataclasses.replace(_OTHER, op=BATCH_NORM, numbers={"epsilon": args[-1]})
    if called in _ARITHMETIC:
        # The keyword alpha is a factor of the second operand.
        plain = isinstance(args[-1], torch.Tensor) and kwargs in ({}, {"alpha": 1})
        return dataclasses.replace(_OTHER, op=_ARITHMETIC[called]) if plain else _OTHER
    if called in _ACTIVATIONS:
        name, operator = _ACTIVATIONS[called]
        given = dict(zip(operator.arguments, args[1:], strict=False)) | dict(kwargs)
        numbers = arguments_of(operator, given) if given.keys() <= operator.arguments.keys() else None
        return _OTHER if numbers is None else dataclasses.replace(_OTHER, op=name, numbers=numbers)
    return _OTHER


def array(tensor: torch.Tensor) -> Array:
    """Return a copy of `tensor` in NumPy."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return array(tensor.view(torch.int16)).view(numpy_dtype("bfloat16"))
    return np.array(tensor.numpy())
