"""Eight threads call layers of many kinds for a while: every result is checked, and nothing that a process holds grows.

    python soak.py DIRECTORY REBUILT SECONDS

DIRECTORY holds the artifacts of `artifacts.PROBLEMS`, and REBUILT is made. Meanwhile the main thread forks, is
interrupted in the middle of bind, call and del, and changes the processors of all threads and the number of threads of
a call; another process builds one artifact in REBUILT again and again, by each algorithm in turn, which the threads
load. Prints what was counted at the end, as one line of JSON, and what the process holds at each eighth of the time to
standard error.
"""

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
from support import artifacts as made
from support.strategies import operands
from support.tolerances import assert_close

import tvm_deconv as td

THREADS = 8
SAMPLES = 8
PROCESSORS = sorted(os.sched_getaffinity(0))

#: Builds the problem, by each algorithm in turn, until its standard input ends.
BUILDER = """
import itertools, select, sys
from pathlib import Path
from support import artifacts as made
from tvm_deconv.compiler import build
from tvm_deconv.compiler.selection import Choice, candidates_of
from tvm_deconv.schedules.x86.algorithms import ALGORITHMS
from tvm_deconv.targets import get
target = get(made.TARGET)
algorithms = [each for each in ALGORITHMS if each.supports(made.PLAIN, target)]
plans = [candidates_of(made.PLAIN, each, target)[0].schedule for each in algorithms]
for plan in itertools.cycle(plans):
    build.export(made.PLAIN, target, Path(sys.argv[1]), choices=[Choice(plan, "default", "")])
    print(flush=True)
    if select.select([sys.stdin], [], [], 1)[0]:
        break
"""


class Case:
    """A layer with its arrays, and the result of its first call, which the reference confirmed."""

    def __init__(self, library, problem, seed):
        self.problem, self.library = problem, library
        self.data, self.filter, self.bias = operands(problem, seed)
        self.reference = td.reference(problem, self.data, self.filter, self.bias)
        self.layer = self.bind()
        self.expected = self.layer(self.data)
        assert_close(self.expected, self.reference, problem.dtype)

    def bind(self):
        return self.library.bind(self.problem, self.filter, self.bias)

    def check(self, layer, threads=None, out=None):
        """Call the layer, into poisoned memory if there is any."""
        if out is not None:
            out.view(np.uint8).fill(0xA5)
        assert layer(self.data, out, threads=threads).tobytes() == self.expected.tobytes(), self.problem


def call(cases, rebuilt, seed, end, counts):
    """Call layers until the end: old and new ones, and sometimes that of the artifact that was built last."""
    chance = random.Random(seed)
    outputs = [np.empty_like(case.expected) for case in cases]
    while time.monotonic() < end:
        index = chance.randrange(len(cases))
        case, out = cases[index], outputs[index]
        layer = case.bind() if chance.random() < 0.02 else case.layer
        case.check(layer, chance.choice([None, None, 1, 2]), out if chance.random() < 0.5 else None)
        counts["calls"] += 1
        if chance.random() < 0.0005:
            other = cases[0]  # of the problem that is built again
            layer = td.load(rebuilt).bind(other.problem, other.filter, other.bias)
            assert_close(layer(other.data), other.reference, other.problem.dtype)
            counts["loads"] += 1


def listed(what):
    """The threads or descriptors of this process, "task" or "fd"."""
    return [path.name for path in Path("/proc/self", what).iterdir()]


class Interrupt(BaseException):
    """What the handler of the timer raises."""


def interrupted(*_):
    raise Interrupt


class Disturbance:
    """What the main thread does to itself and to the others."""

    def __init__(self, cases, chance, counts):
        self.cases, self.chance, self.counts = cases, chance, counts

    def move(self):
        """Confine each thread to some processors."""
        for thread in listed("task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(
                    int(thread), self.chance.sample(PROCESSORS, self.chance.randint(1, len(PROCESSORS)))
                )

    def limit(self):
        """Change the number of threads of a call."""
        td.set_num_threads(self.chance.choice([None, 1, 2, 3, 4, 6]))

    def fork(self):
        """Let a child bind and call, while other threads of the parent do; its end is waited for."""
        child = os.fork()
        if child == 0:
            status = 1
            try:
                resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
                for case in self.cases:
                    case.check(case.bind(), self.chance.choice([1, 2]))
                status = 0
            finally:
                os._exit(status)
        for _ in range(12_000):  # so that a machine that stands still does not count
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                assert status == 0, f"a child ended with {status}"
                return
            time.sleep(0.01)
        os.kill(child, signal.SIGABRT)
        raise AssertionError("a child hangs")

    def interrupt(self):
        """Bind, call and delete until a signal comes."""
        try:
            signal.setitimer(signal.ITIMER_REAL, self.chance.uniform(2e-5, 5e-3))
            while True:
                case = self.chance.choice(self.cases)
                case.check(case.bind(), self.chance.choice([None, 1, 2]))
        except Interrupt:
            pass

    def once(self):
        """Do one of these."""
        name = self.chance.choices(["move", "limit", "fork", "interrupt"], [2, 2, 1, 20])[0]
        getattr(self, name)()
        self.counts[name] += 1


def held():
    """What the process holds: resident bytes, and the least of several counts of what threads hold for a moment."""
    counts = []
    for _ in range(20):  # in some time, since a thread of a busy machine may be stopped while it holds a file
        counts.append([len(listed(what)) for what in ("fd", "task")])
        time.sleep(0.01)
    least = [min(each) for each in zip(*counts, strict=True)]
    mappings = Path("/proc/self/maps").read_text().count("\n")
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return {"resident": resident, "descriptors": least[0], "threads": least[1], "mappings": mappings}


def builder(directory):
    """The process that builds; it has built once."""
    process = subprocess.Popen(
        [sys.executable, "-c", BUILDER, directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline(), "the builder has failed"
    return process


def main(directory, rebuilt, seconds):
    library = td.load(directory)
    td.set_num_threads(4)
    # Layers of the directory as it was read: the artifact that is built again has another one below.
    cases = [Case(library, problem, seed) for seed, problem in enumerate(made.PROBLEMS.values())]
    builds = builder(rebuilt)
    signal.signal(signal.SIGALRM, interrupted)
    chance = random.Random()
    start = time.monotonic()
    end = start + float(seconds)
    counts = [dict.fromkeys(("calls", "loads"), 0) for _ in range(THREADS)]
    disturbance = Disturbance(cases, chance, dict.fromkeys(("move", "limit", "fork", "interrupt"), 0))
    wrong, samples = [], []

    def work(seed):
        try:
            call(cases, rebuilt, seed, end, counts[seed])
        except BaseException as error:
            wrong.append(repr(error))
            raise

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for number in range(1, SAMPLES + 1):
        while time.monotonic() < start + 0.95 * number / SAMPLES * float(seconds):
            disturbance.once()
            assert not wrong, wrong
            assert builds.poll() is None, "the builder has ended"
        samples.append({"seconds": round(time.monotonic() - start), **held()})
        done = {name: sum(each[name] for each in counts) for name in counts[0]} | disturbance.counts
        print(samples[-1] | done, file=sys.stderr, flush=True)
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    more, _ = builds.communicate("")
    assert builds.returncode == 0, "the builder has failed"
    calls = sum(each["calls"] for each in counts)
    counted = sum(each.calls for each in td.loaded())
    assert counted >= calls * 0.7, "empty outputs call no kernel, all others count"
    print(json.dumps(done | {"builds": more.count("\n") + 1, "held": samples}))


if __name__ == "__main__":
    main(*sys.argv[1:])
