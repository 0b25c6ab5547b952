"""What an error shows of the value that is wrong."""

from __future__ import annotations

from pathlib import Path

from tvm_deconv.errors import ArtifactError, ProblemError


def test_a_path_is_shown_whole():
    path = Path("/", "folder" * 40, "artifact.so")
    assert str(ArtifactError(path, "must be readable")) == f"path={path}: must be readable"


def test_another_value_is_cut():
    assert str(ProblemError("strides", "1" * 1000, "must be integers")) == f"strides='{'1' * 116}...: must be integers"
