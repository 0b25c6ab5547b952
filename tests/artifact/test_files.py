"""Files that several processes write beside each other."""

import threading

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
