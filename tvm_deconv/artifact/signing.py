"""Signatures of directories: Ed25519 over artifacts and weights, kept beside them. Needs the package cryptography.

Keys are PEM files::

    openssl genpkey -algorithm ed25519 -out private.pem
    openssl pkey -in private.pem -pubout -out public.pem

The signature is over `Library.digest`, thus over every manifest that reads and, through it, every library that can be
loaded. It is also over the SHA-256 of each file of weights (``*.safetensors``); a directory may hold no other weights.
Other files are not signed. A signature does not say that there is no newer one: `Library.digest` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_deconv.artifact import files
from tvm_deconv.errors import ArtifactError, IntegrityError
from tvm_deconv.extras import install

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

FILE = "signature.json"
FORMAT = 1
_MAX_BYTES = 1 << 20
_KINDS = ("public key", "private key")


def _statement(digest: str, weights: Mapping[str, str]) -> bytes:
    # The words keep a signature from being one of something else made with the same key.
    return f"tvm_deconv artifacts {digest} weights {json.dumps(weights, sort_keys=True)}".encode()


def _weights(root: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of weights in `root`, by name."""
    return {path.name: files.sha256(path, IntegrityError) for path in files.weights(root)}


def sign(root: Path, digest: str, private_key: Path) -> Path:
    """Write the signature of the directory `root` with this `digest`; return its path. Raises ArtifactError."""
    key: Ed25519PrivateKey = _key(private_key, private=True)
    weights = _weights(root)
    signature = key.sign(_statement(digest, weights)).hex()
    content = {"format": FORMAT, "digest": digest, "weights": weights, "signature": signature}
    path = root / FILE
    files.write(path, (json.dumps(content, indent=2) + "\n").encode())
    return path


def check(root: Path, digest: str, public_key: Path) -> dict[str, str]:
    """Raise IntegrityError unless the directory `root` with this digest was signed by the owner of the key.

    Returns the SHA-256 of each file of weights, by name, as signed.
    """
    key: Ed25519PublicKey = _key(public_key, private=False)
    from cryptography.exceptions import InvalidSignature

    path = root / FILE
    data, _ = files.read(path, _MAX_BYTES, IntegrityError, IntegrityError)
    try:
        content = json.loads(data)
        version, signed, signature = content["format"], content["digest"], bytes.fromhex(content["signature"])
        weights = {**content["weights"]}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise IntegrityError(path, f"must be a signature that tvm-deconv sign wrote: {error}") from None
    if version != FORMAT:
        raise IntegrityError(path, f"must be {FORMAT}: another version wrote it", "format", version)
    if signed != digest:
        raise IntegrityError(path, f"must be {digest}: artifacts were added, changed or removed", "digest", signed)
    present = _weights(root)
    for name in sorted({*present, *weights}):
        if present.get(name) != weights.get(name):
            rule = f"must be {weights.get(name)}: weights were added, changed or removed"
            raise IntegrityError(root / name, rule, "sha256", present.get(name))
    try:
        key.verify(signature, _statement(digest, weights))
    except InvalidSignature:
        raise IntegrityError(path, f"must be made with the key that belongs to {public_key}", "signature") from None
    return weights


def _key(path: Path, *, private: bool) -> Any:
    """Read a key of Ed25519 from a PEM file."""
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
    except ImportError:
        raise ArtifactError(path, f"needs the package cryptography: {install('sign')}") from None
    try:
        data, _ = files.read(path.resolve(), _MAX_BYTES, ArtifactError, ArtifactError)
        key: Any
        if private:  # one of RSA is refused below, and would take minutes to check first
            key = load_pem_private_key(data, None, unsafe_skip_rsa_key_validation=True)
        else:
            key = load_pem_public_key(data)
    # Links in a circle are a RuntimeError; cryptography has many classes, and warnings, which may be errors.
    except Exception as error:
        raise ArtifactError(path, f"must be the PEM file of a {_KINDS[private]}: {error}") from None
    if not isinstance(key, Ed25519PrivateKey if private else Ed25519PublicKey):
        raise ArtifactError(path, f"must be a {_KINDS[private]} of Ed25519")
    return key
