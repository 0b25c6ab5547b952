"""Measuring on servers of a TVM tracker: processes on loopback, of which some end midway."""

import dataclasses
import json
import subprocess
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from support.fleet import fleet_of, free_port, until

import tvm_deconv as td
from tvm_deconv import tuning
from tvm_deconv.cli import main as cli
from tvm_deconv.compiler.backends import backend_of
from tvm_deconv.compiler.launcher import find_compiler
from tvm_deconv.compiler.process import Worker, WorkerError
from tvm_deconv.compiler.records import Cpu, read
from tvm_deconv.compiler.selection import space
from tvm_deconv.targets import detect_host, native
from tvm_deconv.tuning.builders import Builder
from tvm_deconv.tuning.evaluator import Evaluator
from tvm_deconv.tuning.runners.harness import Baseline
from tvm_deconv.tuning.runners.rpc import RpcRunner
from tvm_deconv.tuning.runners.tracker import Tracker

SMALL = td.Problem(1, 1, 4, 6, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (9, 11))
TARGET = native()


@pytest.fixture
def two_servers():
    with fleet_of({}, test=2) as made:
        yield made


@pytest.fixture
def asked(monkeypatch):
    """The candidates that were measured, what was said of servers that were lost, and what to do before measuring."""
    ask = Worker.ask
    made = SimpleNamespace(measured=[], lost=[], before=lambda _: None)

    def listening(self, method, *arguments, timeout):
        if method != "measure":
            return ask(self, method, *arguments, timeout=timeout)
        made.before(self)
        try:
            answer = ask(self, method, *arguments, timeout=timeout)
        except WorkerError as error:
            made.lost.extend([str(error)] * error.died)
            raise
        made.measured.append(arguments[0].deconv)
        return answer

    monkeypatch.setattr(Worker, "ask", listening)
    return made


@pytest.mark.slow  # on a machine with other work the second server may be lost too
def test_what_a_lost_server_had_is_measured_at_another_and_nothing_twice(two_servers, asked, tmp_path, monkeypatch):
    fleet = two_servers
    monkeypatch.setattr("tvm_deconv.tuning.search._NOTHING", 0.0)  # no search ends before its trials
    tracker = fleet.trackers["test"]
    how = {"jobs": 1, "rpc_tracker": tracker.address, "rpc_key": tracker.key}
    heard = []

    def kept():
        return [record.schedule for record in read(TARGET.name, tmp_path).by_problem[SMALL.artifact_key]]

    doomed = ["one"]

    def kill_one(worker):
        if len(asked.measured) >= 2 and doomed:
            doomed.pop()
            fleet.kill_server_of(worker)

    def interrupt(trial):
        heard.append(trial)
        if trial.done == 5:
            raise KeyboardInterrupt

    asked.before = kill_one
    with pytest.raises(KeyboardInterrupt):
        tuning.tune([SMALL], TARGET.name, 6, tmp_path, on_trial=interrupt, **how)
    assert [trial.record.error for trial in heard] == [""] * 5
    assert {trial.record.host for trial in heard} == {Cpu.of(detect_host())}
    assert heard[-1].floor > 0
    # Once more where the tracker has not noticed yet, and gives it out again.
    assert asked.lost
    assert all("was lost" in said for said in asked.lost), asked.lost
    assert len(tracker.servers()) == 1
    # Every result is kept, that of a candidate which ran at the interrupt too.
    assert {trial.record.schedule for trial in heard} <= set(kept())
    assert len(kept()) == len(asked.measured)

    more = {"trials": 8, "logs": tmp_path, "on_trial": heard.append}
    (outcome,) = td.compile([SMALL], TARGET.name, tmp_path / "made", **more, **how)
    assert outcome.manifest.origin == "tuned"
    assert len(set(kept())) == len(kept()) == 8
    assert len({trial.record.schedule for trial in heard}) == len(heard)

    asked.before = fleet.kill_server_of
    with pytest.raises(td.RemoteError, match=r"rpc_key='test': the tracker 127.0.0.1:\d+ has no server for it"):
        tuning.tune([SMALL], TARGET.name, 9, tmp_path, **how)
    assert len(kept()) == 8


_BAD = """
    #include <stdint.h>
    struct any { int32_t type; uint32_t zero; float **tensor; };
    int __tvm_ffi_deconv(void *self, const struct any *arguments, int32_t count, void *result) {
        float *out = *arguments[2].tensor;
        BODY
        return 0;
    }
"""


def test_a_bad_candidate_is_to_blame_and_its_server_is_not(fleet, asked, tmp_path):
    tracker = fleet.trackers["alone"]
    cc = find_compiler()
    good = Builder(TARGET, tmp_path, backend_of(TARGET).toolchain(tmp_path)).build(
        SMALL.artifact_key, next(space(SMALL, TARGET)).schedule
    )
    baseline = Baseline(SMALL.artifact_key, 0, good)

    def outcome(body, seconds=60.0):
        path = tmp_path / "bad.so"
        command = [cc, "-x", "c", "-shared", "-fPIC", "-o", str(path), "-"]
        subprocess.run(command, input=_BAD.replace("BODY", body), text=True, check=True)
        with pytest.raises(WorkerError) as caught:
            runner.measure(baseline, dataclasses.replace(good, deconv=path), 1.0, seconds)
        assert not caught.value.died
        return str(caught.value)

    with RpcRunner(1, tracker) as runner:
        assert runner.host == detect_host()
        assert runner.places == 1
        assert outcome("").startswith("ArithmeticError: differs from the default by nan")
        assert outcome("out[-1] = 0;") == "ArithmeticError: wrote outside of its output"
        assert outcome("__builtin_trap();") == "RuntimeError: its process at the server ended"
        assert outcome("for (;;) {}", 2.0) == "TimeoutError: did not end within 2 s"
        assert runner.measure(baseline, good, 1.0, 60.0).ratio > 0
        runner._host = dataclasses.replace(runner.host, model=999)
        runner._idle.pop().worker.close(10.0)
        until(tracker.free)
        with pytest.raises(td.RemoteError, match=r"machines of two kinds, .* model 999 .* and"):
            runner.measure(baseline, good, 1.0, 60.0)
    assert asked.lost == []


@pytest.mark.parametrize(("servers", "size"), [(1, 6), (7, 7), (40, 16)])
def test_a_round_has_a_candidate_for_each_server(servers, size):
    runner = RpcRunner.__new__(RpcRunner)
    runner._tracker = SimpleNamespace(servers=lambda: range(servers))
    evaluator = Evaluator.__new__(Evaluator)
    evaluator._jobs, evaluator._runner = 2, runner
    assert evaluator.round_size == size


def command(*arguments):
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments], env={"COLUMNS": None})


@pytest.mark.parametrize("address", ["localhost", "localhost:", ":1", "localhost:x", "localhost:99999", 9190, b"9190"])
def test_an_address_is_host_and_port(address, tmp_path):
    with pytest.raises(td.ProblemError, match="must be HOST:PORT"):
        tuning.tune([SMALL], TARGET.name, 1, tmp_path, rpc_tracker=address, rpc_key="test")


def test_a_port_alone_is_of_this_machine():
    assert Tracker.parse("9190", "key") == Tracker("127.0.0.1", 9190, "key")
    assert Tracker.parse("[::1]:9190", "key") == Tracker("::1", 9190, "key")


@pytest.mark.parametrize(("key", "rule"), [(None, "must be given where rpc_tracker is"), (5, "must be a text")])
def test_a_tracker_without_a_key_is_refused(key, rule, tmp_path):
    with pytest.raises(td.ProblemError, match=f"rpc_key={key}: {rule}"):
        tuning.tune([SMALL], TARGET.name, 1, tmp_path, rpc_tracker="localhost:1", rpc_key=key)


def test_no_tracker_is_one_line(tmp_path):
    source = tmp_path / "small.json"
    source.write_text(json.dumps([{"name": "one", "data": [1, 1, 2, 2], "filter": [1, 1, 1, 2, 2], "strides": [2, 2]}]))
    there = f"127.0.0.1:{free_port()}"
    result = command("tune", source, "--logs", tmp_path / "log", "--rpc-tracker", there, "--rpc-key", "test")
    assert result.exit_code == 1
    assert f"rpc_tracker='{there}': no TVM tracker answers there" in result.stderr


def test_servers_without_trials_have_nothing_to_measure(tmp_path):
    for option, value in (("rpc_tracker", "localhost:1"), ("rpc_key", "test")):
        with pytest.raises(td.ProblemError, match=f"{option}='{value}': must be given with trials"):
            td.compile([SMALL], TARGET.name, tmp_path, **{option: value})
    result = command("compile", tmp_path / "any.json", "--rpc-tracker", "localhost:1", "--rpc-key", "test")
    assert result.exit_code == 2
    assert "--rpc-tracker needs --tune" in result.stderr
