"""Eight threads call layers of many kinds for a while: every result is checked, and memory must stay flat.

    python soak.py DIRECTORY SECONDS

DIRECTORY holds the artifacts of `artifacts.PROBLEMS`. Prints one line of JSON: calls, and resident bytes at quarters.
"""

import json
import os
import random
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


class Case:
    """A layer with its arrays, and the result of its first call, which the reference confirmed."""

    def __init__(self, library, problem, seed):
        self.problem, self.library = problem, library
        self.data, self.filter, self.bias = operands(problem, seed)
        self.layer = self.bind()
        self.expected = self.layer(self.data)
        reference = td.reference(problem, self.data, self.filter, self.bias)
        assert_close(self.expected, reference, problem.dtype)

    def bind(self):
        return self.library.bind(self.problem, self.filter, self.bias)


def call(cases, seed, end, counts, wrong):
    chance = random.Random(seed)
    try:
        outputs = [np.empty_like(case.expected) for case in cases]
        while time.monotonic() < end:
            index = chance.randrange(len(cases))
            case, out = cases[index], outputs[index]
            layer = case.bind() if chance.random() < 0.02 else case.layer
            threads = chance.choice([None, None, 1, 2])
            if chance.random() < 0.5:
                out.view(np.uint8).fill(0xA5)
                layer(case.data, out, threads=threads)
            else:
                out = layer(case.data, threads=threads)
            assert out.tobytes() == case.expected.tobytes(), case.problem
            counts[seed] += 1
    except BaseException as error:
        wrong.append(repr(error))
        raise


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def main(directory, seconds):
    library = td.load(directory)
    td.set_num_threads(4)
    cases = [Case(library, problem, seed) for seed, problem in enumerate(made.PROBLEMS.values())]
    start = time.monotonic()
    counts, wrong = [0] * THREADS, []
    arguments = [(cases, seed, start + float(seconds), counts, wrong) for seed in range(THREADS)]
    threads = [threading.Thread(target=call, args=each) for each in arguments]
    for thread in threads:
        thread.start()
    sizes = []
    for quarter in range(1, 5):
        time.sleep(max(0, start + 0.24 * quarter * float(seconds) - time.monotonic()))
        sizes.append(resident())
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    counted = sum(each.calls for each in td.loaded())
    assert counted >= sum(counts) * 0.7, "empty outputs call no kernel, all others count"
    print(json.dumps({"seconds": float(seconds), "calls": sum(counts), "resident": sizes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
