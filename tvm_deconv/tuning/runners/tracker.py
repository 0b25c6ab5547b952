"""A TVM tracker (`tvm.exec.rpc_tracker`), which knows servers by a key."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from tvm_deconv.errors import ProblemError, RemoteError

T = TypeVar("T")
_MOST_BYTES = 16 << 20  # of an answer
ANSWER_SECONDS = 5.0  # within which a tracker answers, and a server that has nothing else to do


class Tracker(NamedTuple):
    """The address of a tracker, and the key that its servers are asked for by. All queries raise RemoteError."""

    host: str
    port: int
    key: str

    @staticmethod
    def parse(address: str, key: str) -> Tracker:
        """Read HOST:PORT; a PORT alone is one of this machine. Raises ProblemError."""
        if not isinstance(key, str):
            raise ProblemError("rpc_key", key, "must be a text")
        host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        if not colon:
            host = "127.0.0.1"
        if not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise ProblemError("rpc_tracker", address, "must be HOST:PORT, or PORT on this machine")
        return Tracker(host.strip("[]"), int(port), key)

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"{self.host}:{self.port}"

    def servers(self) -> set[tuple[str, int]]:
        """Return the addresses of the servers with this key, including those in use."""

        def read(summary: Any) -> set[tuple[str, int]]:
            ours = [server for server in summary["server_info"] if server["key"] == f"server:{self.key}"]
            return {_address(server["addr"][0], server["addr"][1]) for server in ours}

        return self._ask(read, "SUMMARY")

    def free(self) -> int:
        """Return the number of servers that wait for a session."""
        return self._ask(lambda summary: int(summary["queue_info"].get(self.key, {"free": 0})["free"]), "SUMMARY")

    def request(self) -> tuple[str, int, str]:
        """Take a free server; return its host, its port, and the key by which it knows its next client."""

        def read(answer: Any) -> tuple[str, int, str]:
            host, port, match = answer
            return (*_address(host, port), str(match))

        return self._ask(read, "REQUEST", self.key, "", 1)

    def _ask(self, read: Callable[[Any], T], code: str, *message: object) -> T:
        """Return what `read` makes of the tracker's answer."""
        from tvm.rpc import base

        try:
            with socket.create_connection((self.host, self.port), timeout=ANSWER_SECONDS) as connection:
                connection.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
                if struct.unpack("<i", base.recvall(connection, 4))[0] != base.RPC_TRACKER_MAGIC:
                    raise OSError("another program answers")
                base.sendjson(connection, [getattr(base.TrackerCode, code), *message])
                (size,) = struct.unpack("<i", base.recvall(connection, 4))
                if not 0 <= size <= _MOST_BYTES:
                    raise OSError(f"an answer of {size} bytes")
                succeeded, answer = json.loads(base.recvall(connection, size))
            if succeeded != base.TrackerCode.SUCCESS:
                raise ValueError(f"it refuses: {answer!r}")
            return read(answer)
        # Whoever listens there may answer anything.
        except (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
            raise RemoteError("rpc_tracker", self.address, f"no TVM tracker answers there: {error}") from error


def _address(host: object, port: object) -> tuple[str, int]:
    """Return the address of a server as a tracker gives it. Raises ValueError."""
    if not isinstance(host, str) or type(port) is not int or not 0 < port < 1 << 16:
        raise ValueError(f"{host!r}:{port!r} is no address")
    return host, port
