"""A directory of artifacts as one file, which `load` reads where it lies; see `tvm_deconv.artifact.pack`."""

from __future__ import annotations

from pathlib import Path

from tvm_deconv.artifact import files, pack, signing
from tvm_deconv.errors import ArtifactError, IntegrityError
from tvm_deconv.runtime.library import Library, load
from tvm_deconv.runtime.verify import checked


def pack_library(library: Library, path: Path) -> None:
    """Write what the directory of `library` holds, with its signature and weights, to the file at `path`, at once.

    The file is read again and every library in it verified before it takes its place. Raises the ArtifactError of what
    is broken or not there, OSError.
    """
    if not library.manifests and not library.broken:
        raise ArtifactError(library.root, "must hold an artifact")
    for error in checked(library).broken.values():
        raise error
    members = [f"{manifest.name}.json" for manifest in library.manifests]
    members += [signing.FILE] if (library.root / signing.FILE).exists() else []
    members += [manifest.library for manifest in library.manifests]
    members += [weights.name for weights in files.weights(library.root)]
    with files.replacing(path) as unfinished:
        pack.write(unfinished, library.root, members)
        packed = checked(load(unfinished))
        for error in packed.broken.values():
            raise error
        if packed.digest != library.digest:
            rule = f"must be {library.digest}: artifacts changed while they were packed"
            raise IntegrityError(library.root, rule, "digest", packed.digest)
