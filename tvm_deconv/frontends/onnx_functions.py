"""The functions of an ONNX model: how large it becomes when they are inlined, counted before that happens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from tvm_deconv.errors import SourceError

if TYPE_CHECKING:
    import onnx

#: Most that a model may have after its functions are inlined. Exports of whole networks have some ten thousand nodes.
_MOST_NODES = 1 << 18
_MOST_BYTES = 1 << 28
#: Most functions within one another; exporters make one for each module of a network.
_DEEPEST = 64

#: domain, name and overload of a function
_Name: TypeAlias = tuple[str, str, str]


class _Size(NamedTuple):
    """The nodes and bytes of some nodes with all functions inlined, and how deep those are nested."""

    nodes: int
    bytes: int
    depth: int


def check_expansion(model: onnx.ModelProto, path: Path) -> None:
    """Raise SourceError if the functions of a model call themselves, or make it too large when they are inlined."""
    bodies = {(function.domain, function.name, _overload(function)): function.node for function in model.functions}
    calls = {name: [*_calls(nodes, bodies)] for name, nodes in bodies.items()}
    sizes: dict[_Name, _Size] = {}
    for name in _callees_first(calls, path):
        sizes[name] = _size(bodies[name], calls[name], sizes)
    whole = _size(model.graph.node, [*_calls(model.graph.node, bodies)], sizes)
    if whole.nodes > _MOST_NODES or whole.bytes > _MOST_BYTES + model.ByteSize():
        rule = f"must make at most {_MOST_NODES} nodes and {_MOST_BYTES >> 20} MiB more when inlined ({path})"
        raise SourceError("functions", f"{whole.nodes} nodes, {whole.bytes} bytes", rule)
    if whole.depth > _DEEPEST:
        raise SourceError("functions", whole.depth, f"must be nested at most {_DEEPEST} deep ({path})")


def _overload(item: Any) -> str:
    return str(getattr(item, "overload", ""))  # from ONNX 1.16 on


def _all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (*attribute.graphs, attribute.g):
                yield from _all_nodes(graph.node)


def _calls(nodes: Iterable[onnx.NodeProto], bodies: Iterable[_Name]) -> Iterator[_Name]:
    """Yield the functions that nodes and their bodies call, one for each call."""
    for node in _all_nodes(nodes):
        name = node.domain, node.op_type, _overload(node)
        if name in bodies:
            yield name


def _size(nodes: Sequence[onnx.NodeProto], calls: Sequence[_Name], sizes: dict[_Name, _Size]) -> _Size:
    called = [sizes[name] for name in calls]
    own = sum(1 for _ in _all_nodes(nodes))
    return _Size(
        own + sum(size.nodes for size in called),
        sum(node.ByteSize() for node in nodes) + sum(size.bytes for size in called),
        1 + max((size.depth for size in called), default=0),
    )


def _callees_first(calls: dict[_Name, list[_Name]], path: Path) -> Iterator[_Name]:
    """Yield every function behind those that it calls. Raises SourceError if one calls itself, also through others."""
    done: set[_Name] = set()
    for first in calls:
        open: dict[_Name, Iterator[_Name]] = {} if first in done else {first: iter(calls[first])}
        while open:
            name = next(reversed(open))
            callee = next((other for other in open[name] if other not in done), None)
            if callee is None:
                done.add(name)
                del open[name]
                yield name
            elif callee in open:
                raise SourceError("functions", callee[1], f"must not call itself, also through others ({path})")
            else:
                open[callee] = iter(calls[callee])
