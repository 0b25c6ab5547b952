"""The graph of imports of the package, read from its text: lazy ones and those for types too."""

import ast
from collections import deque
from functools import cache

ROOT = "tvm_deconv"


def modules(*folders):
    """The file of each module, by name: `folders` are pairs of a package's name and its directory."""
    files = {}
    for package, folder in folders:
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def graph(files):
    """The modules that each module imports, wherever the import stands."""
    return {name: _imported(name, path, files) for name, path in files.items()}


def chain(graph, start, wanted):
    """The shortest way of imports from a module of the packages `start` to one of the packages `wanted`, or None."""
    queue = deque([name] for name in graph if _within(name, start))
    seen = set()
    while queue:
        way = queue.popleft()
        if _within(way[-1], wanted):
            return way
        for name in sorted(graph[way[-1]] - seen):
            seen.add(name)
            queue.append([*way, name])
    return None


@cache
def _nodes(path):
    """The imports in a file, and its calls of functions that import."""
    kinds = (ast.Import, ast.ImportFrom, ast.Call)
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]


def _within(name, packages):
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _imported(name, path, files):
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in _nodes(path):
        for wanted in _named(node, package):
            # The longest part that is a module: the rest is a name in it.
            while wanted and wanted not in files:
                wanted = wanted.rpartition(".")[0]
            # An import runs the packages above the module too. That of the root is everybody's: it is the public names.
            while wanted:
                found.add(wanted)
                wanted = wanted.rpartition(".")[0]
                wanted = wanted if wanted != ROOT else ""
    return found - {name}


def _named(node, package):
    """The dotted names that a statement or a call imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
        return [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return []
