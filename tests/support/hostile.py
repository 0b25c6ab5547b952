"""Hostile inputs: strategies that spoil what is right, and tests that are given thousands of them.

`scripts/fuzz` runs such tests for as long as it is told. It sets FUZZ_SECONDS, and FUZZ_CORPUS to a directory that
keeps the inputs that failed, the last input of each test, and the number of inputs. Most of its inputs are variants of
those that hypothesis draws, made by a function of a random generator and the input, which costs much less.
"""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import note as report
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

FEW, MANY = 500, 20_000
VARIANTS = 100
#: Of processor time, far more than any of them takes, and of time for one that waits, for a machine that is busy.
SECONDS, WAITING = 20, 1200


def hostile(strategy, fixture=None, few=FEW, many=MANY, vary=None):
    """Run a test with a `few` inputs, and marked slow with `many`; a fixture comes first.

    `vary(chance, drawn)` returns an input that is like `drawn`.
    """

    def decorate(test):
        @pytest.mark.parametrize("inputs", [few, pytest.param(many, marks=pytest.mark.slow)])
        def run(inputs, request):
            given_first = [request.getfixturevalue(fixture)] if fixture else []
            fuzzing = Fuzzing(test.__name__, inputs)

            @fuzzing.settings
            @given(strategy, st.integers(0, 2**32))
            def each(drawn, seed):
                chance = random.Random(seed)
                for each in (drawn, *(vary(chance, drawn) for _ in range(fuzzing.variants if vary else 0))):
                    if fuzzing.over():
                        return
                    fuzzing.note(each)
                    timed(test, *given_first, each)

            fuzzing.repeat(each)

        return run

    return decorate


class Fuzzing:
    """One round of a test, or rounds until the time is over, with a corpus."""

    def __init__(self, name, inputs):
        seconds, corpus = os.environ.get("FUZZ_SECONDS"), os.environ.get("FUZZ_CORPUS")
        self.end = time.monotonic() + float(seconds) if seconds else None
        self.variants = VARIANTS if seconds else 0
        self.folder = Path(corpus) / name if corpus else None
        self.count = 0
        options = {"max_examples": inputs, "deadline": None, "suppress_health_check": list(HealthCheck)}
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.last = os.open(self.folder / "last", os.O_RDWR | os.O_CREAT)
            options |= {"database": DirectoryBasedExampleDatabase(self.folder / "examples"), "derandomize": False}
        self.settings = settings(**options)

    def over(self):
        """Tell whether the time is over."""
        return self.end is not None and time.monotonic() > self.end

    def note(self, drawn):
        """Count an input, and keep it while its test runs: a crash of the process leaves it there."""
        self.count += 1
        if self.folder:
            text = repr(drawn)[:100_000]
            os.ftruncate(self.last, os.pwrite(self.last, text.encode(errors="backslashreplace"), 0))
            report(text)

    def repeat(self, each):
        """Call `each` once, or until the time is over."""
        try:
            each()
            while self.end is not None and not self.over():
                each()
        finally:
            if self.folder:
                os.close(self.last)
                with (self.folder / "counts").open("a") as counts:
                    counts.write(f"{self.count}\n")


def timed(test, *arguments):
    def stop(number, _):
        raise AssertionError(f"takes more than {SECONDS if number == signal.SIGPROF else WAITING} s")

    clocks = {signal.SIGPROF: (signal.ITIMER_PROF, SECONDS), signal.SIGALRM: (signal.ITIMER_REAL, WAITING)}
    before = {number: signal.signal(number, stop) for number in clocks}
    for clock, seconds in clocks.values():
        signal.setitimer(clock, seconds)
    try:
        test(*arguments)
    finally:
        for number, (clock, _) in clocks.items():
            signal.setitimer(clock, 0)
            signal.signal(number, before[number])


def fit_to_print(text):
    """A log and a terminal can show it, whatever the input held."""
    assert all(line.isprintable() for line in text.split("\n")), ascii(text)


# ---- what is hostile ----

NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 2**200, 10**400, 0.5, 1e308, 1e999]),
    st.integers(-3, 40),
)
TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["", "none", "../x", "/etc/passwd", "\0", "\ud800", "NaN", "1" * 5000, "x" * 5000, "float32", "NXC"]
    ),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS, st.just(float("nan"))),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
#: (where, as a part of the whole; bytes to remove; bytes to put there)
EDITS = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 12), st.one_of(st.binary(max_size=6), st.just(b"9" * 30))), max_size=5
)


def edited(content, edits):
    for where, removed, put in edits:
        at = int(where * len(content))
        content = content[:at] + put + content[at + removed :]
    return content


@st.composite
def spoilt(draw, whole):
    """JSON like `whole`, with some values at any depth replaced, removed or added."""
    value = json.loads(json.dumps(whole))
    for _ in range(draw(st.integers(1, 3))):
        place = value
        while isinstance(place, (dict, list)) and place:
            key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
            deeper = place[key]
            if not isinstance(deeper, (dict, list)) or not deeper or draw(st.booleans()):
                change = draw(st.sampled_from(["replace", "remove", "add"]))
                if change == "replace":
                    place[key] = draw(VALUES)
                elif change == "remove":
                    del place[key]
                elif isinstance(place, dict):
                    place[draw(TEXTS)] = draw(VALUES)
                else:
                    place.insert(key, draw(VALUES))
                break
            place = deeper
    return value


def texts(whole):
    """Bytes of JSON like `whole`: spoilt in its values, in its bytes, or both."""

    def write(value, edits):
        return edited(json.dumps(value).encode("utf-8", "surrogatepass"), edits)

    return st.one_of(
        st.builds(write, spoilt(whole), st.just([])),
        st.builds(write, st.just(whole), EDITS),
        st.builds(write, spoilt(whole), EDITS),
        st.binary(max_size=40),
        st.sampled_from([b"[" * 5000, b'{"a":' * 5000, b"9" * 5000]),
    )


# ---- variants ----

WORDS = [
    "",
    "none",
    "../x",
    "/etc/passwd",
    "\0",
    "\ud800",
    "NaN",
    "x" * 5000,
    "float32",
    "NXC",
    "any",
    "any(2,4)",
    "-",
    "*",
]
PLAIN = [
    *(0, -1, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**400, 0.5, 1e308, 1e999, float("nan")),
    *(None, True, False, [], {}, [[]], [1, 2], {"": 0}, *WORDS),
]


def edit(chance, content):
    """Bytes with up to three changes: some replaced, removed, added, doubled."""
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(content) + 1)
        put = chance.choice(
            [b"", chance.randbytes(chance.randint(1, 4)), content[at : at + 8], b"9" * 30, b'"', b"\x80"]
        )
        content = content[:at] + put + content[at + chance.choice([0, 1, 1, 2, 8]) :]
    return content


def spoil(chance, content):
    """Bytes of JSON with a value replaced, removed or added at any depth; other bytes are edited."""
    if chance.random() < 0.3:
        return edit(chance, content)
    try:
        place = value = json.loads(content)
    except (ValueError, RecursionError):
        return edit(chance, content)
    while isinstance(place, (dict, list)) and place:
        key = chance.choice(list(place)) if isinstance(place, dict) else chance.randrange(len(place))
        if not isinstance(place[key], (dict, list)) or not place[key] or chance.random() < 0.3:
            change = chance.randrange(4)
            if change == 0:
                del place[key]
            elif change == 1 and isinstance(place, dict):
                place[chance.choice(WORDS)] = place[key]
            elif change == 1:
                place.insert(key, chance.choice(PLAIN))
            elif isinstance(place[key], str) and change == 2:
                place[key] = edit(chance, place[key].encode(errors="replace")).decode(errors="replace")
            else:
                place[key] = chance.choice(PLAIN)
            break
        place = place[key]
    return json.dumps(value).encode()


def one_of(chance, items, vary):
    """The list with one of its items varied, if it has any."""
    items = list(items)
    if items:
        at = chance.randrange(len(items))
        items[at] = vary(chance, items[at])
    return items
