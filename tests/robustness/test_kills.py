"""Writers of logs and signatures, and searches, that are killed or interrupted lose nothing; builds: test_faults."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import without_torch

import tvm_deconv as td

pytest.importorskip("cryptography")
ROOT = Path(td.__file__).parents[1]
KILLS = ROOT / "tests" / "support" / "kills.py"
SEED = random.SystemRandom().randrange(1 << 32)


@pytest.mark.parametrize(("what", "some"), [("append", 25), ("merge", 25), ("sign", 25), ("tune", 5)])
@pytest.mark.parametrize("rounds", [None, pytest.param(1000, marks=pytest.mark.slow)])
def test_killed_writers(tmp_path, what, some, rounds):
    rounds = rounds or some
    command = [sys.executable, "-W", "error", str(KILLS), what, str(rounds), str(SEED), str(tmp_path / what)]
    done = subprocess.run(command, env=without_torch(), capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, f"seed {SEED}\n{done.stdout}{done.stderr}"
    assert done.stdout.startswith(f"{rounds} kills")


STORM = """
import os, random, signal, sys
from pathlib import Path
from support.kills import PROBLEM, TARGET, present, record
from tvm_deconv.artifact import files
from tvm_deconv.compiler.output import clean
from tvm_deconv.compiler.records import Log

class Interrupt(BaseException):
    pass

def interrupt(_, frame):
    while frame is not None:
        if frame.f_code is work.__code__:
            raise Interrupt
        frame = frame.f_back

root, chance, wanted, numbers = Path(sys.argv[1]), random.Random(int(sys.argv[3])), set(), iter(range(1 << 30))
log = Log(root / "log")

def work():
    appended, merged = next(numbers), next(numbers)
    log.append(record(appended))
    wanted.add(appended)
    log.merge([record(merged)])
    wanted.add(merged)
    log.tidy(PROBLEM, TARGET)
    files.write(root / "file", b"%09d." % merged * 1000)
    clean(root)

signal.signal(signal.SIGALRM, interrupt)
work()
for _ in range(int(sys.argv[2])):
    try:
        # The second, if there is one, comes while the first is handled.
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(5e-5, 6e-3), chance.choice([0, 0, 2e-4]))
        work()
    except Interrupt:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    found, warnings = present(log.root)
    assert wanted <= found, wanted - found
    assert len(warnings) <= 1
    content = (root / "file").read_bytes()
    assert len(content) == 10_000 and len(set(content.split(b"."))) == 2
    if len(found) > 100:
        log.file(PROBLEM, TARGET).unlink()
        wanted.clear()
work()  # no lock is left, and it does not wait
assert len(os.listdir("/proc/self/fd")) < 20
"""


@pytest.mark.parametrize("interrupts", [500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_interrupted_writers(tmp_path, interrupts):
    """Interrupts at any moment: what was written is there, files are whole, and locks are free."""
    command = [sys.executable, "-c", STORM, str(tmp_path), str(interrupts), str(SEED)]
    done = subprocess.run(command, env=without_torch(), capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, f"seed {SEED}\n{done.stderr}"
