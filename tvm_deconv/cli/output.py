"""What commands print: tables on a terminal, tab-separated text for another program, JSON if it is asked for.

Names come from files that anybody may have written: their control characters are shown escaped.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from typing import NamedTuple

import click
from rich import box
from rich import table as rich_table
from rich.console import Console

from tvm_deconv.errors import printable, printable_lines
from tvm_deconv.problem import Problem
from tvm_deconv.problem.words import words

_UNSEEN_WIDTH = 1000  # if no terminal says how wide it is: as wide as a table needs

_KEY = re.compile(r"\bn[^\s-]+-g\d\S*[^\s:;,]")  # of a problem, in a text

JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
KEYS = click.option("--keys", is_flag=True, help="Print names of artifacts and keys of problems too.")


def console(*, stderr: bool = False) -> Console:
    """Return a console on which names of layers are never taken for markup."""
    stream = sys.stderr if stderr else sys.stdout  # None if it is closed
    seen = (stream is not None and stream.isatty()) or "COLUMNS" in os.environ
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=None if seen else _UNSEEN_WIDTH)


def _write(text: str, *, err: bool = False) -> None:
    """Print lines; an OSError has the name of the stream."""
    try:
        click.echo(text, err=err)
    except OSError as error:
        error.filename = f"standard {'error' if err else 'output'}"
        raise


def echo(text: str, *, err: bool = False) -> None:
    """Print lines, wrapped at words on a terminal; elsewhere as they are, to standard error if `err`."""
    screen = console()
    if screen.is_terminal:
        screen.print(printable_lines(text))
    else:
        _write(printable_lines(text), err=err)


def warn(text: str) -> None:
    """Print lines to standard error."""
    _write(printable_lines(text), err=True)


def say(text: str) -> None:
    """Print lines about the rows of a table; where another program reads the rows, to standard error."""
    echo(text, err=True)


def divide() -> None:
    """Print an empty line behind a table that another follows, where another program reads them."""
    if not console().is_terminal:
        _write("")


def echo_json(value: object) -> None:
    """Print a value as JSON."""
    _write(json.dumps(value, indent=1))


class Column(NamedTuple):
    """A column: numbers are on the `right`, and a narrow terminal does without `spare` ones, the last ones first."""

    name: str
    right: bool = False
    spare: bool = False


class Table:
    """Rows of texts under columns, with a title for people."""

    def __init__(self, title: str, columns: Iterable[Column]) -> None:
        self.title = printable(title)
        self.columns = [*columns]
        self.rows: list[tuple[str, ...]] = []

    def add(self, *cells: str) -> None:
        """Append a row."""
        self.rows.append(cells)

    def show(self) -> None:
        """Print the table as wide as the terminal is, or tab-separated under a line of names, the title elsewhere."""
        screen = console()
        if not screen.is_terminal:
            if self.title:
                say(self.title)
            for row in ([column.name for column in self.columns], *self.rows):
                _write("\t".join(printable(cell) for cell in row))
            return
        shown, left_out = [*self.columns], list[str]()
        unlimited = screen.options.update(width=_UNSEEN_WIDTH)
        while screen.measure(table := self._table(shown), options=unlimited).maximum > screen.width:
            spare = [column for column in shown if column.spare]
            if not spare:
                break
            shown.remove(spare[-1])
            left_out.insert(0, spare[-1].name)
        screen.print(table)
        if left_out:
            screen.print(f"not shown, for want of room: {', '.join(left_out)}", style="dim")

    def _table(self, shown: Iterable[Column]) -> rich_table.Table:
        made = rich_table.Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        places = [self.columns.index(column) for column in shown]
        for place in places:
            column = self.columns[place]
            made.add_column(column.name, justify="right" if column.right else "left", overflow="fold")
        for row in self.rows:
            made.add_row(*(printable_lines(row[place]) for place in places))
        return made


class Names:
    """The columns that say which problem a row is about, and their cells."""

    def __init__(self, keys: bool) -> None:
        self._keys = keys
        self.columns = [Column("layer"), Column("shape"), *([Column("artifact"), Column("problem")] if keys else [])]

    def told(self, text: str) -> str:
        """Return a text with shapes in words in the place of keys, unless keys are asked for."""
        return text if self._keys else _KEY.sub(lambda key: words(Problem.from_key(key[0])), text)

    def cells(self, layers: Iterable[str], problem: Problem | None, artifact: str = "") -> list[str]:
        """Return the cells; a layer without a name has that of the artifact."""
        key = problem.key if problem else ""
        names = [", ".join(layers) or artifact, words(problem) if problem else ""]
        return [*names, artifact, key] if self._keys else names
