"""A TVM tracker (`tvm.exec.rpc_tracker`), which knows servers by a key."""

from __future__ import annotations

import socket
import struct
from typing import Any, NamedTuple

from tvm_deconv.errors import ProblemError, RemoteError

ANSWER_SECONDS = 5.0  # within which a tracker answers, and a server that has nothing else to do


class Tracker(NamedTuple):
    """The address of a tracker, and the key that its servers are asked for by. All queries raise RemoteError."""

    host: str
    port: int
    key: str

    @staticmethod
    def parse(address: str, key: str) -> Tracker:
        """Read HOST:PORT. Raises ProblemError."""
        host, colon, port = address.rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise ProblemError("rpc_tracker", address, "must be HOST:PORT")
        return Tracker(host.strip("[]"), int(port), key)

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"{self.host}:{self.port}"

    def servers(self) -> set[tuple[str, int]]:
        """Return the addresses of the servers with this key, including those in use."""
        servers = self._ask("SUMMARY")["server_info"]
        key = f"server:{self.key}"
        return {(server["addr"][0], server["addr"][1]) for server in servers if server["key"] == key}

    def free(self) -> int:
        """Return the number of servers that wait for a session."""
        return int(self._ask("SUMMARY")["queue_info"].get(self.key, {"free": 0})["free"])

    def request(self) -> tuple[str, int, str]:
        """Take a free server; return its host, its port, and the key by which it knows its next client."""
        host, port, match = self._ask("REQUEST", self.key, "", 1)
        return host, port, match

    def _ask(self, code: str, *message: object) -> Any:
        from tvm.rpc import base

        try:
            with socket.create_connection((self.host, self.port), timeout=ANSWER_SECONDS) as connection:
                connection.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
                if struct.unpack("<i", base.recvall(connection, 4))[0] != base.RPC_TRACKER_MAGIC:
                    raise OSError("another program answers")
                base.sendjson(connection, [getattr(base.TrackerCode, code), *message])
                succeeded, answer = base.recvjson(connection)
        except (OSError, ValueError) as error:
            raise RemoteError("rpc_tracker", self.address, f"no TVM tracker answers there: {error}") from error
        assert succeeded == base.TrackerCode.SUCCESS
        return answer
