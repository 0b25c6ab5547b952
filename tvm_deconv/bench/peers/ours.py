"""Our own artifact, bound to its filter."""

from __future__ import annotations

from tvm_deconv.bench.peers.common import Prepared, Task
from tvm_deconv.problem.testing import Operands
from tvm_deconv.runtime.library import load
from tvm_deconv.runtime.threads import set_num_threads
from tvm_deconv.runtime.verify import only


def prepare(task: Task, arrays: Operands, threads: int) -> Prepared:
    """Load and bind the artifact that the task names."""
    set_num_threads(threads)
    library = load(task.root)
    (manifest,) = (manifest for manifest in library.manifests if manifest.name == task.artifact)
    layer = only(library, manifest).bind(task.problem, arrays.filter, arrays.bias, scaling=arrays.scaling)
    out = layer(arrays.data)
    return Prepared(lambda: layer(arrays.data, out=out), lambda: out, manifest.algorithm)
