"""How an extra of this package is added to the installation that runs: every message that names one asks here."""

from __future__ import annotations

import contextlib
import json
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


def install(extra: str) -> str:
    """Return the command that adds `extra`: from the checkout, wheel or repository that this was installed from."""
    return f"pip install {_requirement(_origin(), extra)}"


def _origin() -> dict[str, Any]:
    """Return the record of this installation that PEP 610 describes; empty if it came from an index."""
    import importlib.metadata  # which imports every way to compress

    for distribution in importlib.metadata.distributions(name="tvm_deconv"):  # a checkout may have one without a record
        with contextlib.suppress(ValueError):
            if record := distribution.read_text("direct_url.json"):
                return dict(json.loads(record))
    root = Path(__file__).parents[1]
    return {"url": root.as_uri(), "dir_info": {}} if (root / "pyproject.toml").is_file() else {}


def _requirement(origin: dict[str, Any], extra: str) -> str:
    """Return what pip takes for an `origin`, the record of an installation that PEP 610 describes."""
    name, url = f"tvm_deconv[{extra}]", str(origin.get("url", ""))
    local = urlsplit(url).scheme == "file" and "vcs_info" not in origin
    if local:
        editable = "--editable " if origin.get("dir_info", {}).get("editable") else ""
        path = Path(unquote(urlsplit(url).path))
        # Of a wheel that is gone, as in an image, only the name still helps.
        return editable + shlex.quote(f"{path.name if path.suffix == '.whl' and not path.exists() else path}[{extra}]")
    if url and "vcs_info" in origin:
        version = origin["vcs_info"]
        return shlex.quote(f"{name} @ {version['vcs']}+{url}@{version['commit_id']}")
    return shlex.quote(f"{name} @ {url}" if url else name)
