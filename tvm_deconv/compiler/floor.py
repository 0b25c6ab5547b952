"""Libraries to link against in place of this machine's, so that artifacts run with an older C library.

A linker binds a function to its newest version in the libraries of the machine that builds. Those of glibc that are
newer than 2.28, of the platform manylinux_2_28, have an older version too, which newer systems keep. A stub defines
just these, in the library that held them in glibc 2.28. Given before the system's libraries, the linker takes it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from tvm_deconv.compiler.toolchain import run_compiler

FUNCTIONS = Path(__file__).with_name("glibc_2_28.txt")
#: Behind the objects: of the stubs, and of the system's libraries, only those that are needed.
FLAGS = ("-Wl,--as-needed", "-pthread")


def stubs(cc: str, out_dir: Path) -> tuple[Path, ...]:
    """Make the stubs with `cc` in a new directory in `out_dir`; return their paths, which end in ".so".

    Raises BuildError, CompilerNotFound.
    """
    folder = Path(tempfile.mkdtemp(prefix="floor-", dir=out_dir))
    return tuple(_stub(cc, folder, name, versions) for name, versions in _read().items())


def _read() -> Mapping[str, Mapping[str, list[str]]]:
    """Return the functions of each library by their version."""
    libraries: dict[str, dict[str, list[str]]] = {}
    for line in FUNCTIONS.read_text(encoding="ascii").splitlines():
        if not line.startswith("#"):
            library, version, *functions = line.split()
            libraries.setdefault(library, {}).setdefault(version, []).extend(functions)
    return libraries


def _stub(cc: str, folder: Path, name: str, versions: Mapping[str, list[str]]) -> Path:
    """Link the shared library called `name` with symbols of these `versions`."""
    path = (folder / name).with_suffix("")
    source, script = path.with_suffix(".s"), path.with_suffix(".map")
    names = [symbol for symbols in versions.values() for symbol in symbols]
    source.write_text("".join(f".globl {symbol}\n.type {symbol}, @function\n{symbol}:\n" for symbol in names))
    script.write_text("".join(_nodes(versions)))
    linked = ("-shared", "-s", "-nostdlib", f"-Wl,-soname,{name}", f"-Wl,--version-script={script}")
    run_compiler("cc", [cc, "-x", "assembler", *linked, str(source), "-o", str(path)], f"{name} does not link:\n")
    return path


def _nodes(versions: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield the nodes of the version script; all other symbols are local."""
    for version, names in versions.items():
        yield f"{version} {{ global: {' '.join(f'{name};' for name in names)} }};\n"
    yield "LOCAL { local: *; };\n"
