"""One file to deploy: what it holds, what is loaded from it, and files that are something else."""

import contextlib
import os
import shutil
import struct
import zipfile

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support import artifacts as made
from support.keys import write_keys
from support.strategies import operands
from support.tolerances import assert_close

import tvm_deconv as td
from tvm_deconv.artifact import pack, signing
from tvm_deconv.cli.main import main
from tvm_deconv.frontends import FoundLayer, write_weights
from tvm_deconv.runtime.packing import pack_library
from tvm_deconv.runtime.process import PROCESS

P = made.PLAIN


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def directory(artifacts, tmp_path):
    """A copy of the artifacts, with weights."""
    copy = shutil.copytree(artifacts, tmp_path / "copy")
    _, filter, bias = operands(made.PROBLEMS["bias"], 3)
    write_weights([FoundLayer("up", "ConvTranspose", made.PROBLEMS["bias"], filter, bias)], copy / "m.safetensors")
    return copy


@pytest.fixture
def packed(directory, tmp_path):
    result = run("pack", directory, "-o", tmp_path / "model.tdl")
    assert result.exit_code == 0, result.output
    assert f"{len(made.PROBLEMS)} artifacts" in result.stdout
    return tmp_path / "model.tdl"


def assert_right(library, problem, seed=None):
    data, filter, bias = operands(problem, np.random.default_rng().integers(2**31) if seed is None else seed)
    output = library.bind(problem, filter, bias)(data)
    assert_close(output, td.reference(problem, data, filter, bias), problem.dtype)


def test_what_it_holds(packed, directory):
    with zipfile.ZipFile(packed) as archive:
        names = archive.namelist()
        assert not archive.testzip()
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
        assert all(archive.read(name) == (directory / name).read_bytes() for name in names)
    kinds = [name.rpartition(".")[2] for name in names]
    count = len(made.PROBLEMS)
    assert kinds == ["json"] * count + ["so"] * count + ["safetensors"]


def test_packed_again_it_is_the_same_file(packed, directory, tmp_path):
    for path in directory.iterdir():
        os.utime(path, (0, 0))
    assert run("pack", directory, "--output", tmp_path / "again.tdl").exit_code == 0
    assert (tmp_path / "again.tdl").read_bytes() == packed.read_bytes()


def test_it_is_loaded_where_it_lies(packed, directory, monkeypatch, tmp_path):
    digest = td.load(directory).digest
    shutil.rmtree(directory)
    monkeypatch.setattr(PROCESS, "artifacts", {})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    library = td.load(packed, digest=digest)
    assert library.digest == digest
    for problem in made.PROBLEMS.values():
        assert_right(library, problem)
    assert list(library) == ["up"]
    data, filter, bias = operands(made.PROBLEMS["bias"], 3)
    assert_close(library.layer("up")(data), td.reference(made.PROBLEMS["bias"], data, filter, bias))
    assert {loaded.path.rpartition("/")[0] for loaded in td.loaded()} == {str(packed)}
    assert sorted(path.name for path in tmp_path.iterdir()) == [packed.name]


def test_the_commands_take_it(packed):
    assert f"{len(made.PROBLEMS)} ok, 0 failed" in run("verify", packed).stderr
    assert f"{len(made.PROBLEMS)} artifacts, 0 broken" in run("inspect", packed).stderr
    assert run("doctor", packed).stdout.count("serves this problem and this CPU") == len(made.PROBLEMS)
    result = run("sign", packed, "--key", packed)
    assert result.exit_code == 2
    assert "is a file" in result.stderr


def test_it_is_signed_as_the_directory_is(directory, tmp_path):
    private, public = write_keys(tmp_path, "key")
    _, others = write_keys(tmp_path, "other")
    assert run("sign", directory, "--key", private).exit_code == 0
    assert run("pack", directory, "-o", tmp_path / "m.tdl").exit_code == 0
    library = td.load(tmp_path / "m.tdl", public_key=public)
    assert_right(library, P)
    assert list(library) == ["up"]
    with pytest.raises(td.IntegrityError, match="must be made with the key"):
        td.load(tmp_path / "m.tdl", public_key=others)
    with pytest.raises(td.IntegrityError, match=r"must be sha256:.*, which was asked for"):
        td.load(tmp_path / "m.tdl", digest="sha256:" + "0" * 64)
    signed = signing.FILE
    (directory / signed).unlink()
    assert run("pack", directory, "-o", tmp_path / "m.tdl").exit_code == 0
    with pytest.raises(td.IntegrityError, match=rf"must be readable: .*No such file.*{signed}"):
        td.load(tmp_path / "m.tdl", public_key=public)


def test_another_takes_its_place(packed, directory, monkeypatch):
    """A library that was read before follows, as it does where a directory is built again."""
    monkeypatch.setattr(PROCESS, "artifacts", {})
    library, pinned = td.load(packed), td.load(packed, digest=td.load(packed).digest)
    content = made.file(directory, P, ".so").read_bytes()
    made.rewrite(directory, P, content=content + b"\0")
    assert run("pack", directory, "-o", packed).exit_code == 0
    assert_right(library, P)
    with pytest.raises(td.ArtifactError, match="No such file"):
        pinned.bind(P, operands(P)[1])


# ---- what is not packed ----


def left(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir() if path.name != "copy")


def spoilt_library(directory):
    path = made.file(directory, P, ".so")
    path.write_bytes(path.read_bytes()[:-1])


def spoilt_manifest(directory):
    made.file(directory, P, ".json").write_text("{}")


def promised(directory):
    made.rewrite(directory, P, needs={})


@pytest.mark.parametrize(
    ("spoil", "said"), [(spoilt_library, "size="), (spoilt_manifest, "format="), (promised, "needs.GLIBC=")]
)
def test_what_is_broken_is_not_packed(directory, tmp_path, spoil, said):
    spoil(directory)
    result = run("pack", directory, "-o", tmp_path / "model.tdl")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {said}")
    assert left(tmp_path) == []


def test_nothing_is_not_packed(tmp_path):
    (tmp_path / "empty").mkdir()
    result = run("pack", tmp_path / "empty", "-o", tmp_path / "model.tdl")
    assert result.exit_code == 1
    assert result.stderr == f"Error: path={tmp_path / 'empty'}: must hold an artifact\n"


@pytest.mark.parametrize("path", ["/proc/model.tdl", "/nowhere/model.tdl"])
def test_a_file_that_cannot_be_written_is_named(directory, path):
    result = run("pack", directory, "-o", path)
    assert result.exit_code == 1
    assert result.stderr == f"Error: output={path}: must be a file that can be written: No such file or directory\n"


def test_an_older_file_stays_where_there_is_no_room(packed, directory, tmp_path, monkeypatch):
    before = packed.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pack.shutil, "copyfileobj", full)
    result = run("pack", directory, "-o", packed)
    rule = "must be a file that can be written: No space left on device"
    assert (result.exit_code, result.stderr) == (1, f"Error: output={packed}: {rule}\n")
    assert packed.read_bytes() == before
    assert left(tmp_path) == [packed.name]


def test_what_changes_meanwhile_is_not_packed(directory, tmp_path):
    library = td.load(directory)
    made.rewrite(directory, P, algorithm="other")
    with pytest.raises(td.IntegrityError, match="artifacts changed while they were packed"):
        pack_library(library, tmp_path / "model.tdl")
    assert left(tmp_path) == []


# ---- other files, and spoilt ones ----

WHOLE = "must be a directory of artifacts, or a whole file that tvm-deconv pack wrote, but "


@pytest.mark.parametrize("part", [0, 3, 30, 0.3, 0.9, -1])
def test_truncated(packed, part):
    content = packed.read_bytes()
    packed.write_bytes(content[: part if isinstance(part, int) else int(part * len(content))])
    with pytest.raises(td.ArtifactError, match=WHOLE) as caught:
        td.load(packed)
    assert caught.value.path == packed


@pytest.mark.parametrize("start", [b"#!/bin/sh\n", b"7z\xbc\xaf\x27\x1c", b"\x7fELF\2\1\1", b"MZ"])
def test_the_header_of_another_format(packed, start):
    """In its place, or before it: other programs read such a file too."""
    content = packed.read_bytes()
    for other in (start + content[len(start) :], start + content):
        packed.write_bytes(other)
        with pytest.raises(td.ArtifactError, match=WHOLE + "it does not begin as one"):
            td.load(packed)


def rezipped(path, comment=b"tvm_deconv artifacts, format 1", compression=zipfile.ZIP_STORED, names=str, twice=False):
    """Write the archive again, by another program as it were."""
    with zipfile.ZipFile(path) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members + members[:twice]:
            archive.writestr(names(name), content)
        archive.comment = comment


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"comment": b""}, "its comment does not say that it is one"),
        ({"comment": b"tvm_deconv artifacts, format 2"}, "its format is 2, not 1: another version wrote it"),
        ({"compression": zipfile.ZIP_DEFLATED}, "its member .* is compressed or encrypted"),
        ({"names": "../{}".format}, "its member .* is not a plain file name"),
        ({"names": "/etc/{}".format}, "its member .* is not a plain file name"),
        ({"names": "a\\{}".format}, "its member .* is not a plain file name"),
        ({"twice": True}, "two of its members have one name"),
    ],
)
def test_archives_of_other_kinds(packed, changes, rule):
    rezipped(packed, **changes)
    with pytest.raises(td.ArtifactError, match=WHOLE + rule):
        td.load(packed)


def test_written_again_by_another_program(packed):
    rezipped(packed)
    assert_right(td.load(packed), P)


def changed_within(path, name, at, byte=None):
    """Change one byte of a member's content."""
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(name)
    content = bytearray(path.read_bytes())
    start = info.header_offset + 30 + len(name)
    content[start + at] = content[start + at] ^ 1 if byte is None else byte
    path.write_bytes(content)


def test_an_altered_library(packed, directory):
    """Also where the archive is in order: the digest counts."""
    name = made.file(directory, P, ".so").name
    changed_within(packed, name, 5000)
    with pytest.raises(td.IntegrityError, match="the bytes of a member are not those that were written"):
        td.load(packed).bind(P, operands(P)[1])
    assert name.rpartition(".")[0].rpartition(".")[0] in run("inspect", packed, "--json").stdout.partition("broken")[2]
    rezipped_with_right_sums(packed)
    with pytest.raises(td.IntegrityError, match=r"^sha256=.* the file was altered or replaced"):
        td.load(packed).bind(P, operands(P)[1])


def rezipped_with_right_sums(path):
    members = []
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            start = info.header_offset + 30 + len(info.filename)
            members.append((info.filename, path.read_bytes()[start : start + info.file_size]))
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members:
            archive.writestr(name, content)
        archive.comment = b"tvm_deconv artifacts, format 1"


def test_altered_weights_and_manifests(packed, directory):
    """No digest is asked for: the checksum of the archive shows it."""
    changed_within(packed, "m.safetensors", -1 + (directory / "m.safetensors").stat().st_size)
    with pytest.raises(td.IntegrityError, match=r"m\.safetensors.* the bytes of a member are not those"):
        td.load(packed).layer("up")
    name = made.file(directory, P, ".json").name
    changed_within(packed, name, 50)
    assert isinstance(td.load(packed).broken[name.removesuffix(".json")], td.ManifestError)


def test_a_member_that_is_not_where_the_table_says(packed):
    with zipfile.ZipFile(packed) as archive:
        offset = archive.getinfo("m.safetensors").header_offset
    content = packed.read_bytes()
    packed.write_bytes(content.replace(struct.pack("<I", offset) + b"m.saf", struct.pack("<I", offset + 7) + b"m.saf"))
    with pytest.raises(td.IntegrityError, match="it has no member where its table says"):
        list(td.load(packed))


def test_a_member_that_is_longer_than_the_archive(packed):
    content = packed.read_bytes()
    size = len(content) + 1
    at = content.rindex(b"m.safetensors") - 46  # its entry in the table
    packed.write_bytes(content[: at + 20] + struct.pack("<II", size, size) + content[at + 28 :])
    with pytest.raises(td.ArtifactError, match=WHOLE + "its member 'm.safetensors' goes beyond its end"):
        td.load(packed)


def test_a_member_that_ends_with_the_archive(packed):
    """Its bytes begin behind a header of its own, which the table does not count."""
    content = packed.read_bytes()
    with zipfile.ZipFile(packed) as archive:
        size = len(content) - archive.getinfo("m.safetensors").header_offset
    at = content.rindex(b"m.safetensors") - 46  # its entry in the table
    packed.write_bytes(content[: at + 20] + struct.pack("<II", size, size) + content[at + 28 :])
    with pytest.raises(td.IntegrityError, match="it ends within a member"):
        td.load(packed).layer("up")


def test_an_encrypted_member(packed):
    content = bytearray(packed.read_bytes())
    content[content.rindex(b"m.safetensors") - 46 + 8] |= 1  # the flags in the table
    packed.write_bytes(content)
    with pytest.raises(td.ArtifactError, match=WHOLE + "its member 'm.safetensors' is compressed or encrypted"):
        td.load(packed)


@given(st.data())
def test_any_bytes_changed(artifacts, tmp_path_factory, data):
    """An error of ours, or a right result."""
    folder = tmp_path_factory.mktemp("any")
    path = folder / "m.tdl"
    pack_library(td.load(artifacts), path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        # Half of the changes hit the table at the end.
        low = data.draw(st.sampled_from([0, len(content) - 1500]))
        content[data.draw(st.integers(low, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(td.DeconvError):
        assert_right(td.load(path), P, 5)
    shutil.rmtree(folder)


def test_no_such_file(tmp_path):
    with pytest.raises(td.ArtifactError, match="must be a directory of artifacts, or a file that packs one: No such"):
        td.load(tmp_path / "missing.tdl")
    os.mkfifo(tmp_path / "pipe.tdl")
    with pytest.raises(td.ArtifactError, match="it is not a regular file"):
        td.load(tmp_path / "pipe.tdl")
