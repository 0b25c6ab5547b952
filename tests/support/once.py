"""What one process of a run of the tests makes, and its others use."""

import os
import tempfile
from pathlib import Path

from tvm_deconv.artifact.locks import locked

SHARED = "TVM_DECONV_TESTS_SHARED"  # the variable that names the folder which they have in common; conftest.py sets it


def made_once(name, make):
    """The folder `name` of this run, which `make(folder)` fills once for all its processes."""
    shared = Path(os.environ[SHARED])
    folder = shared / name
    with locked(shared / f"{name}.lock"):
        if not folder.exists():
            making = Path(tempfile.mkdtemp(dir=shared))
            make(making)
            making.rename(folder)
    return folder
