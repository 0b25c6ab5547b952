"""Measuring on servers of a TVM tracker: processes on loopback, of which some end midway."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

import tvm_deconv as td
from tvm_deconv import cli, tuning
from tvm_deconv._meters import RemoteMeters
from tvm_deconv._process import Worker, WorkerError
from tvm_deconv._remote import Tracker
from tvm_deconv._workers import Builder
from tvm_deconv.choices import space
from tvm_deconv.launcher import find_compiler, launcher_object
from tvm_deconv.targets import detect_host, native

SMALL = td.Problem(1, 1, 4, 6, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (9, 11))
TARGET = native()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def until(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


class Fleet:
    """A tracker and the servers of one key."""

    def __init__(self):
        self.processes = []
        self.tracker = Tracker("127.0.0.1", free_port(), "test")
        port = str(self.tracker.port)
        self._start("rpc_tracker", "--port", port, "--port-end", str(self.tracker.port + 1))
        until(self.answers)

    def answers(self):
        try:
            return self.tracker.servers() is not None
        except td.RemoteError:
            return False

    def _start(self, module, *arguments):
        command = [sys.executable, "-m", f"tvm.exec.{module}", "--host", "127.0.0.1", *arguments]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self.processes.append(process)
        return process

    def servers(self, count):
        ports, started = [free_port() for _ in range(count)], []
        for port in ports:
            more = ("--port-end", str(port + 1), "--tracker", self.tracker.address, "--key", self.tracker.key)
            started.append(self._start("rpc_server", "--port", str(port), *more))
        until(lambda: {port for _, port in self.tracker.servers()} >= set(ports))
        return started

    def kill(self, process):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                self.kill(process)


@pytest.fixture(scope="module")
def fleet():
    for needed in ("tornado", "cloudpickle", "psutil"):
        pytest.importorskip(needed, reason="TVM's tracker or server needs it")
    made = Fleet()
    yield made
    made.close()


def tune(fleet, trials, logs, **more):
    more = {"jobs": 1, "rpc_tracker": fleet.tracker.address, "rpc_key": fleet.tracker.key} | more
    return tuning.tune([SMALL], TARGET.name, trials, logs, **more)


@pytest.fixture
def lost(monkeypatch):
    """What meters said of servers that they lost."""
    said, ask = [], Worker.ask

    def listening(self, method, *arguments, timeout):
        try:
            return ask(self, method, *arguments, timeout=timeout)
        except WorkerError as error:
            said.extend([str(error)] * error.died)
            raise

    monkeypatch.setattr(Worker, "ask", listening)
    return said


def test_a_server_that_dies_costs_no_candidate_and_the_last_one_is_an_error(fleet, lost, tmp_path):
    servers = fleet.servers(2)
    heard = []

    def on_trial(trial):
        heard.append(trial)
        if trial.done == 2:
            fleet.kill(servers.pop(0))

    (found,) = tune(fleet, 16, tmp_path, on_trial=on_trial)
    assert [trial.record.error for trial in heard] == [""] * 16
    assert {trial.record.host for trial in heard} == {detect_host().name}
    assert found.best.seconds <= found.default.seconds
    assert found.floor > 0
    assert len(lost) == 1
    assert "was lost" in lost[0]
    assert len(fleet.tracker.servers()) == 1
    fleet.kill(servers[0])
    until(lambda: not fleet.tracker.servers())
    with pytest.raises(td.RemoteError, match=r"rpc_key='test': the tracker 127.0.0.1:\d+ has no server for it"):
        tune(fleet, 17, tmp_path)
    (outcome,) = td.compile([SMALL], TARGET.name, tmp_path / "made", logs=tmp_path)
    assert outcome.manifest.origin == "tuned"


_BAD = """
    #include <stdint.h>
    struct any { int32_t type; uint32_t zero; float **tensor; };
    int __tvm_ffi_deconv(void *self, const struct any *arguments, int32_t count, void *result) {
        float *out = *arguments[2].tensor;
        BODY
        return 0;
    }
"""


def test_a_bad_candidate_is_to_blame_and_its_server_is_not(fleet, lost, tmp_path):
    (server,) = fleet.servers(1)
    cc = find_compiler()
    good = Builder(TARGET.name, tmp_path, cc, launcher_object(cc, tmp_path)).build(
        SMALL.artifact_key, space(SMALL, TARGET)[0].schedule
    )

    def outcome(body):
        path = tmp_path / "bad.so"
        command = [cc, "-x", "c", "-shared", "-fPIC", "-o", str(path), "-"]
        subprocess.run(command, input=_BAD.replace("BODY", body), text=True, check=True)
        with pytest.raises(WorkerError) as caught:
            meters.measure(SMALL.artifact_key, 0, good, dataclasses.replace(good, deconv=path), 1.0, 2.0)
        assert not caught.value.died
        return str(caught.value)

    with RemoteMeters(1, fleet.tracker) as meters:
        assert meters.host == detect_host()
        assert outcome("").startswith("ArithmeticError: differs from the default by nan")
        assert outcome("out[-1] = 0;") == "ArithmeticError: wrote outside of its output"
        assert outcome("__builtin_trap();") == "RuntimeError: its process at the server ended"
        assert outcome("for (;;) {}") == "TimeoutError: did not end within 2 s"
        assert meters.measure(SMALL.artifact_key, 0, good, good, 1.0, 30.0).seconds > 0
        meters._host = dataclasses.replace(meters.host, name="another CPU")
        meters._idle.pop().worker.close(10.0)
        until(fleet.tracker.free)
        with pytest.raises(td.RemoteError, match="machines of two kinds, another CPU and"):
            meters.measure(SMALL.artifact_key, 0, good, good, 1.0, 30.0)
    assert lost == []
    fleet.kill(server)


def command(*arguments):
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments], env={"COLUMNS": None})


@pytest.mark.parametrize("address", ["localhost", "localhost:", ":1", "localhost:x", "localhost:99999"])
def test_an_address_is_host_and_port(address, tmp_path):
    with pytest.raises(td.ProblemError, match="must be HOST:PORT"):
        tuning.tune([SMALL], TARGET.name, 1, tmp_path, rpc_tracker=address, rpc_key="test")


def test_a_tracker_without_a_key_is_refused(tmp_path):
    with pytest.raises(td.ProblemError, match="rpc_key=None: must be given where rpc_tracker is"):
        tuning.tune([SMALL], TARGET.name, 1, tmp_path, rpc_tracker="localhost:1")


def test_no_tracker_is_one_line(tmp_path):
    source = tmp_path / "small.json"
    source.write_text(json.dumps([{"name": "one", "data": [1, 1, 2, 2], "filter": [1, 1, 1, 2, 2], "strides": [2, 2]}]))
    there = f"127.0.0.1:{free_port()}"
    result = command("tune", source, "--logs", tmp_path / "log", "--rpc-tracker", there, "--rpc-key", "test")
    assert result.exit_code == 1
    assert f"rpc_tracker='{there}': no TVM tracker answers there" in result.stderr
