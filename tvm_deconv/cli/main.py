"""The command tvm-deconv.

A DeconvError becomes one line and exit code 1; wrong usage exits with 2, as click has it, and an interrupt with 130.
"""

from __future__ import annotations

import errno
import importlib.metadata
import io
import sys

from tvm_deconv.errors import DeconvError, printable_lines
from tvm_deconv.extras import install

try:
    import click

    from tvm_deconv.cli import artifacts, bench, clean, compile, doctor, logs, tune
    from tvm_deconv.cli.common import Stopped
except ImportError as error:
    package = str(error.name).partition(".")[0]
    raise SystemExit(f"tvm-deconv needs the package {package}: {install('cli')}") from None


class _Commands(click.Group):
    """Commands whose expected errors are one line."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Stopped from None
        except click.ClickException as error:
            error.message = printable_lines(error.message)  # type: ignore[misc]  # any character
            raise
        except DeconvError as error:
            raise click.ClickException(str(error)) from None
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("tvm_deconv"):
                raise
            package = error.name.partition(".")[0]
            raise click.ClickException(f"this needs the package {package}: {install('compile')}") from None
        except OSError as error:
            if error.errno == errno.EPIPE or error.strerror is None:
                raise  # a pipe that nobody reads any more is no error, which click knows
            where = "" if error.filename is None else f"{error.filename}: "
            raise click.ClickException(printable_lines(f"{where}{error.strerror}")) from None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(importlib.metadata.version("tvm_deconv"))
def main() -> None:
    """Transposed convolutions, compiled ahead of time."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it: names may hold any character


for command in (
    compile.compile,
    tune.tune,
    logs.logs,
    artifacts.inspect,
    artifacts.sign,
    artifacts.pack,
    artifacts.verify,
    bench.bench,
    bench.overhead,
    doctor.doctor,
    clean.clean,
):
    main.add_command(command)
