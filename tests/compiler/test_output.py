"""The directory that artifacts are built into."""

from pathlib import Path

from tvm_deconv.compiler.output import scratch_folder


def test_a_build_that_ends_meanwhile_is_no_failure(tmp_path, monkeypatch):
    """Its directory was listed as one that a killed build may have left, and is gone before its lock is opened."""
    gone, listed = tmp_path / ".building-gone", Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [*listed(path, pattern), gone])
    with scratch_folder(tmp_path) as scratch:
        assert scratch.is_dir()
    assert not scratch.exists()
    assert not gone.exists()
