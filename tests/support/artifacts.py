"""Small problems, compiled once a session for the tests of the runtime (fixture `artifacts`)."""

import atexit
import dataclasses
import functools
import hashlib
import json
import shutil
import tempfile
from pathlib import Path

from tvm_deconv import Epilogue, Problem
from tvm_deconv.artifact.locks import locked
from tvm_deconv.artifact.manifest import Manifest, library_name, stem
from tvm_deconv.targets import get

TARGET = "x86-64-v3"

PLAIN = Problem(2, 1, 3, 5, (4, 5), (3, 3), (2, 2), (1, 1), (1, 1), (7, 9))
PROBLEMS = {
    "plain": PLAIN,
    "bias": PLAIN.replace(epilogue=Epilogue(bias=True)),
    "grouped": Problem(
        1,
        2,
        3,
        4,
        (6,),
        (4,),
        (2,),
        (1,),
        (1,),
        (12,),
        filter_format="GIOX",
        epilogue=Epilogue(bias=True, activation="relu"),
    ),
    "channels last": Problem(
        1,
        1,
        4,
        6,
        (2, 3, 3),
        (2, 2, 2),
        (2, 2, 2),
        (1, 1, 1),
        (0, 0, 0),
        (4, 6, 6),
        data_format="NXC",
        filter_format="XIO",
    ),
    "float64": PLAIN.replace(dtype="float64"),
    "float16": PLAIN.replace(dtype="float16", epilogue=Epilogue(bias=True)),
    "bfloat16": PLAIN.replace(dtype="bfloat16", epilogue=Epilogue(bias=True)),
    "int8": PLAIN.replace(dtype="int8", epilogue=Epilogue(bias=True)),
    "no batch": PLAIN.replace(batch=0),
    "no output": PLAIN.replace(output_spatial=(7, 0)),
}


@functools.cache
def toolchain_of(target=TARGET):
    """The toolchain of a target's backend, made once a process: what it compiles is the same for every artifact."""
    from tvm_deconv.compiler.backends import backend_of

    scratch = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    return backend_of(get(target)).toolchain(Path(scratch))


def export(directory, problems, target=TARGET):
    """Compile `problems` into `directory`."""
    from tvm_deconv.compiler import build  # which imports tvm; tests of the runtime have no other use for it

    for problem in problems:
        build.export(problem, get(target), directory, toolchain=toolchain_of(target))


def export_once(pool, directory, problems):
    """Copy the artifacts for `problems` from `pool` into `directory`, after compiling those that are not there yet."""
    for problem in problems:
        with locked(pool / "lock"):
            if not file(pool, problem, ".json").exists():
                export(pool, [problem])
        for suffix in (".json", ".so"):
            shutil.copy(file(pool, problem, suffix), directory)


def file(directory, problem, suffix):
    """Return the file of the artifact for `problem`: its ".json", or the ".so" that the manifest names."""
    path = directory / (stem(problem.artifact_key, TARGET) + suffix)
    return directory / json.loads(path.with_suffix(".json").read_text())["library"] if suffix == ".so" else path


def describe(directory, name, content):
    """Write the library of the artifact called `name`; return the fields of its manifest that describe it."""
    digest = hashlib.sha256(content).hexdigest()
    library = library_name(name, digest)
    (directory / library).write_bytes(content)
    return {"library": library, "sha256": digest, "size": len(content)}


def rewrite(directory, problem, **changes):
    """Change fields of the manifest for `problem`; with `content`, replace its library and describe it truly."""
    path = file(directory, problem, ".json")
    if (content := changes.pop("content", None)) is not None:
        file(directory, problem, ".so").unlink()
        changes |= describe(directory, stem(problem.artifact_key, TARGET), content)
    path.write_text(dataclasses.replace(Manifest.read(path), **changes).to_json())


def manifest(problem, target, **changes):
    """Return a manifest for `problem` whose library does not exist."""
    fields = {
        "problem": problem.artifact_key, "target": target, "features": (), "needs": {}, "sha256": "0" * 64, "size": 1,
        "library": library_name(stem(problem.artifact_key, target), "0" * 64), "algorithm": "x", "knobs": {},
        "packed_shape": (1,), "packed_dtype": "float32", "scratch_bytes": 0, "macs": problem.macs, "versions": {},
        "recipe": "0" * 64,
    }  # fmt: skip
    return Manifest(**fields | changes)
