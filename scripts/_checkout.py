"""The command line, for the scripts of this directory: with the Python of .venv if only that has the package."""

import importlib.util
import os
import sys
from pathlib import Path

_PYTHON = Path(__file__).parents[1] / ".venv" / "bin" / "python"


def run(command: str) -> None:
    """Run this command of tvm-deconv on the arguments of the script."""
    if importlib.util.find_spec("tvm_deconv") is None:
        if not _PYTHON.exists() or Path(sys.prefix) == _PYTHON.parents[1]:
            sys.exit("error: this checkout is not installed; run ./scripts/quickstart, which does that, once.")
        os.execv(_PYTHON, [str(_PYTHON), *sys.argv])
    from tvm_deconv.cli.main import main

    main([command, *sys.argv[1:]], prog_name="tvm-deconv")
