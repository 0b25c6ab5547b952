"""ONNX models whose layers become single nodes, without what those layers alone needed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, MutableSequence, Sequence
from typing import Any

import onnx

from tvm_deconv.frontends.onnx import Place, graphs, used

#: The first version of the format in which initializers need not be inputs.
_FIRST_IR = 4


def replace(model: onnx.ModelProto, replacements: Sequence[tuple[Place, onnx.NodeProto]]) -> None:
    """Put nodes into `model` itself, each in the place of a layer; drop the constants that nothing else needs.

    Initializers that a layer has read are constants from then on: they are no inputs of the model any more.
    """
    stored = {tensor.name for tensor in model.graph.initializer}
    by_graph: defaultdict[int, list[tuple[Place, onnx.NodeProto]]] = defaultdict(list)
    for place, node in replacements:
        by_graph[id(place.graph)].append((place, node))
    read = {name for group in by_graph.values() for name in _put(group[0][0].graph, group)}
    while _drop_unused(model, read):
        pass
    _keep(model.graph.input, [value.name not in read & stored for value in model.graph.input])
    model.ir_version = max(model.ir_version, _FIRST_IR)
    for domain in {node.domain for _, node in replacements if node.domain}:
        model.opset_import.append(onnx.helper.make_opsetid(domain, 1))


def _put(graph: onnx.GraphProto, replacements: Sequence[tuple[Place, onnx.NodeProto]]) -> set[str]:
    """Put nodes into `graph`, each in the place of a layer; return the other tensors that the layers have read."""
    users: defaultdict[str, list[int]] = defaultdict(list)
    for index, node in enumerate(graph.node):
        for tensor in node.input:
            users[tensor].append(index)
    makers = {tensor: index for index, node in enumerate(graph.node) for tensor in node.output}
    read, inner, gone = set[str](), set[str](), set[int]()
    firsts = [makers[place.node.output[0]] for place, _ in replacements]
    for first, (place, _) in zip(firsts, replacements, strict=True):
        nodes = _chain(graph, users, first, place.made)
        made = {tensor for index in nodes for tensor in graph.node[index].output} - {place.made}
        read |= {tensor for index in nodes for tensor in graph.node[index].input} - made - {place.data, ""}
        inner |= made
        gone |= nodes - {first}
    for first, (_, node) in zip(firsts, replacements, strict=True):
        graph.node[first].CopyFrom(node)
    _keep(graph.node, [index not in gone for index in range(len(graph.node))])
    _keep(graph.value_info, [value.name not in inner for value in graph.value_info])
    return read


def _chain(graph: onnx.GraphProto, users: Mapping[str, list[int]], first: int, made: str) -> set[int]:
    """Return the nodes that a layer stands for, from its own, `first`, to the one that makes its tensor `made`."""
    found, queue = {first}, [*graph.node[first].output]
    while queue:
        tensor = queue.pop()
        after = users.get(tensor, []) if tensor != made else []
        queue += [name for index in after if index not in found for name in graph.node[index].output]
        found.update(after)
    return found


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
