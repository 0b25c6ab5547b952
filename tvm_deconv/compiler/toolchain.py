"""Calls of compilers (cc, nvcc), with one handling of what goes wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache

from tvm_deconv.errors import BuildError, CompilerNotFound

_VARIABLES = {"cc": "CXX", "nvcc": "NVCC"}  # in which users name their compiler
_PATIENCE_SECONDS = 1800.0  # far more than any needs
_MOST_CHARACTERS = 2000  # of a compiler's messages; the last are those of the error that ended it


def run_compiler(tool: str, command: Sequence[str], failure: str) -> str:
    """Run the compiler `command` and return what it printed to its standard error.

    `tool` is "cc" or "nvcc". Raises CompilerNotFound if the program does not start. If it fails, raises BuildError
    with `failure` and the end of its messages, or because it does not end.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        raise BuildError(tool, command[0], f"{failure}does not end within {_PATIENCE_SECONDS:g} s") from None
    except OSError as error:
        rule = f"the compiler does not start ({error.strerror}); set {_VARIABLES[tool]} to one that does"
        raise CompilerNotFound(tool, command[0], rule) from error
    if done.returncode:
        raise BuildError(tool, command[0], f"{failure}{done.stderr.strip()[-_MOST_CHARACTERS:]}")
    return done.stderr


@cache
def direct_linker(cc: str) -> tuple[str, ...]:
    """Return the linker that the driver `cc` calls, and libraries that it adds; () if it does not tell.

    Without the driver a link takes 6 ms in place of 40. The C library says which versions of functions are meant.
    """
    questions = ("prog-name=ld", "libgcc-file-name", "file-name=libm.so.6", "file-name=libc.so.6")
    asked = [[cc, f"-print-{question}"] for question in questions]
    answers = [subprocess.run(one, capture_output=True, text=True, check=False).stdout.strip() for one in asked]
    linker, *libraries = [shutil.which(answers[0]) or "", *answers[1:]]
    return (linker, *libraries) if linker and all(map(os.path.isabs, libraries)) else ()


def version_text(program: str) -> str:
    """Return what `program --version` prints."""
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
