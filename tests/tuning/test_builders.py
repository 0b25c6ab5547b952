"""Compiling candidates of one round, and those of the next beside the measurements."""

import threading
import time

import pytest

from tvm_deconv.compiler.process import WorkerError
from tvm_deconv.targets import get
from tvm_deconv.tuning import builders

FIRST, NEXT = "first", "next"


class Compiling:
    """A worker that takes a moment, and remembers what was compiled and how many worked at a time."""

    lock = threading.Lock()
    asked, running, most = [], 0, 0

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    @classmethod
    def ask(cls, _, key, schedule, timeout):
        assert timeout > 0
        with cls.lock:
            cls.asked.append((key, schedule))
            cls.running += 1
            cls.most = max(cls.most, cls.running)
        time.sleep(0.02)
        with cls.lock:
            cls.running -= 1
        if schedule == "bad":
            raise WorkerError("it does not compile")
        return f"library of {schedule}"


@pytest.fixture
def pool(monkeypatch, tmp_path):
    monkeypatch.setattr(builders, "Worker", Compiling)
    Compiling.asked, Compiling.running, Compiling.most = [], 0, 0
    with builders.BuilderPool(get("x86-64-v3"), tmp_path, 2) as made:
        yield made


MANY = [f"plan {number}" for number in range(60)]


def wait_for(number):
    while len(Compiling.asked) < number:
        time.sleep(0.005)


def test_what_follows_is_begun_when_nothing_else_is_left_and_compiled_once(pool):
    built = pool.build(FIRST, ["a", "b", "bad"], (NEXT, [*MANY, "bad"]))
    assert built == {"a": "library of a", "b": "library of b", "bad": "it does not compile"}
    assert [key for key, _ in Compiling.asked[:3]] == [FIRST] * 3
    Compiling.most = 0
    wait_for(6)
    assert Compiling.most == 1, "beside measurements one at a time"
    assert [*pool.build(NEXT, [*MANY, "bad"])] == [*MANY, "bad"]
    assert Compiling.most == 2
    assert sorted(Compiling.asked[3:]) == sorted((NEXT, schedule) for schedule in [*MANY, "bad"])


def test_nothing_is_compiled_in_a_pause(pool):
    pool.build(FIRST, ["a"], (NEXT, MANY))
    wait_for(3)
    pool.pause()
    assert Compiling.running == 0
    begun = len(Compiling.asked)
    time.sleep(0.1)
    assert len(Compiling.asked) == begun < len(MANY)
    pool.build(NEXT, MANY)
    assert sorted(Compiling.asked[1:]) == sorted((NEXT, schedule) for schedule in MANY)


def test_what_is_never_built_holds_nothing_up(pool):
    pool.build(FIRST, ["a"], (NEXT, MANY))
    assert pool.build("another", ["x"]) == {"x": "library of x"}
    assert len(Compiling.asked) < len(MANY)
