"""Writers of tuning logs and signatures that are killed: run by `test_kills` in a process of its own, which may fork.

    kills.py append|merge|sign|tune ROUNDS SEED DIRECTORY

Every round a child does its work until it is killed, at a random moment; then what must hold is asserted. Prints how
many unfinished files they left.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from support.manifests import fields

from tvm_deconv.artifact import files, signing
from tvm_deconv.artifact.manifest import Manifest
from tvm_deconv.compiler.records import Cpu, Log, Record, read
from tvm_deconv.errors import IntegrityError

TARGET = "x86-64-v3"
PROBLEM = Manifest(**fields()).problem
LONGEST = 0.1  # seconds that a child lives


def record(number: int) -> Record:
    """A record of a trial of its own."""
    return Record(
        problem=PROBLEM,
        target=TARGET,
        algorithm="direct_rows",
        knobs={"height": number},
        seconds=1e-3,
        spread=0.01,
        runs=9,
        error="",
        threads=1,
        host=CPU,
        sources="00" * 32,
        commit="",
        versions={},
        seed=0,
        when="2026-01-01T00:00:00+00:00",
    )


CPU = Cpu(name="some CPU", vendor="vendor", family=1, model=1, stepping=1, microarchitecture="zen4")


def killed(work: Callable[[int], None], rng: random.Random, longest: float = LONGEST) -> list[int]:
    """Do `work(0)`, `work(1)`, ... in a child until it is killed; return the numbers of what it had done before."""
    theirs, ours = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            number = 0
            while True:
                work(number)
                os.write(ours, number.to_bytes(4, "big"))
                number += 1
        finally:
            os._exit(1)
    os.close(ours)
    time.sleep(rng.random() * longest)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the child ended by itself"
    done = b""
    while part := os.read(theirs, 1 << 16):
        done += part
    os.close(theirs)
    return [int.from_bytes(done[at : at + 4], "big") for at in range(0, len(done), 4)]


def present(root: Path) -> tuple[set[int], list[str]]:
    """The numbers of the records in a log, and the warnings."""
    found = read(TARGET, root)
    return {each.knobs["height"] for each in found.by_problem.get(PROBLEM, ())}, found.warnings


def append(root: Path, rng: random.Random, wanted: set[int]) -> None:
    """No record that was written is lost, and a half-written line costs itself only."""
    if len(wanted) > 300:
        Log(root).file(PROBLEM, TARGET).unlink()
        wanted.clear()
    first = max(wanted, default=-1) + 1
    done = killed(lambda number: Log(root).append(record(first + number)), rng)
    wanted |= {first + number for number in done}
    found, warnings = present(root)
    assert wanted <= found
    assert len(found - wanted) <= 1, "only the last may be there without having been told of"
    assert len(warnings) <= 1
    wanted |= found
    Log(root).append(record(max(wanted, default=-1) + 1))
    wanted.add(max(wanted, default=-1) + 1)
    Log(root).tidy(PROBLEM, TARGET)
    assert present(root) == (wanted, [])


def merge(root: Path, rng: random.Random, wanted: set[int]) -> None:
    """A merge adds all of its records or none."""
    groups = [[rng.randrange(2_000) for _ in range(rng.randrange(1, 40))] for _ in range(200)]
    done = killed(lambda number: Log(root).merge(map(record, groups[number % 200])), rng)
    wanted |= {each for number in done for each in groups[number % 200]}
    found, warnings = present(root)
    assert not warnings
    assert found in (wanted, wanted | set(groups[(max(done, default=-1) + 1) % 200]))
    wanted |= found
    if len(wanted) > 1000:
        Log(root).file(PROBLEM, TARGET).unlink()
        wanted.clear()


def sign(root: Path, rng: random.Random, wanted: set[int]) -> None:
    """The signature is the old one or the new one."""
    if not wanted:
        for number in range(2):
            key = ed25519.Ed25519PrivateKey.generate()
            (root / f"{number}.pem").write_bytes(
                key.private_bytes(
                    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
                )
            )
            (root / f"{number}.public").write_bytes(
                key.public_key().public_bytes(
                    serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
                )
            )
        signing.sign(root, "digest", root / "0.pem")
        wanted.add(0)
    killed(lambda number: signing.sign(root, "digest", root / f"{number % 2}.pem") and None, rng)
    assert sum(signed_by(root, number) for number in range(2)) == 1


def signed_by(root: Path, number: int) -> bool:
    """Tell whether the signature is whole and of this key."""
    try:
        signing.check(root, "digest", root / f"{number}.public")
    except IntegrityError:
        return False
    return True


def main(what: str, rounds: str, seed: str, directory: str) -> None:
    """Kill the writers; print what was left."""
    root, rng, wanted, left = Path(directory), random.Random(int(seed)), set(), 0
    root.mkdir(exist_ok=True)
    if what == "tune":  # which imports TVM
        from support.killed_searches import tune as work
    else:
        work = {"append": append, "merge": merge, "sign": sign}[what]
    for _ in range(int(rounds)):
        work(root, rng, wanted)
        for path in root.rglob(".unfinished-*"):  # as if hours had passed
            left += 1
            os.utime(path, (0, 0))
    last = root / "last"
    files.write(last, b"")
    assert not list(root.glob(".unfinished-*")), "the next writer removes what killed ones left"
    print(f"{rounds} kills left {left} unfinished files")


if __name__ == "__main__":
    main(*sys.argv[1:])
