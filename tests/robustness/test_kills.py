"""Killing what writes logs and signatures loses nothing that was written; builds are killed in test_faults."""

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


@pytest.mark.parametrize("what", ["append", "merge", "sign"])
@pytest.mark.parametrize("rounds", [25, pytest.param(1000, marks=pytest.mark.slow)])
def test_killed_writers(tmp_path, what, rounds):
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-W", "error", str(KILLS), what, str(rounds), str(SEED), str(tmp_path / what)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, f"seed {SEED}\n{done.stdout}{done.stderr}"
    assert done.stdout.startswith(f"{rounds} kills")
