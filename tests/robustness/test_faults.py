"""What must not happen whenever a build ends: a half artifact that loads, a good one that is lost."""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import artifacts as made
from support.processes import without_torch
from support.strategies import operands
from support.tolerances import WINOGRAD, assert_close

import tvm_deconv as td

P = made.PLAIN
ROOT = Path(td.__file__).parents[1]
FAULTS = ROOT / "tests" / "support" / "faults.py"
SEED = random.SystemRandom().randrange(1 << 32)


def run(*command):
    done = subprocess.run(
        [*map(str, command)], env=without_torch(), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"seed {SEED}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def server():
    """What does the tasks of `faults`; it has imported the compiler once."""
    command = [sys.executable, "-W", "error", str(FAULTS)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env=without_torch(), text=True, **pipes) as process:
        yield process
        process.stdin.close()


def done_by(server, *task):
    """What a task prints."""
    server.stdin.write(" ".join(map(str, task)) + "\n")
    server.stdin.flush()
    said = ""
    for line in server.stdout:
        if line.startswith("exit code"):
            assert line == "exit code 0\n", f"seed {SEED}\n{said}{line}"
            return said
        said += line
    raise AssertionError(said)


@pytest.mark.parametrize(
    ("what", "speed", "rounds"),
    [
        ("stepped", "fast", 30),
        ("killed", "fast", 50),
        ("killed", "real", 3),
        ("concurrent", "fast", 10),
        pytest.param("killed", "fast", 1000, marks=pytest.mark.slow),
        pytest.param("killed", "real", 50, marks=pytest.mark.slow),
        pytest.param("concurrent", "fast", 300, marks=pytest.mark.slow),
        pytest.param("concurrent", "real", 30, marks=pytest.mark.slow),
    ],
)
def test_kill(server, tmp_path, what, speed, rounds):
    left = done_by(server, what, speed, rounds, SEED, tmp_path / "made")
    # The moments that matter were met: in the middle of making, and, where that is not left to chance, the others.
    assert "'directory" in left or what == "concurrent"
    if what == "stepped":
        assert all(state in left for state in ("'directory': ", "'directory+library': ", "'nothing': "))


FILL = """
import sys
from pathlib import Path
from support import artifacts as made
from support.tolerances import assert_close
import numpy as np
import tvm_deconv as td
from tvm_deconv.compiler import build
from tvm_deconv.targets import get

directory = Path(sys.argv[1])
def export(channels, toolchain=None):
    build.export(made.PLAIN.replace(out_channels=channels), get(made.TARGET), directory, toolchain=toolchain)
def check(channels):
    p = made.PLAIN.replace(out_channels=channels)
    rng = np.random.default_rng(channels)
    data, filter = rng.standard_normal(p.data_shape, np.float32), rng.standard_normal(p.filter_shape, np.float32)
    out = np.full(p.output_shape, np.nan, np.float32)
    library = td.load(directory)
    assert not library.broken
    assert_close(library.bind(p, filter)(data, out), td.reference(p, data, filter))
def refused(channels):
    try:
        export(channels)
    except td.BuildError as error:
        return str(error)
    raise AssertionError("there was room")
"""

UNTIL_FULL = """
import tempfile
from tvm_deconv.compiler.backends import BACKENDS
with tempfile.TemporaryDirectory() as elsewhere:
    toolchain = BACKENDS["x86"].toolchain(Path(elsewhere))
    for channels in range(1, 100):
        try:
            export(channels, toolchain)
        except td.BuildError:
            break
    assert channels > 2
    refused(channels)
    refused(1)  # what is there stays, although its replacement did not fit
    for built in range(1, channels):
        check(built)
    assert not [path for path in directory.iterdir() if path.name.startswith(".building-")]
    manifest = td.load(directory).manifests[0]
    for path in directory.glob(f"{manifest.name}.*"):
        path.unlink()
    export(channels, toolchain)
    check(channels)
"""


def test_full_disk(tmp_path):
    """A disk of 250 kB, in a namespace of its own."""
    mounted = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mounted += ['mount -t tmpfs -o size=250k none "$0" && exec "$@"', tmp_path]
    if not shutil.which("unshare") or subprocess.run([*mounted, "true"], capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    run(*mounted, sys.executable, "-W", "error", "-c", FILL + UNTIL_FULL, tmp_path)


NOT_BEYOND = """
import resource
export(1)
for size in 1 << 12, 1 << 15:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, -1))
    problems = [made.PLAIN.replace(out_channels=channels) for channels in (1, 2)]
    try:
        td.compile(problems, made.TARGET, directory, layers={problems[0]: ["a name that the manifest lacks"]}, jobs=1)
    except td.BuildError as error:
        assert [outcome.status for outcome in error.outcomes] in ([], ["failed", "failed"]), error.outcomes
    else:
        raise AssertionError("there was room")
    try:
        check(1)
    except td.ArtifactError as error:
        assert "File too large" in str(error), error
    else:
        raise AssertionError("the copy that is loaded had room")
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    assert len(td.load(directory).manifests) == 1
check(1)
"""


def test_files_that_may_not_grow(tmp_path):
    """As on a full disk, for every file that the build writes; the compiler itself may die of it."""
    run(sys.executable, "-W", "error", "-c", FILL + NOT_BEYOND, tmp_path)


@pytest.mark.parametrize("flips", [150, pytest.param(3000, marks=pytest.mark.slow)])
def test_flipped_bits(artifacts, tmp_path, flips):
    """One bit of any file: an error of ours, or a result that is right where the bit means nothing."""
    copy = shutil.copytree(artifacts, tmp_path / "copy")
    digest = td.load(copy).digest
    data, filter, bias = operands(P)
    expected = td.reference(P, data, filter, bias)
    chance = random.Random(SEED)
    for suffix in (".json", ".so"):
        path = made.file(copy, P, suffix)
        content = path.read_bytes()
        refused = 0
        for _ in range(flips):
            flipped = bytearray(content)
            flipped[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            path.write_bytes(flipped)
            out = np.full(P.output_shape, np.nan, np.float32)
            try:
                td.load(copy).bind(P, filter, bias)(data, out)
            except td.DeconvError:
                refused += 1
            else:
                assert suffix == ".json"
                assert_close(out, expected, growth=WINOGRAD, message=f"seed {SEED}: {flipped}")
            try:
                td.load(copy, digest=digest).bind(P, filter, bias)(data, out)
            except td.DeconvError:
                continue
            assert suffix == ".json"
            assert td.load(copy).digest == digest
        assert refused > flips // 4
        path.write_bytes(content)


@pytest.mark.parametrize("suffix", [".json", ".so"])
def test_torn_files(artifacts, tmp_path, suffix):
    copy = shutil.copytree(artifacts, tmp_path / "copy")
    path = made.file(copy, P, suffix)
    content = path.read_bytes()
    filter = operands(P)[1]
    for size in random.Random(SEED).sample(range(len(content) - 1), 100):
        path.write_bytes(content[:size])
        with pytest.raises((td.ManifestError, td.IntegrityError, td.NoArtifactError)):
            td.load(copy).bind(P, filter)
