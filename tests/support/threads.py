"""What test scripts that are processes of their own share: several callers, threads of the pool, forked children."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from support.processes import spinning

import tvm_deconv as td


def run_script(script, *arguments, timeout=240):
    """Run a script in a process that can import the package and `support`; it must end well."""
    root = Path(td.__file__).parents[1]
    environment = spinning() | {"PYTHONPATH": f"{root}:{root / 'tests'}"}
    command = [sys.executable, "-W", "ignore:.*fork:DeprecationWarning", "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def call_from_threads(call, times, threads=4):
    """Call a function that many times in each of some threads, and raise the first error."""
    failed = []

    def caller():
        try:
            for _ in range(times):
                call()
        except BaseException as error:
            failed.append(error)

    callers = [threading.Thread(target=caller) for _ in range(threads)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    if failed:
        raise failed[0]


def workers():
    """The number of the launcher's threads."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found += (task / "comm").read_text() == "tvm_deconv\n"
    return found


def pool_starts():
    """Whether they are there soon: they name themselves when they first run."""
    end = time.time() + 20
    while time.time() < end and not workers():
        time.sleep(0.001)
    return workers() > 0


def child_has_the_pool(check):
    """Whether a forked child passes the check, and has the launcher's threads then."""
    child = os.fork()
    if child == 0:
        try:
            check()
            os._exit(0 if pool_starts() else 2)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0
