"""Builders that are killed and readers beside them: run by `test_faults` in a process of its own, which may fork.

Each line of standard input is a task, done by a child, whose exit code is then printed after what it found:

    killed|stepped|concurrent fast|real ROUNDS SEED DIRECTORY

Two artifacts of one problem that differ in their launcher take turns. "fast" has the compiler's work done beforehand,
so that most of a builder's time goes into putting files in their places. Prints what the kills left behind.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import numpy as np
from support.tolerances import assert_close

import tvm_deconv as td
from tvm_deconv.artifact.manifest import Manifest
from tvm_deconv.compiler import build, output
from tvm_deconv.compiler.backends import BACKENDS
from tvm_deconv.compiler.backends.x86 import X86Toolchain
from tvm_deconv.compiler.launcher import FLAGS, find_compiler, launcher_object
from tvm_deconv.compiler.selection import Choice
from tvm_deconv.schedules.contract import Workspace
from tvm_deconv.targets import CPU_TARGETS

P = td.Problem(2, 1, 3, 5, (4, 5), (3, 3), (2, 2), (1, 1), (1, 1), (7, 9))
TARGET = CPU_TARGETS["x86-64-v3"]
CHOICES = [
    Choice(None, "default", "the default")
]  # to read the installed logs takes longer than to put files in their places
CC = find_compiler()
RNG = np.random.default_rng(0)
DATA, FILTER = RNG.standard_normal(P.data_shape, np.float32), RNG.standard_normal(P.filter_shape, np.float32)
EXPECTED = td.reference(P, DATA, FILTER)


class Copies(X86Toolchain):
    """A toolchain whose builds are copies of the library in the place of its launcher."""

    def compile(self, kernel, target, path):  # noqa: ARG002
        shutil.copy(self.launcher, path)
        return Workspace()


def variants(scratch, fast):
    """The toolchains of two exports whose libraries differ; with `fast`, they copy those libraries."""
    toolchains = []
    for level in ("-O2", "-O1"):
        folder = scratch / level
        folder.mkdir()
        launcher_object.__globals__["FLAGS"] = (*FLAGS, level)
        toolchains.append(X86Toolchain(CC, launcher_object(CC, folder), ()))
        if fast:
            manifest = export(folder / "made", toolchains[-1])
            toolchains[-1] = Copies(CC, folder / "made" / manifest.library, ())
    if fast:
        kernel = BACKENDS["x86"].build(P, TARGET)
        build._Build._kernel = lambda *_: kernel
    return toolchains


def export(directory, toolchain):
    return build.export(P, TARGET, directory, toolchain=toolchain, choices=CHOICES)


def fork(directory, toolchains):
    """A process that builds again and again; it has begun."""
    begun, begin = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(begin, b"!")
            while True:
                for toolchain in toolchains:
                    export(directory, toolchain)
        finally:
            os._exit(1)
    os.read(begun, 1)
    os.close(begun)
    os.close(begin)
    return pid


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "the builder had failed"


def check(library):
    assert not library.broken, library.broken
    out = np.full(P.output_shape, np.nan, np.float32)
    assert_close(library.bind(P, FILTER)(DATA, out), EXPECTED)


def left_behind(directory):
    """What a kill left besides an artifact: nothing, a half-made one, one whose manifest was not yet in place."""
    (manifest,) = map(Manifest.read, directory.glob("*.json"))
    names = {path.name for path in directory.iterdir()} - {".lock", f"{manifest.name}.json", manifest.library}
    kinds = {"directory" if name.startswith(".building-") else "library" for name in names}
    assert len(names) == len(kinds), names  # the next build clears what the one before it left
    return "+".join(sorted(kinds)) or "nothing"


def killed(directory, toolchains, rounds, random, longest):
    left = Counter()
    for number in range(1, rounds + 1):
        builder = fork(directory, toolchains)
        time.sleep(random.uniform(0, longest))
        kill(builder)
        check(td.load(directory))
        left[left_behind(directory)] += 1
        if number % 10 == 0 and set(left) == {"nothing"}:
            longest *= 2  # a forked builder on a busy machine takes longer to begin than the build that was timed
    return left


def stepped(directory, toolchains, rounds, *_):
    """Builders that kill themselves before the first, the second, ... step of putting files in their places."""
    left = Counter()
    for step in range(rounds):
        pid = os.fork()
        if pid == 0:
            remaining = iter(range(step))
            for owner, name in ((output, "_flush"), (Path, "replace"), (Path, "unlink")):
                setattr(owner, name, dying(getattr(owner, name), remaining))
            export(directory, toolchains[1])
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        assert status in (0, signal.SIGKILL)
        check(td.load(directory))
        left[left_behind(directory)] += 1
        if status == 0:
            return left
        export(directory, toolchains[0])
    raise AssertionError("more steps than rounds")


def dying(step, remaining):
    def step_or_die(*arguments, **more):
        if next(remaining, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*arguments, **more)

    return step_or_die


def concurrent(directory, toolchains, rounds, random, longest):
    """Readers that load, and bind later, beside two builders; now and then one of these is killed."""
    builders = [fork(directory, toolchains), fork(directory, toolchains[::-1])]
    read = Counter()
    for _ in range(rounds):
        library = td.load(directory)
        end = time.monotonic() + random.uniform(0, longest)
        while time.monotonic() < end:
            check(td.load(directory))
        check(library)
        read[library.manifests[0].sha256] += 1
        victim = random.randrange(2)
        kill(builders[victim])
        builders[victim] = fork(directory, toolchains[:: random.choice((1, -1))])
    for builder in builders:
        kill(builder)
    assert len(read) == 2, "only one artifact was ever seen"
    return read


def main(what, speed, rounds, seed, directory):
    directory = Path(directory)
    with tempfile.TemporaryDirectory() as scratch:
        toolchains = variants(Path(scratch), speed == "fast")
        start = time.monotonic()
        for toolchain in toolchains:
            export(directory, toolchain)
        longest = time.monotonic() - start  # of two builds: a kill comes at any moment of one
        export(directory, toolchains[0])
        work = {"killed": killed, "stepped": stepped, "concurrent": concurrent}[what]
        found = work(directory, toolchains, int(rounds), random.Random(int(seed)), longest)
        last = export(directory, toolchains[0])
    assert {path.name for path in directory.iterdir()} == {".lock", f"{last.name}.json", last.library}
    check(td.load(directory))
    print(dict(found))


def serve():
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                main(*line.rstrip("\n").split(" ", 4))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print("exit code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
