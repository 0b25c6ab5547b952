"""The library between a framework and artifacts: loaded once, its file there as long as the process."""

import subprocess
from pathlib import Path

from support.threads import run_script

from tvm_deconv.compiler.launcher import find_compiler

SCRIPT = """
import atexit, os, sys, threading
from pathlib import Path
from support.threads import call_from_threads
from tvm_deconv.runtime.bridge import Bridge

made = []

def content():
    made.append(1)
    return Path(sys.argv[1]).read_bytes()

bridge = Bridge(lambda library: made.append(library.answer()))
try:
    bridge.get(lambda: b"no library")
except OSError:
    pass
assert not made
call_from_threads(lambda: bridge.get(content), 3)
assert made == [1, 42], made
library = bridge.get(content)
inside, leave = threading.Event(), threading.Event()

def slow():
    inside.set()
    leave.wait()
    return content()

other = Bridge(lambda library: None)
thread = threading.Thread(target=other.get, args=[slow])
thread.start()
inside.wait()
child = os.fork()  # while a thread holds the lock
if child == 0:
    found = other.get(content).answer() == 42
    atexit._run_exitfuncs()
    os._exit(0 if found else 1)
assert os.waitpid(child, 0)[1] == 0
leave.set()
thread.join()
assert Path(library._name).exists()  # it is not the child's to remove
print(library._name)
"""


def test_a_bridge(tmp_path):
    source = tmp_path / "answer.c"
    source.write_text("int answer(void) { return 42; }\n")
    library = tmp_path / "answer.so"
    subprocess.run([find_compiler(), "-x", "c", "-shared", "-fPIC", source, "-o", library], check=True)
    name = run_script(SCRIPT, library).strip()
    assert not Path(name).parent.exists()
