"""Files that several processes write beside each other."""

import os
import threading

import pytest

from tvm_deconv.artifact import files


def test_writers_beside_each_other(tmp_path, monkeypatch):
    """One looks for what killed ones have left while another ends: what it saw is gone a moment later."""
    seen, ended = threading.Event(), threading.Event()
    listed = files.Path.glob

    def glob(path, pattern):
        found = list(listed(path, pattern))
        if found:
            seen.set()
            assert ended.wait(60)
        return iter(found)

    def other():
        with files.replacing(tmp_path / "other") as unfinished:
            unfinished.write_bytes(b"other")
            begun.set()
            assert seen.wait(60)
        ended.set()

    begun = threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    assert begun.wait(60)
    monkeypatch.setattr(files.Path, "glob", glob)
    files.write(tmp_path / "mine", b"mine")
    thread.join()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"mine": b"mine", "other": b"other"}


@pytest.mark.parametrize("named", [False, True])
def test_a_file_that_there_is_no_room_for_is_named(tmp_path, monkeypatch, named):
    """Python names the file if it cannot be opened, and none if it cannot be written."""

    def write_bytes(path, content):
        with path.open("wb") as file:
            file.write(content[:1])
        raise OSError(28, "No space left on device", *([str(path)] if named else []))

    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(files.Path, "write_bytes", write_bytes)
    with pytest.raises(OSError, match="No space left") as caught:
        files.write(path, b"new")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]


class Interrupt(BaseException):
    """Raised by a signal's handler."""


def test_an_interrupt_while_one_is_handled_closes_nothing_twice(tmp_path, monkeypatch):
    """The number of a closed descriptor may be that of another's file by then."""

    def close(number, closing=os.close):
        monkeypatch.undo()
        closing(number)
        raise Interrupt

    path = tmp_path / "file"
    path.write_bytes(b"old")

    def interrupted():
        with files.replacing(path) as unfinished:
            unfinished.write_bytes(b"new")
            unfinished.with_name("another").write_bytes(b"of a linker")
            monkeypatch.setattr(os, "close", close)
            raise Interrupt

    with pytest.raises(Interrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]
