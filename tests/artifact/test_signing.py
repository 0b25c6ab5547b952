"""Directories that are pinned by their digest or by a signature."""

import hashlib
import json
import os
import shutil
import sys

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
)
from support import artifacts as made
from support.keys import write_keys
from support.strategies import operands

import tvm_deconv as td
from tvm_deconv.artifact.signing import FILE
from tvm_deconv.cli.main import main
from tvm_deconv.runtime.process import PROCESS

P = made.PLAIN


@pytest.fixture
def keys(tmp_path):
    return write_keys(tmp_path, "key")


@pytest.fixture
def copy(artifacts, tmp_path):
    return shutil.copytree(artifacts, tmp_path / "copy")


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def signed(copy, keys):
    result = run("sign", copy, "--key", keys[0])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{copy / FILE}: {len(made.PROBLEMS)} artifacts, {td.load(copy).digest}\n"
    return copy


def works(directory, **pins):
    td.load(directory, **pins).bind(P, operands(P)[1])


def refused(directory, match, **pins):
    with pytest.raises(td.IntegrityError, match=match):
        td.load(directory, **pins)


def test_without_the_package_the_error_says_how_to_install_it(artifacts, keys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)  # an import fails
    with pytest.raises(td.ArtifactError, match=r"needs the package cryptography: pip install .*sign"):
        td.load(artifacts, public_key=keys[1])


def test_signed_directory(signed, keys):
    works(signed, public_key=keys[1])
    works(signed, public_key=str(keys[1]), digest=td.load(signed).digest)
    result = run("verify", signed, "--key", keys[1])
    assert result.exit_code == 0, result.output
    assert f"{len(made.PROBLEMS)} ok" in result.stderr
    assert not [path for path in signed.iterdir() if path.name.startswith(".unfinished-")]
    # Signed again: the same file.
    before = (signed / FILE).read_bytes()
    assert run("sign", signed, "--key", keys[0]).exit_code == 0
    assert (signed / FILE).read_bytes() == before


def changed(directory):
    made.rewrite(directory, P, algorithm="other")


def added(directory):
    made.export(directory, [P.replace(out_channels=6)])


def removed(directory):
    made.file(directory, P, ".json").unlink()


def spoilt(directory):
    made.file(directory, P, ".json").write_text("{}")


def another_library(directory):
    """Truly described: what a build by somebody else looks like."""
    content = made.file(directory, P, ".so").read_bytes()
    made.rewrite(directory, P, content=content + b"\0")


@pytest.mark.parametrize("change", [changed, added, removed, spoilt, another_library])
def test_changed_directory(signed, keys, change):
    digest = td.load(signed).digest
    change(signed)
    refused(
        signed, r"^digest='sha256:[0-9a-f]{64}': must be sha256:.*: artifacts were added, changed", public_key=keys[1]
    )
    refused(signed, f"must be {digest}, which was asked for", digest=digest)
    result = run("verify", signed, "--key", keys[1])
    assert result.exit_code == 1
    assert "artifacts were added, changed or removed" in result.stderr


def test_altered_library(signed, keys):
    """The signature is of the manifests, which hold the libraries' digests."""
    path = made.file(signed, P, ".so")
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(td.IntegrityError, match="sha256="):
        works(signed, public_key=keys[1])
    assert run("sign", signed, "--key", keys[0]).stderr.startswith("Error: sha256=")


@pytest.mark.parametrize(
    "change",
    [
        lambda directory: (directory / "model.safetensors").write_bytes(b"other weights"),
        lambda directory: (directory / "model.safetensors").unlink(),
        lambda directory: (directory / "model_2.safetensors").write_bytes(b"more weights"),
        lambda directory: (directory / "model.safetensors").replace(directory / "model_2.safetensors"),
    ],
    ids=["changed", "removed", "added", "renamed"],
)
def test_weights_are_signed_too(copy, keys, change):
    (copy / "model.safetensors").write_bytes(b"weights")
    digest = td.load(copy).digest
    assert run("sign", copy, "--key", keys[0]).exit_code == 0
    works(copy, public_key=keys[1])
    change(copy)
    refused(copy, r"^sha256=.*: must be .*: weights were added, changed or removed", public_key=keys[1])
    assert "weights were added, changed or removed" in run("verify", copy, "--key", keys[1]).stderr
    works(copy, digest=digest)  # which is of the artifacts alone


def test_the_order_of_weights_means_nothing(copy, keys):
    for name in ("a.safetensors", "b.safetensors"):
        (copy / name).write_bytes(name.encode())
    assert run("sign", copy, "--key", keys[0]).exit_code == 0
    found = json.loads((copy / FILE).read_text())
    found["weights"] = dict(reversed(found["weights"].items()))
    (copy / FILE).write_text(json.dumps(found))
    works(copy, public_key=keys[1])


def test_weights_that_are_no_file_of_the_directory(copy, keys, tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"weights")
    (copy / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    assert "must not be a link that leaves" in run("sign", copy, "--key", keys[0]).stderr
    (copy / "model.safetensors").unlink()
    os.mkfifo(copy / "model.safetensors")
    assert "must be a regular file" in run("sign", copy, "--key", keys[0]).stderr
    assert not (copy / FILE).exists()


def test_a_signature_of_other_weights(signed, keys):
    """What it says of weights is signed itself."""
    found = json.loads((signed / FILE).read_text())
    (signed / "model.safetensors").write_bytes(b"")
    (signed / FILE).write_text(json.dumps(found | {"weights": {"model.safetensors": hashlib.sha256().hexdigest()}}))
    refused(signed, "signature=None: must be made with the key", public_key=keys[1])


def test_another_key(signed, tmp_path):
    private, public = write_keys(tmp_path, "other")
    refused(signed, f"signature=None: must be made with the key that belongs to {public}", public_key=public)
    assert run("sign", signed, "--key", private).exit_code == 0
    works(signed, public_key=public)


def test_nothing_signed(copy, keys):
    refused(copy, "must be readable: .*No such file", public_key=keys[1])


def test_link_to_a_signature_elsewhere(signed, keys, tmp_path):
    (signed / FILE).rename(tmp_path / FILE)
    (signed / FILE).symlink_to(tmp_path / FILE)
    refused(signed, "must not be a link that leaves", public_key=keys[1])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 10000,
        b'{"format": 1, "digest": 1, "signature": 1}',
        b'{"format": 1, "digest": "x", "signature": "zz"}',
        b'{"format": 2, "digest": "x", "signature": "00"}',
        b'{"format": 1, "digest": "x", "signature": "00"}',
        b'{"format": 1, "digest": "x", "signature": "00", "weights": 3}',
        b'{"format": 1, "digest": "x", "signature": "00", "weights": {"a": []}}',
    ],
)
def test_spoilt_signature(signed, keys, content):
    (signed / FILE).write_bytes(content)
    refused(signed, "must be", public_key=keys[1])


@pytest.mark.parametrize("signature", ["", "00", "00" * 64, "00" * 10000])
def test_wrong_signature(signed, keys, signature):
    found = json.loads((signed / FILE).read_text())
    (signed / FILE).write_text(json.dumps(found | {"signature": signature}))
    refused(signed, "must be", public_key=keys[1])


@pytest.mark.parametrize("weights", [[[1, "x"]], [["a", "x"], [1, "x"]], "ab", None])
def test_weights_of_a_signature_that_are_no_object(signed, keys, weights):
    found = json.loads((signed / FILE).read_text())
    (signed / FILE).write_text(json.dumps(found | {"weights": weights}))
    refused(signed, "must be a signature that tvm-deconv sign wrote: ", public_key=keys[1])


def test_wrong_key_files(signed, tmp_path, keys):
    encrypted, pipe = tmp_path / "encrypted", tmp_path / "pipe"
    os.mkfifo(pipe)  # opening one waits for a writer, unless asked not to
    form = Encoding.PEM, PrivateFormat.PKCS8
    encrypted.write_bytes(Ed25519PrivateKey.generate().private_bytes(*form, BestAvailableEncryption(b"secret")))
    rsa_private, rsa_public = write_keys(tmp_path, "rsa", generate_private_key(65537, 2048))
    for key, match in (
        (tmp_path / "absent", "must be the PEM file of a public key: .*No such file"),
        (tmp_path, "must be the PEM file of a public key: .*Is a directory"),
        (pipe, "must be the PEM file of a public key: .*must be a regular file"),
        (keys[0], "must be the PEM file of a public key"),
        (rsa_public, "must be a public key of Ed25519"),
    ):
        with pytest.raises(td.ArtifactError, match=match) as caught:
            td.load(signed, public_key=key)
        assert caught.value.path == key
    for key, match in (
        (keys[1], "must be the PEM file of a private key"),
        (encrypted, "must be the PEM file of a private key: Password was not given"),
        (rsa_private, "must be a private key of Ed25519"),
    ):
        result = run("sign", signed, "--key", key)
        assert result.exit_code == 1
        assert f"Error: path={key}: {match}" in result.stderr


def test_key_files_that_raise_other_errors(signed, tmp_path, monkeypatch):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(td.ArtifactError, match="must be the PEM file of a public key"):
        td.load(signed, public_key=loop)

    def warn(*_):
        raise UserWarning("deprecated")  # as of Diffie-Hellman's, where warnings are errors

    monkeypatch.setattr("cryptography.hazmat.primitives.serialization.load_pem_public_key", warn)
    _, public = write_keys(tmp_path, "any")
    with pytest.raises(td.ArtifactError, match="must be the PEM file of a public key: deprecated"):
        td.load(signed, public_key=public)


def test_a_null_character_in_a_path(signed):
    with pytest.raises(td.ArtifactError, match="null"):
        td.load("a\0b")
    with pytest.raises(td.ArtifactError, match="must be the PEM file"):
        td.load(signed, public_key="a\0b")


def test_key_file_that_is_a_link(signed, keys, tmp_path):
    (tmp_path / "linked.pub").symlink_to(keys[1])
    works(signed, public_key=tmp_path / "linked.pub")


def test_a_signature_does_not_prevent_an_older_directory(signed, keys, tmp_path):
    """Who can write the directory can put back what was signed before; a digest that is known otherwise prevents it."""
    older = shutil.copytree(signed, tmp_path / "older")
    for suffix in (".so", ".json"):
        made.file(signed, made.PROBLEMS["float64"], suffix).unlink()
    assert run("sign", signed, "--key", keys[0]).exit_code == 0
    newest = td.load(signed).digest
    works(signed, public_key=keys[1], digest=newest)
    shutil.rmtree(signed)
    older.rename(signed)
    works(signed, public_key=keys[1])
    refused(signed, match=f"digest=.*: must be {newest}, which was asked for", public_key=keys[1], digest=newest)


def test_what_is_broken_is_not_signed(copy, keys):
    spoilt(copy)
    result = run("sign", copy, "--key", keys[0])
    assert result.exit_code == 1
    assert "format=None" in result.stderr
    assert not (copy / FILE).exists()


def test_digest_is_shown(copy):
    digest = td.load(copy).digest
    assert digest.startswith("sha256:")
    assert run("inspect", copy).stderr.splitlines()[-1] == f"digest {digest}"


# ---- what a directory may hold ----


def test_manifest_that_is_a_link_out_of_the_directory(copy, tmp_path):
    path = made.file(copy, P, ".json")
    path.symlink_to(path.rename(tmp_path / path.name))
    assert "must not be a link that leaves" in str(td.load(copy).broken[path.stem])


def test_manifest_that_is_a_pipe(copy):
    path = made.file(copy, P, ".json")
    path.unlink()
    os.mkfifo(path)
    assert "must be a regular file" in str(td.load(copy).broken[path.stem])


def test_links_within_the_directory(copy):
    """As in volumes of Kubernetes: every file is a link into a folder that is a link."""
    (copy / "..1").mkdir()
    (copy / "..data").symlink_to("..1")
    for path in list(copy.glob("*.*")):
        if path.is_file():
            path.rename(copy / "..1" / path.name)
            path.symlink_to(f"..data/{path.name}")
    library = td.load(copy)
    assert not library.broken
    works(copy)


def test_another_process_may_not_grow_what_is_read(copy):
    """A library larger than its manifest says is not read beyond that size."""
    path = made.file(copy, P, ".so")
    os.truncate(path, 1 << 40)
    with pytest.raises(td.IntegrityError, match=f"^size={1 << 40}: must be"):
        works(copy)


def test_packed_filter_that_is_not_the_library_s(copy, monkeypatch):
    monkeypatch.setattr(PROCESS, "artifacts", {})
    true = td.Manifest.read(made.file(copy, P, ".json")).packed_shape
    for shape in ((7,), (1 << 50,), (3, 5, 7)):
        made.rewrite(copy, P, packed_shape=shape)
        with pytest.raises(td.ArtifactError, match="must take the filter as its manifest says"):
            works(copy)
    made.rewrite(copy, P, packed_shape=true)
    works(copy)
