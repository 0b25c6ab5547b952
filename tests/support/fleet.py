"""A TVM tracker and its servers: processes on loopback."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from support.processes import without_torch

import tvm_deconv as td
from tvm_deconv.tuning.runners.tracker import Tracker


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
    """A tracker and its servers, all started at the same time, without torch, which TVM would import for seconds.

    There are as many `servers` as their keys say, which have these `variables`.
    """

    def __init__(self, variables, **servers):
        self.processes = []
        self.environment = without_torch()
        port = free_port()
        self.trackers = {key: Tracker("127.0.0.1", port, key) for key in servers}
        self._start({}, "rpc_tracker", "--port", str(port), "--port-end", str(port + 1))
        self.servers = {}
        for key, count in servers.items():
            for _ in range(count):
                port = free_port()
                more = ("--port-end", str(port + 1), "--tracker", self.trackers[key].address, "--key", key)
                self.servers[port] = self._start(variables, "rpc_server", "--port", str(port), *more)
        until(lambda: self.known() == set(self.servers))

    def _start(self, variables, module, *arguments):
        command = [sys.executable, "-m", f"tvm.exec.{module}", "--host", "127.0.0.1", *arguments]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, **silent, env=self.environment | variables, start_new_session=True)
        self.processes.append(process)
        return process

    def known(self):
        """The ports of the servers that the tracker knows, none where it does not answer."""
        try:
            return {port for tracker in self.trackers.values() for _, port in tracker.servers()}
        except td.RemoteError:
            return set()

    def kill_server_of(self, worker):
        """Kill the server that a runner's process has a session with."""
        import psutil

        connections = psutil.Process(worker._process.pid).net_connections("tcp")
        (port,) = {connection.raddr.port for connection in connections if connection.raddr} & set(self.servers)
        kill(self.servers.pop(port))

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                kill(process)


def kill(process):
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def fleet_of(variables, **servers):
    """A fleet that ends with the context; a test without what TVM's programs need is skipped."""
    for needed in ("tornado", "cloudpickle", "psutil"):
        pytest.importorskip(needed, reason="TVM's tracker or server needs it")
    made = Fleet(variables, **servers)
    try:
        yield made
    finally:
        made.close()
