"""The texts that users read. Each names the attribute, its value and the rule."""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from tvm_deconv import (
    ArtifactError,
    BuildError,
    CompilerNotFound,
    DeconvError,
    Epilogue,
    IntegrityError,
    ManifestError,
    NoArtifactError,
    Problem,
    ProblemError,
    RemoteError,
    SourceError,
    TensorError,
    TensorTypeError,
    compile,
    from_onednn,
    from_onnx,
    from_openvino,
    from_torch,
    load,
    reference,
)
from tvm_deconv.tuning import tune
from tvm_deconv.tuning.remeasure import remeasure


def openvino(data=(1, 2, 5), filter=(2, 3, 4), **attributes):
    return from_openvino(data, filter, **{"strides": (3,)} | attributes)


def onednn(data=(1, 5, 2), filter=(4, 3, 2), **attributes):
    return from_onednn(data, filter, **{"strides": (3,)} | attributes)


def onnx(data=(1, 2, 5), filter=(2, 3, 4), **attributes):
    return from_onnx(data, filter, **{"strides": (3,)} | attributes)


def torch(data=(1, 2, 5), filter=(2, 3, 4), **attributes):
    return from_torch(data, filter, **{"stride": 3} | attributes)


def problem(**changes):
    return openvino().replace(**changes)


FREE = 'where calls decide it, it is "any", and a spatial one may be a list of buckets'


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: openvino(pads_begin=(9,), pads_end=(8,)),
            "pads_begin+pads_end=(17,): must leave an output of extents at least 0, not (-1,)",
        ),
        (
            lambda: openvino((1, 2, 0)),
            "data_shape=(1, 2, 0): must have channels and spatial extents of at least 1 (NCX)",
        ),
        (lambda: openvino((-1, 2, 5)), f"data_shape=(-1, 2, 5): every element must be at least 0; {FREE}"),
        (lambda: openvino((1, 2, "X")), f"data_shape=(1, 2, 'X'): every element must be an integer; {FREE}"),
        (lambda: openvino(([1, 2], 2, 5)), f"data_shape=([1, 2], 2, 5): every element must be an integer; {FREE}"),
        (lambda: torch((None, 2, 5)), f"data_shape=(None, 2, 5): every element must be an integer; {FREE}"),
        (
            lambda: onnx((1, "any", 5)),
            "data_shape=(1, 'any', 5): axis 1 (NCX) must be a number: the channels are never free",
        ),
        (
            lambda: onednn(("any", 5, None)),
            "data_shape=('any', 5, None): axis 2 (NXC) must be a number: the channels are never free",
        ),
        (
            lambda: openvino((1, 0, 5), (0, 3, 4)),
            "data_shape=(1, 0, 5): must have channels and spatial extents of at least 1 (NCX)",
        ),
        (lambda: openvino((1, 2)), "data_shape=(1, 2): must have rank 3, 4 or 5"),
        (lambda: openvino((1,) * 6, (1,) * 6), "data_shape=(1, 1, 1, 1, 1, 1): must have rank 3, 4 or 5"),
        (lambda: openvino(5), "data_shape=5: must be a sequence of integers"),
        (lambda: openvino("125"), "data_shape='125': must be a sequence of integers"),
        (lambda: openvino((1, 2, 5.0)), "data_shape=(1, 2, 5.0): every element must be an integer"),
        (lambda: openvino((1, 2, True)), "data_shape=(1, 2, True): every element must be an integer, not a bool"),
        (
            lambda: openvino(filter=(2, 3)),
            "filter_shape=(2, 3): must have rank 3, or 4 with groups, for data of rank 3",
        ),
        (
            lambda: openvino(filter=(2, 3, 4, 5, 6)),
            "filter_shape=(2, 3, 4, 5, 6): must have rank 3, or 4 with groups, for data of rank 3",
        ),
        (lambda: openvino(filter=(3, 3, 4)), "filter_shape=(3, 3, 4): axis 0 must be the 2 channels of the data"),
        (
            lambda: openvino(filter=(2, 2, 3, 4)),
            "filter_shape=(2, 2, 3, 4): groups times input channels must be the 2 channels of the data",
        ),
        (lambda: openvino(filter=(2, 3, 0)), "filter_shape=(2, 3, 0): every element must be at least 1"),
        (lambda: openvino(strides=(0,)), "strides=(0,): every element must be at least 1"),
        (lambda: openvino(strides=(1, 1)), "strides=(1, 1): must have one element per spatial axis, 1 here"),
        (lambda: openvino(strides=3), "strides=3: must be a sequence of integers"),
        (lambda: openvino(strides="1"), "strides='1': must be a sequence of integers"),
        (lambda: openvino(strides={3}), "strides={3}: must be a sequence of integers"),
        (lambda: openvino(strides={3: 1}), "strides={3: 1}: must be a sequence of integers"),
        (lambda: problem().at(5), "data_shape=5: must be (1, 2, 5)"),
        (lambda: problem().at("125"), "data_shape='125': must be (1, 2, 5)"),
        (lambda: problem().serves(None), "problem=None: must be a Problem"),
        (lambda: openvino(strides=(2**63,)), "strides=(9223372036854775808,): every element must fit in 64 bits"),
        (lambda: openvino(dilations=(0,)), "dilations=(0,): every element must be at least 1"),
        (lambda: openvino(dilations=(1, 1)), "dilations=(1, 1): must have one element per spatial axis, 1 here"),
        (lambda: openvino(pads_begin=(-1,)), "pads_begin=(-1,): every element must be at least 0"),
        (lambda: openvino(pads_begin=(1, 1)), "pads_begin=(1, 1): must have one element per spatial axis, 1 here"),
        (lambda: openvino(pads_end=(-1,)), "pads_end=(-1,): every element must be at least 0"),
        (lambda: openvino(pads_end=(1, 1)), "pads_end=(1, 1): must have one element per spatial axis, 1 here"),
        (lambda: openvino(output_padding=(-1,)), "output_padding=(-1,): every element must be at least 0"),
        (
            lambda: openvino(output_padding=(0, 0)),
            "output_padding=(0, 0): must have one element per spatial axis, 1 here",
        ),
        (lambda: openvino(output_shape=(-1,)), "output_shape=(-1,): every element must be at least 0"),
        (
            lambda: openvino(output_shape=(1, 3, 16)),
            "output_shape=(1, 3, 16): must have one element per spatial axis, 1 here",
        ),
        (lambda: openvino(output_shape=(9.5,)), "output_shape=(9.5,): every element must be an integer"),
        (lambda: openvino(output_shape=np.array([9.0])), "output_shape=array([9.]): every element must be an integer"),
        (lambda: openvino(output_shape=np.array(9)), "output_shape=array(9): must be a sequence of integers"),
        (lambda: openvino(output_shape=(True,)), "output_shape=(True,): every element must be an integer, not a bool"),
        (
            lambda: openvino(auto_pad="same"),
            "auto_pad='same': must be one of none, notset, explicit, valid, same_upper, same_lower, in any case",
        ),
        (
            lambda: openvino(auto_pad=1),
            "auto_pad=1: must be one of none, notset, explicit, valid, same_upper, same_lower, in any case",
        ),
        (lambda: openvino(output_shape_rule="docs"), "output_shape_rule='docs': must be one of runtime, formula"),
        (lambda: openvino(data_format="NHWC"), "data_format='NHWC': must be one of NCX, NXC"),
        (
            lambda: openvino(dtype="bool"),
            "dtype='bool': must be one of float32, float64, float16, bfloat16, int8, uint8, int32",
        ),
        (
            lambda: openvino(dtype="f32"),
            "dtype='f32': must be one of float32, float64, float16, bfloat16, int8, uint8, int32",
        ),
        (
            lambda: openvino(dtype="int16"),
            "dtype='int16': must be one of float32, float64, float16, bfloat16, int8, uint8, int32",
        ),
        (
            lambda: openvino(dtype=np.dtype("float32")),
            "dtype=dtype('float32'): must be one of float32, float64, float16, bfloat16, int8, uint8, int32",
        ),
        (
            lambda: openvino(dtype=np.float32),
            "dtype=<class 'numpy.float32'>: must be one of float32, float64, float16, bfloat16, int8, uint8, int32",
        ),
        (
            lambda: openvino(epilogue="relu"),
            "epilogue='relu': must be an Epilogue, which Epilogue.parse makes of a text",
        ),
        (lambda: openvino(epilogue=None), "epilogue=None: must be an Epilogue, which Epilogue.parse makes of a text"),
        (
            lambda: openvino(dtype="int8", quantization="int8.int8"),
            "quantization='int8.int8': must be a Quantization, which Quantization.parse makes of a text, or None",
        ),
        (
            lambda: openvino((2**40, 2**10, 2**10), (2**10, 1, 1)),
            "data_shape=(1099511627776, 1024, 1024): must have a size in bytes that fits in 64 bits",
        ),
        (
            lambda: openvino(filter=(2, 3, 2**62)),
            "filter_shape=(2, 3, 4611686018427387904): must have a size in bytes that fits in 64 bits",
        ),
        (
            lambda: openvino(strides=(2**62,)),
            "output_spatial=(18446744073709551620,): every element must fit in 64 bits",
        ),
        (lambda: onednn(groups=0), "groups=0: must be at least 1"),
        (lambda: onednn(groups=3), "groups=3: must divide the 2 channels of the data"),
        (lambda: onednn(groups=1.0), "groups=1.0: must be an integer"),
        (lambda: onednn(filter_format="GIOX"), "filter_format='GIOX': must be one of XIO, OIX, XOI, IOX"),
        (lambda: onednn(filter=(4, 3, 3)), "filter_shape=(4, 3, 3): axis 2 of XIO must be the 2 channels of the data"),
        (
            lambda: onednn(filter=(2, 3, 4), filter_format="OIX", data_format="NCX", data=(1, 3, 5)),
            "filter_shape=(2, 3, 4): axis 0 of OIX must be the 3 channels of the data",
        ),
        (lambda: onednn(filter=(2, 3)), "filter_shape=(2, 3): must have rank 3, that of the data"),
        (lambda: onnx(group=3), "group=3: must divide the 2 channels of the data"),
        (lambda: onnx(pads=(1,)), "pads=(1,): must have 2 elements: the begins and then the ends of 1 axes"),
        (lambda: onnx(pads=(1, -1)), "pads=(1, -1): every element must be at least 0"),
        (lambda: onnx(pads=(9, 8)), "pads=(9, 8): must leave an output of extents at least 0, not (-1,)"),
        (lambda: onnx(kernel_shape=(3,)), "kernel_shape=(3,): must be that of the filter, (4,)"),
        (lambda: onnx(kernel_shape=(4, 4)), "kernel_shape=(4, 4): must have one element per spatial axis, 1 here"),
        (
            lambda: onnx(auto_pad="SAME"),
            "auto_pad='SAME': must be one of none, notset, explicit, valid, same_upper, same_lower, in any case",
        ),
        (
            lambda: onnx(output_shape=(1, 3, 16)),
            "output_shape=(1, 3, 16): must have one element per spatial axis, 1 here",
        ),
        (
            lambda: torch(output_padding=3),
            "output_padding=(3,): must be smaller than the stride or the dilation of its axis",
        ),
        (lambda: torch(output_size=(15,)), "output_size=(15,): must lie between (16,) and (18,)"),
        (lambda: torch(output_size=(19,)), "output_size=(19,): must lie between (16,) and (18,)"),
        (lambda: torch(output_size=(1, 19)), "output_size=(1, 19): must have 1 or 3 elements"),
        (lambda: torch(padding=9), "padding=(9,): must leave an output of extents at least 0, not (-2,)"),
        (lambda: torch(padding=(1, 2)), "padding=(1, 2): must have one element per spatial axis, 1 here"),
        (lambda: torch(padding="same"), "padding='same': must be a sequence of integers"),
        (lambda: torch(stride=0), "stride=0: must be at least 1"),
        (lambda: torch(stride=()), "stride=(): must have one element per spatial axis, 1 here"),
        (lambda: torch(stride=1.5), "stride=1.5: must be an integer"),
        (lambda: torch((2,) * 6, (2,) * 6), "filter_shape=(2, 2, 2, 2, 2, 2): must have rank 3, 4 or 5"),
        (lambda: torch(filter=(2, 3)), "filter_shape=(2, 3): must have rank 3, 4 or 5"),
        (lambda: torch(data=(2, 3, 4, 5)), "data_shape=(2, 3, 4, 5): must have rank 3, or 2 without a batch"),
        (lambda: torch(data=(2,)), "data_shape=(2,): must have rank 3, or 2 without a batch"),
        (
            lambda: torch(output_size=(0,), padding=9),
            "padding=(9,): must leave an output of extents at least 0, not (-2,)",
        ),
        (lambda: problem(batch=-1), "batch=-1: must be at least 0"),
        (lambda: problem(batch=True), "batch=True: must be an integer, not a bool"),
        (lambda: problem(batch=None), "batch=None: must be an integer"),
        (lambda: problem(data_spatial=()), "data_spatial=(): must have 1, 2 or 3 axes"),
        (lambda: problem(data_spatial=(1, 1, 1, 1)), "data_spatial=(1, 1, 1, 1): must have 1, 2 or 3 axes"),
        (lambda: problem(kernel=(1, 2)), "kernel=(1, 2): must have one element per spatial axis, 1 here"),
        (lambda: problem(filter_format="OIHW"), "filter_format='OIHW': must be one of IOX, GIOX, XIO, OIX, XOI"),
        (lambda: Epilogue(bias=1), "bias=1: must be True or False: the values come with the filter, at bind"),
        (
            lambda: Epilogue(bias=np.zeros(3)),
            "bias=array([0., 0., 0.]): must be True or False: the values come with the filter, at bind",
        ),
        (
            lambda: Epilogue(activation="swish"),
            "activation='swish': must be one of none, relu, leaky_relu, sigmoid, tanh, gelu, silu, clip, "
            "elu, hardswish, mish, softplus",
        ),
        (lambda: Epilogue(activation="leaky_relu", alpha=float("nan")), "alpha=nan: must be finite"),
        (lambda: Epilogue(activation="leaky_relu", alpha="0.1"), "alpha='0.1': must be a real number"),
        (
            lambda: Epilogue(activation="clip", minimum=2, maximum=1),
            "minimum=2.0: must be at most maximum=1.0, neither NaN",
        ),
        (
            lambda: Epilogue(activation="clip", minimum=float("nan")),
            "minimum=nan: must be at most maximum=6.0, neither NaN",
        ),
        (
            lambda: problem(dtype="int8", epilogue=Epilogue(activation="tanh")),
            "activation='tanh': must be one of none, relu, clip",
        ),
        (
            lambda: problem(dtype="uint8", epilogue=Epilogue(activation="clip", maximum=0.5)),
            "maximum=0.5: must be an integer of 32 bits where dtype=uint8",
        ),
        (
            lambda: problem(dtype="uint8", epilogue=Epilogue(activation="clip", maximum=float("inf"))),
            "maximum=inf: must be an integer of 32 bits where dtype=uint8",
        ),
        (
            lambda: problem(dtype="int8", epilogue=Epilogue(activation="clip", minimum=-(2**33))),
            "minimum=-8589934592.0: must be an integer of 32 bits where dtype=int8",
        ),
        (lambda: Problem.from_key("nonsense"), "key='nonsense': must be the printed key of a problem"),
        (
            lambda: Problem.from_key(problem().key.replace("n1", "n01")),
            f"key={problem().key.replace('n1', 'n01')!r}: must be written {problem().key}",
        ),
        (lambda: Epilogue.parse("relu("), "epilogue='relu(': must look like none, bias, relu or bias+leaky_relu(0.1)"),
        (lambda: Epilogue.parse("bias+none"), "epilogue='bias+none': must be written bias"),
        (
            lambda: Epilogue.parse("softmax"),
            "activation='softmax': must be one of none, relu, leaky_relu, sigmoid, tanh, gelu, silu, clip, "
            "elu, hardswish, mish, softplus",
        ),
        (lambda: Epilogue.parse("clip(a,b)"), "epilogue='clip(a,b)': what stands in parentheses must be numbers"),
        (lambda: Epilogue.parse("clip(1.0)"), "epilogue='clip(1.0)': clip takes minimum and maximum, or no numbers"),
        (
            lambda: Epilogue.parse("elu(1.0,2.0)"),
            "epilogue='elu(1.0,2.0)': elu takes alpha, or no numbers",
        ),
        (lambda: Epilogue.parse("relu(1.0)"), "epilogue='relu(1.0)': relu takes no numbers"),
        (lambda: Epilogue.parse("elu(,)"), "epilogue='elu(,)': must be written elu"),
        (lambda: Epilogue.parse("elu(1)"), "epilogue='elu(1)': must be written elu(1.0)"),
        (
            lambda: Problem.from_key(f"{openvino().key.removesuffix('none')}elu"),
            f"key='{openvino().key.removesuffix('none')}elu': must be written "
            f"{openvino().key.removesuffix('none')}elu(1.0)",
        ),
        (lambda: Epilogue.parse(3), "epilogue=3: must look like none, bias, relu or bias+leaky_relu(0.1)"),
    ],
)
def test_problem_errors(call, text):
    with pytest.raises(ProblemError) as caught:
        call()
    assert str(caught.value) == text
    assert text.startswith(f"{caught.value.attribute}=")
    assert text.endswith(f": {caught.value.rule}")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda _: reference(5, np.ones(1), np.ones(1)), "problem=5: must be a Problem"),
        (lambda root: load(root, digest=5), "digest=5: must be the text of a Library.digest"),
        (lambda root: compile("x", output=root), "problems='x': must be a sequence of Problem"),
        (lambda root: compile([], output=root, algorithms="dot"), "algorithms='dot': must be a sequence of names"),
        (
            lambda root: compile([], output=root, logs="missing"),
            "logs='missing': must be a directory of tuning logs; trials would make one",
        ),
        (lambda root: compile([], output=root, on_outcome=5), "on_outcome=5: must be a function, or None"),
        (lambda root: compile([], output=root, on_trial=5), "on_trial=5: must be a function, or None"),
        (lambda root: tune([], logs=root, on_trial=5), "on_trial=5: must be a function, or None"),
        (lambda root: remeasure(root, "native", on_problem=5), "on_problem=5: must be a function, or None"),
        (lambda root: remeasure(root, "native", seed=-1), "seed=-1: must be at least 0"),
        (lambda root: remeasure(root, "native", threads=0), "threads=0: must be at least 1"),
        (lambda root: remeasure(root, "native", timeout=0), "timeout=0: must be a number of seconds, more than 0"),
        (lambda root: remeasure(root, 5), "target=5: must be a name or a sequence of names"),
        (lambda _: remeasure(5, "native"), "logs=5: must be a path"),
    ],
)
def test_arguments_of_functions(call, text, tmp_path):
    with pytest.raises(ProblemError) as caught:
        call(tmp_path)
    assert str(caught.value) == text


def test_tensor_errors():
    p = problem()
    data, filter = np.ones(p.data_shape), np.ones(p.filter_shape)
    with pytest.raises(TensorError) as caught:
        reference(p, data[:, :1], filter)
    assert str(caught.value) == "data=(1, 1, 5): must have shape (1, 2, 5)"
    with pytest.raises(TensorTypeError) as caught:
        reference(p, data, filter.astype(bool))
    assert str(caught.value) == "filter='bool': must hold real numbers, since the type here is float32"
    with pytest.raises(TensorTypeError) as caught:
        reference(p, [[1], [2, 3]], filter)
    assert str(caught.value).startswith("data='list': must be readable as a NumPy array: ")
    with pytest.raises(TensorError) as caught:
        reference(p, data, filter, np.ones(3))
    assert str(caught.value) == "bias='an array': must be left out: the epilogue has none"
    with pytest.raises(TensorError) as caught:
        reference(p.replace(epilogue=Epilogue(True)), data, filter)
    assert str(caught.value) == "bias=None: must be given: the epilogue has one"


TREE = {
    ProblemError: (DeconvError, ValueError),
    TensorError: (DeconvError, ValueError),
    TensorTypeError: (TensorError, TypeError),
    SourceError: (DeconvError, ValueError),
    BuildError: (DeconvError, RuntimeError),
    CompilerNotFound: (BuildError,),
    RemoteError: (DeconvError, RuntimeError),
    ArtifactError: (DeconvError, RuntimeError),
    ManifestError: (ArtifactError,),
    IntegrityError: (ArtifactError,),
    NoArtifactError: (DeconvError, LookupError),
}


@pytest.mark.parametrize(("kind", "parents"), TREE.items())
def test_the_tree(kind, parents):
    assert kind.__bases__ == parents


ERRORS = [
    (ProblemError("strides", (0,), "must be at least 1"), "strides=(0,): must be at least 1"),
    (TensorTypeError("data", "bool", "must be float32"), "data='bool': must be float32"),
    (SourceError("model", Path("a.xml"), "must be XML"), "model=a.xml: must be XML"),
    (ArtifactError("d/a.so", "must exist"), "path=d/a.so: must exist"),
    (ManifestError("d/a.json", "is newer", "format", 2), "format=2: is newer (in d/a.json)"),
    (NoArtifactError("n1"), "problem=n1: no artifact serves it: there are no candidates"),
    (NoArtifactError("n1", ["a: no", "b: no"]), "problem=n1: no artifact serves this problem\n  a: no\n  b: no"),
]


@pytest.mark.parametrize(("error", "text"), ERRORS)
def test_texts_survive_pickling(error, text):
    assert str(error) == text
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == text
    assert vars(again) == vars(error)


def test_long_values_are_cut():
    with pytest.raises(ProblemError, match=r"^maximum=1(0{116})\.\.\.: must fit in a float$"):
        Epilogue(activation="clip", maximum=10**400)


def test_extras_that_texts_name_are_there():
    root = Path(__file__).parents[2]
    settings = (root / "pyproject.toml").read_text()
    declared = set(re.findall(r"^(\w+) = \[", settings.partition("[project.optional-dependencies]")[2], re.MULTILINE))
    texts = [settings, *(path.read_text() for path in (*root.glob("docs/*.md"), *root.glob("tvm_deconv/**/*.py")))]
    named = {
        extra for text in texts for found in re.findall(r"tvm_deconv\[([\w,]+)\]", text) for extra in found.split(",")
    }
    assert {"compile", "cuda", "sign"} <= named
    assert named <= declared
