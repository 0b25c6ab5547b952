"""LiteRT, which was TensorFlow Lite, with XNNPACK: TRANSPOSE_CONV with a constant filter, for ``N *X C``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tvm_deconv.bench.peers.common import Prepared, Task, Unsupported, as_plane, single
from tvm_deconv.problem import Array, Problem
from tvm_deconv.problem.testing import Operands

#: activation -> LiteRT's operator of it, and the options of that operator
_OPERATORS: dict[str, tuple[str, str]] = {
    "leaky_relu": ("LEAKY_RELU", "LeakyReluOptions"),
    "sigmoid": ("LOGISTIC", ""),
    "tanh": ("TANH", ""),
    "gelu": ("GELU", "GeluOptions"),
    "elu": ("ELU", ""),
    "hardswish": ("HARD_SWISH", ""),
}
#: What follows from the extents: SAME, or VALID and a slice
_SAME, _VALID = "SAME", "VALID"


def prepare(task: Task, arrays: Operands, threads: int) -> Prepared:
    """Write the model, and allocate its tensors."""
    problem = task.problem
    _check(problem)
    from ai_edge_litert.interpreter import Interpreter

    plane, of_plane = as_plane(problem, arrays)
    interpreter = Interpreter(model_content=_Model(plane, of_plane).content, num_threads=threads)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], of_plane.data)
    out = interpreter.get_output_details()[0]["index"]
    return Prepared(interpreter.invoke, lambda: interpreter.get_tensor(out).reshape(problem.output_shape))


def _check(problem: Problem) -> None:
    """Refuse what the operator does not have."""
    single(problem)
    if problem.data_format != "NXC":
        raise Unsupported("it computes N *X C alone")
    if problem.rank == 3:
        raise Unsupported("no transposed convolution of three axes")
    if problem.groups > 1:
        raise Unsupported("no groups")
    if any(dilation > 1 and kernel > 1 for dilation, kernel in zip(problem.dilations, problem.kernel, strict=True)):
        raise Unsupported("no dilations")
    activation, alpha = problem.epilogue.activation, problem.epilogue.alpha
    if activation not in ("none", "relu", "clip", "silu", *_OPERATORS) or (activation == "elu" and alpha != 1):
        raise Unsupported(f"no {problem.epilogue}")


class _Model:
    """A model that is made of operators, each of which takes the output of the one before it."""

    def __init__(self, problem: Problem, arrays: Operands) -> None:
        from ai_edge_litert import schema_py_generated as schema

        self._schema: Any = schema
        self._buffers = [schema.BufferT()]
        self._tensors: list[Any] = []
        self._operators: list[Any] = []
        self._codes: list[int] = []
        data = self._tensor(problem.data_shape)
        out = self._convolution(problem, arrays, data)
        out = self._activation(problem, out)
        graph = schema.SubGraphT()
        graph.tensors, graph.operators, graph.inputs, graph.outputs = self._tensors, self._operators, [data], [out]
        model = schema.ModelT()
        model.version, model.subgraphs, model.buffers = 3, [graph], self._buffers
        model.operatorCodes = [self._code(number) for number in self._codes]
        self.content = self._packed(model)

    def _packed(self, model: Any) -> bytes:
        import flatbuffers

        builder = flatbuffers.Builder(1 << 20)
        builder.Finish(model.Pack(builder), b"TFL3")
        return bytes(builder.Output())

    def _code(self, number: int) -> Any:
        code = self._schema.OperatorCodeT()
        code.builtinCode, code.deprecatedBuiltinCode = number, min(number, 127)
        # The versions since which it has a bias and an activation, and with none of them.
        code.version = 4 if number == self._schema.BuiltinOperator.TRANSPOSE_CONV else 1
        return code

    def _tensor(self, shape: Sequence[int], constant: Array | None = None) -> int:
        """Add a tensor and return its number."""
        tensor = self._schema.TensorT()
        tensor.shape, tensor.name = list(shape), f"tensor{len(self._tensors)}"
        types = self._schema.TensorType
        tensor.type = types.FLOAT32 if constant is None or constant.dtype == np.float32 else types.INT32
        if constant is not None:
            buffer = self._schema.BufferT()
            buffer.data = np.frombuffer(np.ascontiguousarray(constant).tobytes(), np.uint8)
            tensor.buffer = len(self._buffers)
            self._buffers.append(buffer)
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def _constant(self, values: Any, dtype: type = np.float32) -> int:
        array: Array = np.asarray(values, dtype)
        return self._tensor(array.shape, array)

    def _add(self, name: str, inputs: Sequence[int], shape: Sequence[int], options: str = "", **values: object) -> int:
        """Add an operator and return the number of its output."""
        number = getattr(self._schema.BuiltinOperator, name)
        if number not in self._codes:
            self._codes.append(number)
        operator = self._schema.OperatorT()
        operator.opcodeIndex, operator.inputs = self._codes.index(number), list(inputs)
        if options:
            operator.builtinOptionsType = getattr(self._schema.BuiltinOptions, options)
            operator.builtinOptions = getattr(self._schema, f"{options}T")()
            for field, value in values.items():
                setattr(operator.builtinOptions, field, value)
        operator.outputs = [self._tensor(shape)]
        self._operators.append(operator)
        return int(operator.outputs[0])

    def _convolution(self, problem: Problem, arrays: Operands, data: int) -> int:
        """Add the convolution and, if its pads are not those of SAME, the slice behind it."""
        padding, extents = _padding(problem)
        (filter,) = problem.canonical_filter(arrays.filter)
        whole = (problem.batch, *extents, problem.out_channels)
        inputs = [self._constant(whole, np.int32), self._constant(np.moveaxis(filter, (0, 1), (-1, 0))), data]
        if arrays.bias is not None:
            inputs.append(self._constant(arrays.bias))
        relu = problem.epilogue.activation == "relu"
        out = self._add(
            "TRANSPOSE_CONV",
            inputs,
            whole,
            "TransposeConvOptions",
            padding=getattr(self._schema.Padding, padding),
            strideH=problem.strides[0],
            strideW=problem.strides[1],
            fusedActivationFunction=getattr(self._schema.ActivationFunctionType, "RELU" if relu else "NONE"),
        )
        if extents == problem.output_spatial:
            return out
        shape = problem.output_shape
        places = [self._constant(numbers, np.int32) for numbers in ((0, *problem.pads_begin, 0), shape)]
        return self._add("SLICE", [out, *places], shape, "SliceOptions")

    def _activation(self, problem: Problem, out: int) -> int:
        epilogue, shape = problem.epilogue, problem.output_shape
        if epilogue.activation == "silu":
            return self._add("MUL", [out, self._add("LOGISTIC", [out], shape)], shape, "MulOptions")
        if epilogue.activation == "clip":
            out = self._add("MAXIMUM", [out, self._constant(epilogue.minimum)], shape, "MaximumMinimumOptions")
            return self._add("MINIMUM", [out, self._constant(epilogue.maximum)], shape, "MaximumMinimumOptions")
        if epilogue.activation not in _OPERATORS:
            return out
        name, options = _OPERATORS[epilogue.activation]
        values = {"alpha": epilogue.alpha} if epilogue.activation == "leaky_relu" else {}
        return self._add(name, [out], shape, options, **values)


def _padding(problem: Problem) -> tuple[str, tuple[int, ...]]:
    """Return SAME or VALID, and the extents of what it computes, of which a slice may be the output."""
    same, extents = True, []
    for uncropped, begin, extent, data, stride in zip(
        problem.uncropped_spatial,
        problem.pads_begin,
        problem.output_spatial,
        problem.data_spatial,
        problem.strides,
        strict=True,
    ):
        same &= -(-extent // stride) == data and begin == max(uncropped - extent, 0) // 2
        extents.append(max(uncropped, begin + extent))
        if extents[-1] - uncropped >= stride and not same:
            raise Unsupported(f"no output that is {extents[-1] - uncropped} longer for the stride {stride}")
    return (_SAME, problem.output_spatial) if same else (_VALID, tuple(extents))
