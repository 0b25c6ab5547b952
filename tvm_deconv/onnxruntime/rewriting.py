"""ONNX models whose layers become single nodes, without what those layers alone needed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import MutableSequence, Sequence
from typing import Any

import onnx

from tvm_deconv.frontends.onnx import Place, graphs, used

#: The first version of the format in which initializers need not be inputs.
_FIRST_IR = 4


def replace(model: onnx.ModelProto, replacements: Sequence[tuple[Place, onnx.NodeProto]]) -> None:
    """Put nodes into `model` itself, each in the place of a layer; drop the constants that nothing else needs.

    Initializers that a layer has read are constants from then on: they are no inputs of the model any more.
    """
    read = {name for place, node in replacements for name in _put(place, node)}
    while _drop_unused(model, read):
        pass
    _keep(model.graph.input, [value.name not in read for value in model.graph.input])
    model.ir_version = max(model.ir_version, _FIRST_IR)
    for domain in {node.domain for _, node in replacements}:
        model.opset_import.append(onnx.helper.make_opsetid(domain, 1))


def _chain(place: Place) -> list[int]:
    """Return the places in the graph of the nodes that a layer stands for, its own and those that it has absorbed."""
    nodes = place.graph.node
    users: defaultdict[str, list[int]] = defaultdict(list)
    for index, node in enumerate(nodes):
        for tensor in node.input:
            users[tensor].append(index)
    first = next(index for index, node in enumerate(nodes) if place.node.output[0] in node.output)
    found, queue = {first}, [place.node.output[0]]
    while queue:
        tensor = queue.pop()
        after = users[tensor] if tensor != place.made else []
        queue += [name for index in after if index not in found for name in nodes[index].output]
        found.update(after)
    return sorted(found)


def _put(place: Place, node: onnx.NodeProto) -> set[str]:
    """Put `node` in the place of a layer; return the other tensors that the layer has read."""
    graph = place.graph
    first, *others = _chain(place)
    gone = [graph.node[index] for index in (first, *others)]
    inner = {tensor for old in gone for tensor in old.output if tensor != place.made}
    read = {tensor for old in gone for tensor in old.input} - inner - {place.node.input[0], ""}
    graph.node[first].CopyFrom(node)
    for index in reversed(others):
        del graph.node[index]
    _keep(graph.value_info, [value.name not in inner for value in graph.value_info])
    return read


def _drop_unused(model: onnx.ModelProto, names: set[str]) -> bool:
    """Drop initializers and nodes that make only those of `names` that nothing uses; tell whether there were any.

    What the nodes used joins `names`.
    """
    needed = {name for node in model.graph.node for name in used(node)} | {value.name for value in model.graph.output}
    unused, dropped = names - needed, False
    for graph in graphs(model.graph):
        alive = [not node.output or not unused.issuperset(node.output) for node in graph.node]
        names.update(name for node, lives in zip(graph.node, alive, strict=True) if not lives for name in node.input)
        dropped |= _keep(graph.node, alive)
        dropped |= _keep(graph.initializer, [tensor.name not in unused for tensor in graph.initializer])
    return dropped


def _keep(items: MutableSequence[Any], keep: Sequence[bool]) -> bool:
    """Delete the items of a repeated field that are not to be kept; tell whether there were any."""
    for index in reversed(range(len(items))):
        if not keep[index]:
            del items[index]
    return not all(keep)
