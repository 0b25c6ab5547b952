"""Transposed convolution as a registered operator, with gradients, for eager, compiled and exported programs.

Eager calls without gradients do not pass PyTorch's dispatcher. `packed` keeps the layers of the calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from tvm_deconv.errors import DeconvError, TensorError, TensorTypeError
from tvm_deconv.frontends.torch import dtype_name, memory_format
from tvm_deconv.problem import ACTIVATIONS, Epilogue, broadcast, one_of
from tvm_deconv.runtime.arrays import check_shape, check_type
from tvm_deconv.runtime.layer import Layer
from tvm_deconv.runtime.library import Library, epilogue_of
from tvm_deconv.torch import host
from tvm_deconv.torch.packed import Attributes, Parameters, bound, handle_of, packed_of, problem_of

_CONVOLUTIONS = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
_ACTIVATIONS = {name: record.torch_function.load() for name, record in ACTIVATIONS.items()}
#: The types that PyTorch has no transposed convolution for; its own sums would wrap around.
_SMALL_INTEGERS = (torch.int8, torch.uint8)
#: What stands for a symbolic extent where the attributes of a call are checked.
_SYMBOLIC = 4096


def conv_transpose(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    activation: str | Epilogue | None = None,
    library: Library,
    fallback: Literal["torch"] | None = None,
) -> Tensor:
    """Compute PyTorch's conv_transpose1d, 2d or 3d with an artifact of `library`; the rank of `weight` decides which.

    `input` is ``[N, Cin, *X]`` or ``[Cin, *X]``, `weight` ``[Cin, Cout/G, *K]``, `bias` ``[Cout]``. The result is
    contiguous, or `channels_last` if `input` is. An `input` that is neither, or that has no artifact of its format, is
    copied. `activation` is a name, or an `Epilogue` for one with parameters. Gradients are those of PyTorch's own
    operators. Under ``torch.func`` transforms and forward-mode derivatives PyTorch computes, and if a batch is empty.

    Tensors of a CUDA device need an artifact for it. If no artifact serves, the call raises NoArtifactError; with
    ``fallback="torch"`` PyTorch computes it, and every call on other devices, of other types, and under autocast.
    Raises ProblemError, TensorError.
    """
    rank = _rank(input, weight, bias)
    return called(
        input,
        weight,
        bias,
        *(None, None, None, None, 0.0),
        broadcast("stride", stride, rank, 1),
        broadcast("padding", padding, rank, 0),
        broadcast("output_padding", output_padding, rank, 0),
        broadcast("dilation", dilation, rank, 1),
        groups,
        _text(activation, bias is not None),
        handle_of(library),
        fallback is not None and bool(one_of("fallback", fallback, ("torch",))),
        torch.compiler.is_exporting() or not (torch.is_grad_enabled() and weight.requires_grad),
    )


def _rank(input: Tensor, weight: Tensor, bias: Tensor | None) -> int:
    """Return the number of spatial axes. Raises TensorTypeError for what is no tensor, TensorError for other ranks."""
    given = {"input": input, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise TensorTypeError(name, type(tensor).__qualname__, "must be a torch.Tensor")
    rank: int = weight.dim() - 2
    if not 1 <= rank <= 3:
        raise TensorError("weight", tuple(weight.shape), "rank must be 3, 4 or 5")
    if input.dim() not in (rank + 1, rank + 2):
        rule = f"rank must be {rank + 2}, or {rank + 1} without a batch, for this weight"
        raise TensorError("input", tuple(input.shape), rule)
    return rank


def called(input: Tensor, *arguments: Any) -> Tensor:
    """Compute a call, by the shortest way that is right; `input` may lack the batch axis.

    The arguments are those of the operator, behind the input.
    """
    if input.dim() == arguments[0].dim() - 1:
        return called(input.unsqueeze(0), *arguments).squeeze(0)
    fallback = arguments[-2]
    output: Tensor
    if is_eager(input):
        parameters, a, _ = parted(arguments)
        if is_transformed() or (fallback and is_autocast(input)):
            return by_torch(input, parameters, a)
        if not is_recorded(input, parameters):
            return computed(input, parameters, a, fallback=fallback)
    elif forward_ad._current_level >= 0 or torch.onnx.is_in_onnx_export() or (fallback and is_autocast(input)):
        return by_torch(input, *parted(arguments)[:2])
    output = _operator(input, *arguments)
    return output


def is_eager(input: Tensor) -> bool:
    """Tell whether a call computes now, with nobody watching its operators."""
    return (
        (type(input) is Tensor or type(input) is nn.Parameter)
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._get_tracing_state()
        and not torch.autograd._profiler_enabled()
    )


def is_transformed() -> bool:
    """Tell whether a transform of torch.func or a forward-mode derivative is under way."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def is_autocast(input: Tensor) -> bool:
    """Tell whether autocast is on where `input` lies."""
    if not torch._C._is_any_autocast_enabled():
        return False
    kind = input.device.type
    return bool(torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind))


def is_recorded(input: Tensor, others: Iterable[Tensor | None]) -> bool:
    """Tell whether gradients are recorded for one of the tensors."""
    if not torch.is_grad_enabled():
        return False
    return input.requires_grad or any(tensor is not None and tensor.requires_grad for tensor in others)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _text(activation: str | Epilogue | None, bias: bool) -> str:
    return str(epilogue_of(activation, bias))


def _convolved(input: Tensor, parameters: Parameters, a: Attributes) -> Tensor:
    """Compute the convolution alone by PyTorch's operator."""
    weight, bias = parameters[:2]
    convolve = _CONVOLUTIONS[weight.dim() - 3]
    numbers = (a.stride, a.padding, a.output_padding, a.groups, a.dilation)
    if input.dtype in _SMALL_INTEGERS:
        return convolve(input.long(), weight.long(), None if bias is None else bias.long(), *numbers).int()
    return convolve(input, weight, bias, *numbers)


def _tail(convolved: Tensor, affine: dict[str, Tensor], parameters: Parameters, a: Attributes) -> Tensor:
    """Compute batch normalisation and activation by PyTorch's operators; `affine` are gamma and beta."""
    if parameters.mean is not None:
        moments = (parameters.mean, parameters.variance, affine.get("gamma"), affine.get("beta"))
        convolved = functional.batch_norm(convolved, *moments, eps=a.epsilon)
    name, *numbers = _activation(a.epilogue)
    output: Tensor = _ACTIVATIONS[name](convolved, *numbers)
    return output


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _activation(text: str) -> tuple[Any, ...]:
    """Return the name of the activation of an epilogue, and its parameters."""
    epilogue = Epilogue.parse(text)
    return epilogue.activation, *epilogue.parameters.values()


def _affine(parameters: Parameters) -> dict[str, Tensor]:
    both = {"gamma": parameters.gamma, "beta": parameters.beta}
    return {name: tensor for name, tensor in both.items() if tensor is not None}


def by_torch(input: Tensor, parameters: Parameters, a: Attributes) -> Tensor:
    """Compute a call by PyTorch's operators."""
    return _tail(_convolved(input, parameters, a), _affine(parameters), parameters, a)


def computed(input: Tensor, parameters: Parameters, a: Attributes, *, fallback: bool, keep: bool = True) -> Tensor:
    """Compute a call by an artifact; by PyTorch if there is none, as `fallback` says, or if the batch is empty.

    The filter is packed for this call alone unless `keep` says to keep it.
    """
    layer: Layer | None = None
    if input.shape[0] and not (fallback and input.device.type not in ("cpu", "cuda")):
        if keep:
            layer = packed_of(parameters.weight).layer(input, a, parameters, lambda: parameters, fallback=fallback)
        else:
            layer = bound(input, parameters, a, fallback=fallback)
    if layer is None:
        return by_torch(input, parameters, a).contiguous(memory_format=memory_format(input))
    return by_layer(input, layer)


def by_layer(input: Tensor, layer: Layer) -> Tensor:
    """Compute a call by its layer."""
    last = layer.problem.data_format == "NXC"
    data = input.detach() if input.requires_grad else input
    data = data.movedim(1, -1) if last else data
    as_it_is = data.is_contiguous()
    data = data if as_it_is else data.contiguous()
    output: Tensor
    if not data.is_cpu:
        output = layer(data)
    elif data.dtype == torch.bfloat16:
        output = host.call(layer, data)
    else:  # plain arrays are checked fastest
        output = torch.from_numpy(host.call(layer, data.numpy()))
    output = output.movedim(-1, 1) if last else output
    return output if as_it_is else output.contiguous(memory_format=memory_format(input))


_SCHEMA = """(Tensor input, Tensor weight, Tensor? bias, Tensor? gamma, Tensor? beta, Tensor? mean, Tensor? variance,
float epsilon, int[] stride, int[] padding, int[] output_padding, int[] dilation, int groups, str epilogue,
str library, bool fallback, bool keep) -> Tensor"""


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "tvm_deconv::conv_transpose",
    mutates_args=(),
    schema=_SCHEMA,
    tags=(torch.Tag.flexible_layout,),  # TorchInductor's convolutions keep channels last, and so may the data here
)
def _operator(input: Tensor, *arguments: Any) -> Tensor:
    parameters, a, (fallback, keep) = parted(arguments)
    return computed(input, parameters, a, fallback=fallback, keep=keep)


def parted(arguments: Sequence[Any]) -> tuple[Parameters, Attributes, tuple[bool, bool]]:
    """Return the arguments of the operator after the first as tensors, attributes, and `fallback` and `keep`."""
    hashable: list[Any] = [tuple(value) if isinstance(value, list) else value for value in arguments[6:-2]]
    return Parameters(*arguments[:6]), Attributes(*hashable), (arguments[-2], arguments[-1])


@_operator.register_fake  # type: ignore[untyped-decorator]
def _fake(input: Tensor, *arguments: Any) -> Tensor:
    parameters, a, (fallback, _) = parted(arguments)
    try:
        _check(input, parameters, a)
    except DeconvError:
        if not fallback:
            raise
        return by_torch(input, parameters, a).contiguous(memory_format=memory_format(input))
    spatial = [
        (x - 1) * s - 2 * p + d * (k - 1) + more + 1
        for x, k, s, p, d, more in zip(
            input.shape[2:], parameters.weight.shape[2:], a.stride, a.padding, a.dilation, a.output_padding, strict=True
        )
    ]
    dtype = torch.int32 if input.dtype in _SMALL_INTEGERS else input.dtype
    output = input.new_empty((input.shape[0], parameters.weight.shape[1] * a.groups, *spatial), dtype=dtype)
    return output.contiguous(memory_format=memory_format(input))


def _check(input: Tensor, parameters: Parameters, a: Attributes) -> None:
    """Check what a call checks before an artifact is sought. Raises ProblemError, TensorError."""
    batch, *channels = input.shape[:2]
    free = [extent if isinstance(extent, int) else _SYMBOLIC for extent in (batch, *input.shape[2:])]
    problem = problem_of(input, parameters, a, [*free[:1], *map(int, channels), *free[1:]])
    check_type("filter", dtype_name(parameters.weight), [problem.dtype])
    if parameters.bias is not None:
        check_type("bias", dtype_name(parameters.bias), [problem.accumulate_dtype, problem.dtype])
        check_shape("bias", tuple(parameters.bias.shape), problem.bias_shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    input, *arguments = inputs
    parameters, ctx.attributes, _ = parted(arguments)
    ctx.save_for_backward(input, *parameters)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input, *tensors = ctx.saved_tensors
    parameters, a = Parameters(*tensors), ctx.attributes
    affine: dict[str, Tensor] = {}
    if parameters.mean is not None or Epilogue.parse(a.epilogue).activation != "none":
        convolved = _convolved(input, parameters, a)
        _, pull = torch.func.vjp(lambda x, affine: _tail(x, affine, parameters, a), convolved, _affine(parameters))
        grad, affine = pull(grad)
    sizes = None if parameters.bias is None else parameters.bias.shape
    numbers = (a.stride, a.padding, a.dilation, True, a.output_padding, a.groups, ctx.needs_input_grad[:3])
    grads = torch.ops.aten.convolution_backward(grad, input, parameters.weight, sizes, *numbers)
    return *grads, affine.get("gamma"), affine.get("beta"), *(None,) * 12


_operator.register_autograd(_backward, setup_context=_setup)
