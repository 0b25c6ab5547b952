"""Processes that serve requests: what one does to itself is an error here, and the next request is served."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tvm_deconv.compiler.process import Limits, Worker, WorkerError

SERVED = """
import os, signal, subprocess, sys, time
from tvm_deconv.compiler.process import Refusal

class Served:
    def __init__(self, *arguments):
        self.calls = 0
        self.arguments = arguments
        if arguments == ("no start",):
            raise OSError("no such luck")

    def count(self):
        self.calls += 1
        return self.calls

    def echo(self, value):
        return value

    def told(self):
        return self.arguments, sorted(os.sched_getaffinity(0)), os.environ.get("TOLD")

    def fail(self):
        raise ValueError("two\\nlines")

    def refuse(self):
        raise Refusal("cannot be expressed")

    def leave(self):
        print("last words", file=sys.stderr)
        os._exit(3)

    def crash(self):
        os.kill(os.getpid(), signal.SIGSEGV)

    def start(self):
        self.child = subprocess.Popen(["sleep", "1000"])
        return self.child.pid

    def work(self, seconds):
        start = time.process_time()
        while (taken := time.process_time() - start) < seconds:
            pass
        return taken

    def spin(self):
        while True:
            pass

    def fill(self):
        kept = [bytes(100 << 20) for _ in range(20)]
        raise AssertionError

    def hang(self, path=None):
        if path:
            path.touch()
        self.child.wait()
"""


@pytest.fixture
def served(tmp_path, monkeypatch):
    (tmp_path / "served_requests.py").write_text(SERVED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    import served_requests

    return served_requests.Served


@pytest.fixture
def worker(served):
    with Worker(served) as made:
        yield made


def ended(pid):
    """Whether a process is gone, or waits for somebody to ask how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_an_object_lives_as_long_as_its_process(worker):
    assert not worker.running
    assert [worker.ask("count") for _ in range(3)] == [1, 2, 3]
    worker.stop()
    assert not worker.running
    assert worker.ask("count") == 1


def test_its_arguments_cpus_and_environment(served):
    cpu = max(os.sched_getaffinity(0))
    with Worker(served, 1, "two", cpus=[cpu], environment={"TOLD": "so"}) as worker:
        assert worker.ask("told") == ((1, "two"), [cpu], "so")


def test_nothing_is_imported_from_the_current_directory(worker, tmp_path, monkeypatch):
    """Models lie in folders that others have filled; a checkout has the package without its schedules."""
    (tmp_path / "here" / "tvm_deconv").mkdir(parents=True)
    for name in ("tvm_deconv/__init__", "tempfile", "numpy"):
        (tmp_path / "here" / f"{name}.py").write_text("raise SystemExit('from the current directory')")
    monkeypatch.chdir(tmp_path / "here")
    assert worker.ask("count") == 1


@pytest.mark.parametrize(("method", "said"), [("fail", "ValueError: two\nlines"), ("refuse", "cannot be expressed")])
def test_what_is_raised_there_is_said_and_the_process_goes_on(worker, method, said):
    assert worker.ask("count") == 1
    with pytest.raises(WorkerError, match=f"^{re.escape(said)}$") as caught:
        worker.ask(method)
    assert not caught.value.died
    assert worker.ask("count") == 2


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("leave", "its process ended with exit code 3: last words"),
        ("crash", "its process ended with signal SIGSEGV"),
    ],
)
def test_an_end_is_said_and_the_next_request_starts_again(worker, method, said):
    with pytest.raises(WorkerError, match=f"^{re.escape(said)}$") as caught:
        worker.ask(method)
    assert caught.value.died
    assert worker.ask("count") == 1


def test_an_object_that_cannot_be_made(served):
    with Worker(served, "no start") as worker, pytest.raises(WorkerError, match=r"OSError: no such luck$") as caught:
        worker.ask("count")
    assert caught.value.died


def test_one_that_hangs_is_ended_with_what_it_started(worker):
    child = worker.ask("start")
    with pytest.raises(WorkerError, match=r"^did not end within 0.5 s$") as caught:
        worker.ask("hang", timeout=0.5)
    assert caught.value.died
    until(lambda: ended(child))
    assert worker.ask("count") == 1


@pytest.mark.parametrize("how", ["stop", "close"])
def test_who_waits_is_told_when_another_thread_ends_it(worker, tmp_path, how):
    path = tmp_path / "hangs"
    child = []
    found = []

    def ask():
        child.append(worker.ask("start"))
        try:
            worker.ask("hang", path, timeout=None)
        except WorkerError as error:
            found.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    until(path.exists)
    getattr(worker, how)()
    thread.join(60)
    assert found == ["its process ended with signal SIGKILL"]
    until(lambda: ended(child[0]))


def test_an_answer_that_nobody_waits_for_is_not_that_of_the_next_request(worker, monkeypatch):
    assert worker.ask("count") == 1

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(worker._connection, "poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker.ask("count")
    assert worker.ask("told")[0] == ()
    assert worker.ask("count") == 1


def test_it_ends_with_whoever_started_it(served, tmp_path):
    worker, path = Worker(served), tmp_path / "pid"

    def ask():
        worker.ask("count")
        path.write_text(str(worker._process.pid))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    until(lambda: ended(int(path.read_text())))
    with worker, pytest.raises(WorkerError, match=f"signal {signal.SIGKILL.name}"):
        worker.ask("count")


def test_limits_are_those_of_one_request(served):
    """What takes too much fails alone. The limit is counted in ticks, which are a second off on a busy machine."""
    with Worker(served, limits=Limits(2, 1 << 30)) as worker:
        for _ in range(5):
            assert worker.ask("work", 0.7) < 0.9
        for method, reason in (("fill", "^MemoryError: "), ("spin", "signal SIGXCPU")):
            with pytest.raises(WorkerError, match=reason):
                worker.ask(method, timeout=300)
            worker.ask("count")


STORM = """
import itertools, os, random, signal, subprocess, sys, time
from pathlib import Path
from tvm_deconv.compiler.process import Worker
from served_requests import Served

class Interrupt(BaseException):
    pass

def interrupt(_, frame):
    global interrupted
    interrupted = True
    while frame is not None:
        if frame.f_code is work.__code__:
            raise Interrupt
        frame = frame.f_back

def running():
    "The processes that this one has started, but for those that have ended."
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.append(path.parent.name)
    return found

chance, questions, told = random.Random(int(sys.argv[2])), itertools.count(), []
workers = Worker(Served, "told", paused=True), Worker(Served, "told")

def work():
    for worker in itertools.cycle(workers):
        if interrupted:  # before this, or where Python ignores errors
            return
        number = next(questions)
        assert worker.ask("echo", number) == number, "the answer to an earlier question"
        assert worker.ask("told")[0] == ("told",)

signal.signal(signal.SIGALRM, interrupt)
for number in range(int(sys.argv[1])):
    # One interrupt, or a flurry: the second may come while the first is handled.
    after = 10 ** chance.uniform(-4, 0)
    interrupted = False
    try:
        signal.setitimer(signal.ITIMER_REAL, after, chance.choice([0, 0.0003]))
        work()
    except Interrupt:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    for worker in workers:
        if chance.random() < 0.3:
            worker.stop()
print(next(questions), "questions")
for worker in workers:
    worker.close()
end = time.monotonic() + 60
while left := running():
    assert time.monotonic() < end, left
    time.sleep(0.05)
"""


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("interrupts", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_storm(interrupts):
    """Interrupts at any moment of start, question and end: no answer of another question, no process, no wait."""
    command = [sys.executable, "-c", STORM, str(interrupts), str(random.randrange(1 << 32))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, (command[-1], done.stdout, done.stderr)
