#!/usr/bin/env python3
"""Write the example layers of the operators' documents as OpenVINO IR: examples/upsampling_node*.xml and .bin.

Both have data 1x20x224x224, a 3x3 kernel, strides 2 and pads 1, hence an output of 447x447: ConvolutionBackpropData to
10 channels, and GroupConvolutionBackpropData in 4 groups to 8 channels. Filters are random, the same in every run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

_DATA = (1, 20, 224, 224)
_LAYERS = {
    "upsampling_node": ("ConvolutionBackpropData", (20, 10, 3, 3), (1, 10, 447, 447)),
    "upsampling_node_grouped": ("GroupConvolutionBackpropData", (4, 5, 2, 3, 3), (1, 8, 447, 447)),
}

_IR = """\
<?xml version="1.0"?>
<net name="{name}" version="11">
    <layers>
        <layer id="0" name="data" type="Parameter" version="opset1">
            <data shape="{data_shape}" element_type="f32"/>
            <output>
                {data_port}
            </output>
        </layer>
        <layer id="1" name="filter" type="Const" version="opset1">
            <data element_type="f32" shape="{filter_shape}" offset="0" size="{size}"/>
            <output>
                {filter_port}
            </output>
        </layer>
        <layer id="2" name="{name}" type="{operator}" version="opset1">
            <data strides="2,2" dilations="1,1" pads_begin="1,1" pads_end="1,1" output_padding="0,0"
                  auto_pad="explicit"/>
            <input>
                {data_port}
                {filter_input}
            </input>
            <output>
                {output_port}
            </output>
        </layer>
        <layer id="3" name="output" type="Result" version="opset1">
            <input>
                {result_port}
            </input>
        </layer>
    </layers>
    <edges>
        <edge from-layer="0" from-port="0" to-layer="2" to-port="0"/>
        <edge from-layer="1" from-port="0" to-layer="2" to-port="1"/>
        <edge from-layer="2" from-port="2" to-layer="3" to-port="0"/>
    </edges>
</net>
"""


def _port(number: int, shape: tuple[int, ...]) -> str:
    extents = "".join(f"<dim>{extent}</dim>" for extent in shape)
    return f'<port id="{number}" precision="FP32">{extents}</port>'


def main() -> None:
    """Write all files into a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = Path(__file__).parents[1] / "examples"
    parser.add_argument("--output", type=Path, default=target, help="default: examples/")
    output: Path = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    for seed, (name, (operator, filter_shape, output_shape)) in enumerate(_LAYERS.items()):
        filter = np.random.default_rng(seed).uniform(-1, 1, filter_shape).astype("<f4")
        text = _IR.format(
            name=name,
            operator=operator,
            data_shape=",".join(map(str, _DATA)),
            filter_shape=",".join(map(str, filter_shape)),
            size=filter.nbytes,
            data_port=_port(0, _DATA),
            filter_port=_port(0, filter_shape),
            filter_input=_port(1, filter_shape),
            output_port=_port(2, output_shape),
            result_port=_port(0, output_shape),
        )
        (output / f"{name}.xml").write_text(text)
        (output / f"{name}.bin").write_bytes(filter.tobytes())


if __name__ == "__main__":
    main()
