"""What versions promise each other (docs/versions.md): older formats are served, newer ones are refused by name.

`formats/N.tar.xz` has an artifact as the version wrote it whose format was N (`scripts/keep_format.py`).
"""

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from support.strategies import operands
from support.tolerances import assert_close

import tvm_deconv as td
from tvm_deconv.artifact.manifest import FORMAT, Manifest

FORMATS = Path(__file__).parent / "formats"
KEPT = sorted(int(path.name.partition(".")[0]) for path in FORMATS.glob("*.tar.xz"))


@pytest.fixture(params=KEPT, ids="format {}".format)
def kept(request, tmp_path):
    """A directory with the artifact of an older version."""
    with tarfile.open(FORMATS / f"{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path / "kept", filter="data")
    return tmp_path / "kept"


def manifest_in(directory):
    (path,) = directory.glob("*.json")
    return path, Manifest.read(path)


def assert_served(directory, problem):
    """The artifact computes what the reference does, into every element of an output."""
    seed = int(np.random.default_rng().integers(2**31))
    data, filter, bias = operands(problem, seed)
    out = np.full(problem.output_shape, np.nan, np.float32)
    td.load(directory).bind(problem, filter, bias)(data, out=out)
    assert_close(out, td.reference(problem, data, filter, bias), message=f"seed {seed}")


def test_an_artifact_of_every_earlier_format_is_kept():
    assert set(range(1, FORMAT)) <= set(KEPT) <= set(range(1, FORMAT + 1))
    assert KEPT


def test_older_artifacts_are_served(kept):
    assert_served(kept, manifest_in(kept)[1].parsed)


def test_an_older_manifest_is_read_and_written_as_it_is(kept):
    path, manifest = manifest_in(kept)
    assert manifest.to_json() == path.read_text(encoding="utf-8")
    assert manifest.format == int(json.loads(path.read_text())["format"])


@pytest.mark.usefixtures("compiles_here")
def test_a_build_replaces_an_older_artifact(kept):
    path, older = manifest_in(kept)
    td.compile([older.parsed], target=older.target, output=kept)
    assert [each.name for each in kept.glob("*.json")] == [path.name]
    assert Manifest.read(path).format == FORMAT
    assert_served(kept, older.parsed)


def written_by_a_newer_version(path):
    """Make the manifest at `path` one of a format to come, which has other fields, and means other things by some."""
    values = json.loads(path.read_text()) | {"format": FORMAT + 1, "problem": ["conv", 1], "loads": {"threads": 2}}
    del values["library"]
    path.write_text(json.dumps(values))


@pytest.fixture
def mixed(artifacts, tmp_path):
    """Artifacts of this version beside one of a newer, the problem of the latter, and one of the others."""
    directory = shutil.copytree(artifacts, tmp_path / "mixed")
    first, second, *_ = sorted(directory.glob("*.json"))
    problems = [Manifest.read(path).parsed for path in (first, second)]
    written_by_a_newer_version(first)
    return directory, first, *problems


def test_a_newer_artifact_is_refused_by_its_number(mixed):
    directory, _, refused, served = mixed
    rule = f"format={FORMAT + 1}: must be at most {FORMAT}: a newer version wrote it, upgrade this one"
    library = td.load(directory)
    assert rule in library.explain(refused)
    with pytest.raises(td.NoArtifactError, match=rule):
        library.bind(refused, operands(refused)[1])
    data, filter, bias = operands(served)
    found = library.bind(served, filter, bias)(data)
    assert_close(found, td.reference(served, data, filter, bias), served.dtype)


@pytest.mark.usefixtures("compiles_here")
def test_a_build_replaces_a_newer_artifact(mixed):
    directory, path, refused, _ = mixed
    td.compile([refused], target="x86-64-v3", output=directory)
    assert Manifest.read(path).format == FORMAT
