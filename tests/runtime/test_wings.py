"""The wings: the runtime and the compiler, of which neither imports the other.

Importing tvm_deconv, loading an artifact and calling it take numpy and apache-tvm-ffi, nothing else.
"""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import artifacts as made
from support.imports import chain, graph, modules
from support.tolerances import element_bound

import tvm_deconv
from tvm_deconv.artifact.ffi import TorchBlocker

PACKAGE = Path(tvm_deconv.__file__).parent
SCHEDULES = PACKAGE.parent / "schedules"
RUNTIME = ["tvm_deconv.runtime"]
COMPILER = [f"tvm_deconv.{room}" for room in ("compute", "schedules", "compiler", "tuning")]

# Any import but those of the standard library, numpy, tvm_ffi and ourselves fails as if the package were not installed;
# one that is asked for by our own code is reported even where that code catches the error.
BLOCKER = """
import sys

ALLOWED = sys.stdlib_module_names | {"numpy", "tvm_ffi", "typing_extensions", "tvm_deconv"}
ours = []

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ALLOWED or name.startswith("_sysconfigdata"):
            return None
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__", "").startswith("importlib"):
            frame = frame.f_back
        if frame.f_globals.get("__name__", "").startswith("tvm_deconv"):
            ours.append(name)
        raise ModuleNotFoundError(f"No module named {name!r}, not in the runtime wing", name=name)

sys.meta_path.insert(0, Blocker())
"""

USE = """
import numpy as np
import tvm_deconv as td
import tvm_deconv.targets, tvm_deconv.artifact.manifest

library = td.load(sys.argv[1])
p = td.Problem.from_key(sys.argv[2])
rng = np.random.default_rng(0)
data = rng.standard_normal(p.data_shape, np.float32)
filter = rng.standard_normal(p.filter_shape, np.float32)
expected = td.reference(p, data, filter)
bound = library.bind(p, filter)(data)
called = library.convolution_backprop_data(data, filter, p.strides, None, (1, 1), (1, 1))
for output in (bound, called):
    assert np.abs(output - expected).max() <= BOUND * np.abs(expected).max()
try:
    library.bind(p.replace(batch=9), filter)
except td.NoArtifactError as error:
    assert "batch" in str(error)
td.set_num_threads(1)
""".replace("BOUND", repr(element_bound("float32")))

REPORT = """
assert not ours, f"imported by tvm_deconv: {ours}"
"""


def run(script, artifacts, *paths):
    path = os.pathsep.join(map(str, [*paths, PACKAGE.parent]))
    command = [sys.executable, "-W", "error", "-c", script, str(artifacts), made.PLAIN.key]
    environment = os.environ | {"PYTHONPATH": path}
    # Not in the checkout: the current directory comes before PYTHONPATH.
    return subprocess.run(
        command, cwd=artifacts, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_only_numpy_and_tvm_ffi(artifacts):
    done = run(BLOCKER + USE + REPORT, artifacts)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "line", "name"),
    [
        ("__init__.py", "import msgspec", "msgspec"),
        ("runtime/library.py", "from tvm.runtime import Tensor", "tvm"),
        ("runtime/loader.py", "try:\n    import torch.utils\nexcept ImportError:\n    pass", "torch"),
        ("problem/reference.py", "import ml_dtypes", "ml_dtypes"),
    ],
)
def test_that_test_can_fail(artifacts, tmp_path, module, line, name):
    """One more import in the runtime wing is found, even one that the code could do without."""
    shutil.copytree(PACKAGE, tmp_path / "tvm_deconv", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "tvm_deconv" / module).open("a") as file:
        file.write(f"\n{line}\n")
    done = run(BLOCKER + USE + REPORT, artifacts, tmp_path)
    assert done.returncode == 1
    said = [f"No module named {name!r}, not in the runtime wing", f"imported by tvm_deconv: [{name!r}]"]
    assert any(text in done.stderr for text in said), done.stderr


def test_import_is_light(artifacts):
    """Before `load` there is no tvm_ffi either, from then on there is, and nothing is ever imported from tvm."""
    script = (
        "import sys, tvm_deconv\n"
        "absent = {'tvm', 'tvm_ffi', 'torch', 'ml_dtypes', 'ctypes.util', 'tempfile', 'subprocess'}\n"
        "assert not absent & set(sys.modules)\n"
        "tvm_deconv.load(sys.argv[1])\n"
        "assert {'tvm', 'tvm_ffi', 'torch'} & set(sys.modules) == {'tvm_ffi'}"
    )
    done = run(script, artifacts)
    assert done.returncode == 0, done.stderr


# ---- neither wing imports the other ----


def project():
    return modules(("tvm_deconv", PACKAGE), ("tvm_deconv.schedules", SCHEDULES))


@pytest.mark.parametrize(
    ("wing", "other"), [(RUNTIME, COMPILER), (COMPILER, RUNTIME)], ids=["from runtime", "from compiler"]
)
def test_no_wing_imports_the_other(wing, other):
    """Neither itself nor through others, at the start of a module or later."""
    imports = graph(project())
    assert all(any(name.startswith(room) for name in imports) for room in (*wing, *other))
    assert chain(imports, wing, other) is None


@pytest.mark.parametrize(
    ("wing", "other", "module", "line"),
    [
        (RUNTIME, COMPILER, "runtime.layer", "from tvm_deconv.compiler import build"),
        (RUNTIME, COMPILER, "runtime.host", "def late():\n    import tvm_deconv.tuning"),
        (RUNTIME, COMPILER, "runtime.loader", "if TYPE_CHECKING:\n    from tvm_deconv.schedules.x86 import Kernel"),
        (RUNTIME, COMPILER, "runtime.fallback", "importlib.import_module('tvm_deconv.compute.direct')"),
        (RUNTIME, COMPILER, "artifact.files", "from ..compiler.records import Log"),
        (RUNTIME, COMPILER, "runtime.library", "from tvm_deconv import compile"),
        (COMPILER, RUNTIME, "compiler.process", "from tvm_deconv.runtime import loader"),
        (COMPILER, RUNTIME, "tuning.search", "def late():\n    from tvm_deconv.runtime.verify import verify"),
        (COMPILER, RUNTIME, "compute.matrix", "import tvm_deconv.runtime.threads"),
        (COMPILER, RUNTIME, "problem.testing", "def late():\n    from ..runtime import library"),
        (COMPILER, RUNTIME, "schedules.x86.tiles", "from tvm_deconv import load"),
    ],
)
def test_that_one_more_import_is_found(tmp_path, wing, other, module, line):
    """With it the walk goes from one wing to the other. The public names are of both."""
    files, changed = project(), f"tvm_deconv.{module}"
    path = tmp_path / files[changed].name
    path.write_text(f"{files[changed].read_text()}\n{line}\n")
    way = chain(graph(files | {changed: path}), wing, other)
    assert way is not None
    assert changed in way


# ---- torch ----


@pytest.fixture
def fake_torch(tmp_path):
    """A directory with a module torch that leaves a mark where it is imported."""
    (tmp_path / "torch.py").write_text("import pathlib\npathlib.Path(__file__).with_name('imported').touch()\n")
    return tmp_path


def test_torch_is_not_imported(artifacts, fake_torch):
    """Importing tvm_ffi alone imports torch. Ours must not, and torch must be there for whoever wants it later."""
    assert run("import tvm_ffi", artifacts, fake_torch).returncode in (0, 1)
    assert (fake_torch / "imported").exists(), "tvm_ffi no longer imports torch: the finder that hides it can go"
    (fake_torch / "imported").unlink()
    script = "import sys, pathlib\n" + USE + "import tvm_ffi\nassert 'torch' not in sys.modules\n"
    script += f"assert not pathlib.Path({str(fake_torch / 'imported')!r}).exists()\nimport torch\n"
    script += "assert not [finder for finder in sys.meta_path if type(finder).__name__ == 'TorchBlocker']\n"
    done = run(script, artifacts, fake_torch)
    assert done.returncode == 0, done.stderr
    assert (fake_torch / "imported").exists()


def test_torch_is_hidden_from_one_thread_only():
    finder = TorchBlocker()
    found = []
    with pytest.raises(ModuleNotFoundError, match="No module named 'torch'"):
        finder.find_spec("torch")
    assert finder.find_spec("torchvision") is None
    thread = threading.Thread(target=lambda: found.append(finder.find_spec("torch")))
    thread.start()
    thread.join()
    assert found == [None]
