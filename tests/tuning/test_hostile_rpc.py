"""A tracker that answers anything: an error of ours, or an answer."""

import contextlib
import json
import socket
import struct
import threading

import pytest
from hypothesis import strategies as st
from support.hostile import EDITS, edit, edited, fit_to_print, hostile, spoil, texts

import tvm_deconv as td
from tvm_deconv.tuning.runners.tracker import Tracker

MAGIC = struct.pack("<i", 0x2F271)
SUMMARY = [
    0,
    {
        "queue_info": {"test": {"free": 1, "pending": 0}},
        "server_info": [{"key": "server:test", "addr": ["127.0.0.1", 9090]}],
    },
]
REQUEST = [0, ["127.0.0.1", 9090, "test:0.5"]]


class Tracked:
    """A listener on loopback that answers every call with `answer`, and then hangs up."""

    def __init__(self):
        self.answer = b""
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.tracker = Tracker("127.0.0.1", self.listener.getsockname()[1], "test")
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.sendall(self.answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass


@pytest.fixture
def tracked():
    pytest.importorskip("tvm.rpc", reason="the protocol is TVM's")
    made = Tracked()
    yield made
    made.listener.close()


def framed(text):
    return MAGIC + struct.pack("<i", len(text)) + text


ANSWERS = st.one_of(
    texts(SUMMARY).map(framed),
    texts(REQUEST).map(framed),
    st.builds(edited, st.just(framed(json.dumps(SUMMARY).encode())), EDITS),
    st.binary(max_size=30),
    st.binary(max_size=30).map(lambda text: MAGIC + text),
)


def other_answer(chance, answer):
    """The frame edited, or what is in it spoilt."""
    return edit(chance, answer) if chance.random() < 0.3 else framed(spoil(chance, answer[8:]))


@hostile(ANSWERS, fixture="tracked", vary=other_answer)
def test_trackers(tracked, answer):
    tracked.answer = answer
    for ask in (tracked.tracker.servers, tracked.tracker.free, tracked.tracker.request):
        try:
            ask()
        except td.RemoteError as error:
            fit_to_print(str(error))


def test_an_honest_tracker(tracked):
    tracked.answer = framed(json.dumps(SUMMARY).encode())
    assert tracked.tracker.servers() == {("127.0.0.1", 9090)}
    assert tracked.tracker.free() == 1
    tracked.answer = framed(json.dumps(REQUEST).encode())
    assert tracked.tracker.request() == ("127.0.0.1", 9090, "test:0.5")
