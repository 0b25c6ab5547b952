"""Named values of activations: out of the code generator's sight, and the same code."""

import pytest
import tvm
from support.kernels import compile_kernel

import tvm_deconv as td
from tvm_deconv.bench.layers import in_type
from tvm_deconv.problem import ACTIVATIONS, Epilogue
from tvm_deconv.targets import CPU_TARGETS

V3 = CPU_TARGETS["x86-64-v3"]
SMALL = td.Problem(1, 1, 2, 8, (6,), (2,), (2,), (1,), (0,), (12,), data_format="NXC")
PARAMETERS = {"clip": {"minimum": -1.0, "maximum": 2.0}, "leaky_relu": {"alpha": 0.1}, "elu": {"alpha": 0.3}}


@tvm.ir.instrument.pass_instrument
class Names:
    """The names within expressions of each function, before and after the pass that makes arrays of them."""

    def __init__(self):
        self.before = self.after = 0

    def run_before_pass(self, module, info):
        if info.name == "tvm_deconv.ValuesInArrays":
            self.before += module.script().count("T.Let(")

    def run_after_pass(self, module, info):
        if info.name == "tvm_deconv.ValuesInArrays":
            self.after += module.script().count("T.Let(")


def of_activation(problem, name):
    return problem.replace(epilogue=Epilogue(bias=True, activation=name, **PARAMETERS.get(name, {})))


def code(compiled):
    return [line for line in compiled.mod.inspect_source("asm").splitlines() if line.startswith("\tv")]


def names_of(problem):
    names = Names()
    with tvm.transform.PassContext(instruments=[names]):
        compile_kernel(problem, V3)
    return names


@pytest.mark.parametrize("name", sorted({*ACTIVATIONS} - {"none"}))
def test_the_code_is_the_same(name):
    kernel, ours = compile_kernel(of_activation(SMALL, name), V3)
    usual = tvm.compile(tvm.IRModule(kernel.functions), target=tvm.target.Target(V3.llvm))
    assert len(code(ours)) > 20
    assert code(ours) == code(usual)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("channels", [1, 8])
def test_no_name_is_left_to_the_code_generator(dtype, data_format, channels):
    problem = of_activation(SMALL.replace(out_channels=channels, dtype=dtype, data_format=data_format), "mish")
    names = names_of(problem)
    assert names.after == 0
    assert (names.before > 0) == (dtype != "float64")  # which calls the C library


@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_no_name_of_requantization_is_left_either(data_format):
    names = names_of(in_type(of_activation(SMALL.replace(data_format=data_format), "tanh"), "uint8.int8.uint8"))
    assert names.after == 0 < names.before
