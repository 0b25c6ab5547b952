"""Quantized graphs of PyTorch, as `convert_pt2e` writes them: their layers become quantized problems."""

import numpy as np
import pytest

import tvm_deconv as td
from tvm_deconv.frontends import scan
from tvm_deconv.problem.reference import reference

torch = pytest.importorskip("torch")
pytest.importorskip("torch.ao.quantization.fx._decomposed")  # which registers the operators
nn, ops = torch.nn, torch.ops.quantized_decomposed
RANGES = {torch.uint8: (0, 255), torch.int8: (-128, 127)}
DATA, RESULT = (0.03, 100), (0.07, 3)


class Quantized(nn.Module):
    """A layer between dequantization and quantization; `options` change what stands in the graph."""

    def __init__(self, **options):
        super().__init__()
        self.options = {"data": torch.uint8, "result": torch.uint8, "axis": 1, "groups": 1, "limits": None} | options
        generator = torch.Generator().manual_seed(5)
        channels = 6 // self.options["groups"]
        self.register_buffer(
            "integers", torch.randint(-127, 128, (4, channels, 4, 4), generator=generator).to(torch.int8)
        )
        count = self.integers.shape[self.options["axis"]]
        self.register_buffer("scales", torch.rand(count, generator=generator) / 100 + 0.01)
        self.register_buffer("zeros", torch.zeros(count, dtype=torch.int64))
        units = self.scales.repeat(self.options["groups"]) * DATA[0] if self.options["axis"] == 1 else torch.ones(6)
        self.bias = nn.Parameter(torch.randint(-500, 500, (6,), generator=generator) * units)

    def forward(self, x):
        o = self.options
        kind, result = o["data"], o["result"]
        limits, many = RANGES[kind], o["limits"] or RANGES.get(result)
        x = ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *DATA, *limits, kind), *DATA, *limits, kind)
        w = ops.dequantize_per_channel(self.integers, self.scales, self.zeros, o["axis"], -127, 127, torch.int8)
        if o.get("changed"):
            w = w * x.mean()
        y = torch.relu(nn.functional.conv_transpose2d(x, w, self.bias, 2, 1, groups=o["groups"]))
        if result is None:
            return y
        y = ops.quantize_per_tensor(y, *RESULT, *many, result)
        return y if o.get("stored") else ops.dequantize_per_tensor(y, *RESULT, *many, result)


def stored(x, kind):
    """The integers that the graph makes of its input."""
    return ops.quantize_per_tensor(x, *DATA, *RANGES[kind], kind).numpy()


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize(
    ("options", "types"),
    [
        ({}, "uint8.int8.uint8"),
        ({"data": torch.int8, "result": torch.int8}, "int8.int8.int8"),
        ({"groups": 2, "stored": True}, "uint8.int8.uint8"),
        ({"result": None}, "uint8.int8.float32"),
    ],
)
def test_layers_on_integers(options, types, exported):
    """What the graph computes, but for steps of rounding; an exported program refuses eval() and needs none."""
    module, x = Quantized(**options).eval(), 2 * torch.randn(2, 4, 5, 6, generator=torch.Generator().manual_seed(6))
    whole = torch.export.export(module, (x,)).module() if exported else module
    (layer,) = scan(whole, [x])
    assert f"{layer.problem.dtype}.{layer.problem.quantization}" == types
    assert layer.problem.epilogue == td.Epilogue(True, "relu")
    with torch.no_grad():
        expected = module(x)
    kind, result = module.options["data"], module.options["result"]
    got = reference(layer.problem, stored(x, kind), layer.filter, layer.bias, layer.scaling)
    if result is None:
        assert np.abs(got - expected.numpy()).max() < 1e-5 * np.abs(got).max()
    else:
        steps = expected.numpy() if options.get("stored") else expected.numpy() / RESULT[0] + RESULT[1]
        assert np.abs(got - steps).max() < 1.01
        assert np.mean(np.abs(got - steps) > 0.01) < 0.01
        assert got.std() > 10


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"axis": 0}, "its filter has scales along another axis"),
        ({"limits": (0, 127)}, "its result takes a part of the numbers of uint8"),
        ({"changed": True}, "its filter must be constant integers with a scale, one or one for each output channel"),
    ],
)
def test_reasons_to_stay_in_float32(options, reason):
    check_reason(Quantized(**options).eval(), reason)


@pytest.mark.parametrize(
    ("numbers", "value", "reason"),
    [
        ("scales", 0.0, "filter_scale=0.0: must be from 2**-60 to 2**40"),
        ("scales", -1.0, "filter_scale=-1.0: must be from 2**-60 to 2**40"),
        ("scales", np.nan, "filter_scale=nan: must be from 2**-60 to 2**40"),
        ("scales", np.inf, "filter_scale=inf: must be from 2**-60 to 2**40"),
        ("zeros", 300, "filter_zero_point=428: must be from 0 to 255, the range of uint8"),
        ("zeros", 2**16, "filter_zero_point=65664: must be from 0 to 255, the range of uint8"),
        ("zeros", 2**40, "filter_zero_point=1099511627904: must be from 0 to 255, the range of uint8"),
        ("bias", np.nan, "bias=nan: must be int32 in units of data and filter"),
        ("bias", 1e30, "bias=1.0000000150474662e+30: must be int32 in units of data and filter"),
    ],
)
def test_numbers_that_break_a_rule(numbers, value, reason):
    module = Quantized().eval()
    getattr(module, numbers).data.fill_(value)
    check_reason(module, reason)


@pytest.mark.parametrize(
    ("name", "numbers", "reason"),
    [
        ("DATA", (-0.03, 100), "data_scale=-0.03: must be from 2**-60 to 2**40"),
        ("DATA", (np.nan, 100), "data_scale=nan: must be from 2**-60 to 2**40"),
        ("DATA", (0.03, 300), "data_zero_point=300: must be from 0 to 255, the range of uint8"),
        ("RESULT", (np.inf, 3), "output_scale=inf: must be from 2**-60 to 2**40"),
        ("RESULT", (0.07, -1), "output_zero_point=-1: must be from 0 to 255, the range of uint8"),
    ],
)
def test_numbers_of_data_and_results_that_break_a_rule(name, numbers, reason, monkeypatch):
    monkeypatch.setitem(globals(), name, numbers)
    check_reason(Quantized().eval(), reason)


def check_reason(module, reason):
    (layer,) = scan(module, [torch.randn(2, 4, 5, 6)])
    assert (layer.problem.dtype, layer.scaling) == ("float32", None)
    assert layer.note == f"as float32: its data are dequantized: {reason}"


def test_models_swap_them_in_float32():
    """A call in their place does not see the integers."""
    x = torch.randn(2, 4, 5, 6)
    (problem,) = td.torch.problems(Quantized().eval(), [x])
    assert problem == td.Problem.from_torch((2, 4, 5, 6), (4, 6, 4, 4), stride=2, padding=1, epilogue=td.Epilogue(True))
