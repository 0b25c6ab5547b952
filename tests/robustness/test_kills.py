"""Killed searches and writers of logs and signatures lose nothing that was written; killed builds: test_faults."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import tvm_deconv as td

pytest.importorskip("cryptography")
ROOT = Path(td.__file__).parents[1]
KILLS = ROOT / "tests" / "support" / "kills.py"
SEED = random.SystemRandom().randrange(1 << 32)


@pytest.mark.parametrize(("what", "some"), [("append", 25), ("merge", 25), ("sign", 25), ("tune", 5)])
@pytest.mark.parametrize("rounds", [None, pytest.param(1000, marks=pytest.mark.slow)])
def test_killed_writers(tmp_path, what, some, rounds):
    rounds = rounds or some
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-W", "error", str(KILLS), what, str(rounds), str(SEED), str(tmp_path / what)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, f"seed {SEED}\n{done.stdout}{done.stderr}"
    assert done.stdout.startswith(f"{rounds} kills")
