"""Settings of hypothesis, and the compiled artifacts that the tests of the runtime share.

If CI is set, hypothesis draws the same examples every time, so that a change is judged by itself, and half as many
where a test does not say how many. Otherwise it draws new ones. Processes that tests start can be interrupted, even in
the background of a shell, which ignores interrupts.

Python looks for unreachable circles of objects less often than it would: TVM makes so many objects that this took tests
of schedules an eighth of their time. Nearly all objects go without it, so that as much memory is in use.

OpenMP's threads, which are PyTorch's, sleep while they wait: several processes test at once, and threads that spin
would take the processors from the others. Scripts that test threads leave this out (`support.processes.spinning`).
"""

import functools
import gc
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

SAME = "CI" in os.environ
settings.register_profile(
    "default",
    max_examples=50 if SAME else 100,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=SAME,
)
settings.load_profile("default")

gc.set_threshold(50_000)  # objects that are new; 700 by default

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before anything loads OpenMP

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # what a process inherits; a handler it does not
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def shared(tmp_path_factory):
    """A folder that all processes of pytest-xdist have in common; those that they start know it too."""
    from support.once import SHARED

    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    os.environ[SHARED] = str(root)
    return root


@pytest.fixture(scope="session")
def export_once(shared):
    """Like `artifacts.export`, for problems that several tests have: what one has compiled, the others copy."""
    from support import artifacts as made

    pool = shared / "pool"
    pool.mkdir(exist_ok=True)
    return functools.partial(made.export_once, pool)


@pytest.fixture
def compiles_here():
    """`td.compile` builds in this process; tests whose subject is the process do without."""
    from support.here import compiling_here

    with compiling_here():
        yield


@pytest.fixture
def searches_here():
    """Searches compile candidates in this process, and measure in others; see `compiles_here`."""
    from support.here import searching_here

    with searching_here():
        yield


@pytest.fixture(scope="session")
def artifacts():
    """A directory with an artifact for each of `artifacts.PROBLEMS`, made once for all processes of pytest-xdist."""
    from support import artifacts as made
    from support.once import made_once

    return made_once("artifacts", lambda folder: made.export(folder, made.PROBLEMS.values()))
