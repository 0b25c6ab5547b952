"""From a manifest to callable functions: read, verify, load those very bytes.

The library is read once. Its size, digest, dependencies and symbols are checked on the bytes in memory. These bytes,
not the file, are what the dynamic linker maps: through an anonymous file in memory, which needs no directory that can
be written, or through a file in a private directory if the system has no anonymous files.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tvm_deconv.artifact import elf, files, needs
from tvm_deconv.artifact.ffi import import_tvm_ffi
from tvm_deconv.artifact.manifest import Manifest
from tvm_deconv.errors import ArtifactError, IntegrityError
from tvm_deconv.runtime import threads
from tvm_deconv.runtime.process import LOG, Artifact, Loaded, once
from tvm_deconv.targets import LAUNCHER_SYMBOLS, LOAD_SYMBOL, CpuTarget

#: The libraries that an artifact may need.
NEEDED = frozenset(
    {
        "libtvm_ffi.so",
        "libc.so.6",
        "libm.so.6",
        "libgcc_s.so.1",
        "libstdc++.so.6",
        "libpthread.so.0",
        "libdl.so.2",
        "librt.so.1",
        "ld-linux-x86-64.so.2",
    }
)
_loads = itertools.count()  # from memory


def load(directory: Path, manifest: Manifest, *, private: bool = False) -> Artifact:
    """Verify the library of `manifest` in `directory` and load it, once per content and process.

    A `private` library must be this user's alone. Raises IntegrityError if the file is not the one that the manifest
    describes, ArtifactError if it cannot be read or loaded.
    """
    path = directory / manifest.library
    data = read_verified(path, manifest, private=private)
    # Manifests may share a digest yet disagree on the packed filter, so the identity has both.
    identity = (manifest.sha256, manifest.packed_shape, manifest.packed_dtype)
    return once(identity, lambda: _load(path, manifest, data))


def read_verified(path: Path, manifest: Manifest, *, private: bool = False) -> bytes:
    """Return the bytes of the library at `path` after checking size, digest, dependencies and symbols.

    Raises IntegrityError if a check fails, ArtifactError if the file cannot be read.
    """
    data, size = files.read(path, manifest.size + 1, ArtifactError, IntegrityError, private=private)
    if len(data) != manifest.size:
        rule = f"must be {manifest.size}, which the manifest says: the file was truncated or replaced"
        raise IntegrityError(path, rule, "size", size)
    digest = hashlib.sha256(data).hexdigest()
    if digest != manifest.sha256:
        rule = f"must be {manifest.sha256}, which the manifest says: the file was altered or replaced"
        raise IntegrityError(path, rule, "sha256", digest)
    try:
        found = elf.dynamic(data)
    except ValueError as error:
        raise IntegrityError(path, f"must be a shared library for this machine, but {error}") from None
    foreign = [name for name in found.needed if name not in NEEDED]
    if foreign:
        raise IntegrityError(path, f"may only need {', '.join(sorted(NEEDED))}", "needed", foreign)
    missing = sorted(_symbols(manifest) - found.defined)
    if missing:
        raise IntegrityError(
            path, f"must define {', '.join(missing)}: it is no artifact", "defined", len(found.defined)
        )
    _check_needs(path, manifest, needs.needed(found.versions))
    return data


def _check_needs(path: Path, manifest: Manifest, needed: Mapping[str, str]) -> None:
    """Raise IntegrityError if the library needs newer libraries than its manifest says, where that says any."""
    if not manifest.states_needs:
        return
    stated = dict.fromkeys(needed, "0") | dict(manifest.needs)
    for family, version in needs.beyond(needed, stated).items():
        rule = f"must be at least {version}, which the library needs"
        raise IntegrityError(path, rule, f"needs.{family}", manifest.needs.get(family))


def _symbols(manifest: Manifest) -> frozenset[str]:
    """Return the symbols that the library must define; for a target that is not known, those of a CPU's."""
    return (manifest.known_target or CpuTarget).symbols


def _load(path: Path, manifest: Manifest, data: bytes) -> Artifact:
    start = time.perf_counter()
    tvm_ffi = import_tvm_ffi()
    try:
        with _private_file(data, path.name) as name:
            # By the function behind `tvm_ffi.load_module`, which would ask for a name that ends in ".so".
            module = tvm_ffi.get_global_func("ffi.Module.load_from_file.so")(name, "so")
            tvm_ffi.get_global_func("ffi.ModuleGlobalsAdd")(module)  # for good
            launched = _symbols(manifest) >= LAUNCHER_SYMBOLS
            pack, deconv = module.get_function("pack"), module.get_function("deconv_with" if launched else "deconv")
            if launched:
                threads.attach(name)
            others = {"load": module.get_function("load")} if LOAD_SYMBOL in _symbols(manifest) else {}
    # tvm_ffi raises whatever class of error the C++ side names; there may be no memory, or no room, for the copy.
    except Exception as error:
        raise ArtifactError(path, f"must load and define pack, deconv and the thread count: {error}") from error
    LOG.info("loaded %s in %.1f ms", path, 1e3 * (time.perf_counter() - start))
    facts = Loaded(manifest.name, manifest.problem, manifest.target, str(path), manifest.sha256)
    packed = manifest.packed_shape, manifest.packed_dtype
    return Artifact(facts, packed, pack, deconv, tvm_ffi.from_dlpack, **others)


@contextlib.contextmanager
def _private_file(data: bytes, name: str) -> Iterator[str]:
    """Yield the path of a library with the content `data` that nobody else can have written to.

    No library was loaded by this path before: the linker takes libraries of one name for one library.
    """
    descriptor = memory_file(name)
    if descriptor is not None:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            # Numbers of descriptors return, so the path spells another number too, in slashes and dots.
            spelt = f"{next(_loads):b}".replace("0", "/").replace("1", "./")
            yield f"/proc/self/fd/{spelt}{descriptor}"
        return
    with files.temporary_folder() as folder:
        path = folder / name
        path.write_bytes(data)
        yield str(path)


def memory_file(name: str) -> int | None:
    """Return the descriptor of a new anonymous file in memory; None if the system has none."""
    if not hasattr(os, "memfd_create") or not Path("/proc/self/fd").exists():
        return None
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError:  # the system forbids them, or executing them
        return None
