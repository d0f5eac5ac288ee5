"""A table of text that prints on a terminal, in a log, and on a page: the one form that every report here takes."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..target import Peaks

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass(frozen=True)
class Roof:
    """Points under the roof that a machine's public peaks make: by name, their FLOPs and the bytes that they move."""

    machine: str
    peaks: Peaks
    points: Sequence[tuple[str, int, int]]


@dataclass
class Sheet:
    """Rows of cells under column names. A cell may have lines.

    `numbers` are the columns set flush right, `marked` the indices of rows that should stand out, `head` lines above
    and `notes` lines below. `reasons` has for each row what is to be said of it at length: numbered notes in text, on
    demand on a page. There `bars` are columns of shares and `badges` columns of words, drawn as such; `roofs` are
    drawn on a page alone.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Collection[str] = ()
    marked: Collection[int] = ()
    notes: Sequence[str] = field(default=())
    head: Sequence[str] = ()
    reasons: Sequence[str] = ()
    bars: Collection[str] = ()
    badges: Collection[str] = ()
    roofs: Sequence[Roof] = ()

    def table(self) -> Table:
        """The rows as a rich table, without what stands above and below."""
        from rich.markup import escape
        from rich.table import Table

        columns, rows, _ = self._numbered()
        table = Table(title=escape(self.title), title_justify="left")
        for column in columns:
            table.add_column(column, justify="right" if column in self.numbers else "left", overflow="fold")
        for index, row in enumerate(rows):
            table.add_row(*map(escape, row), style="bold yellow" if index in self.marked else None)
        return table

    def text(self) -> str:
        """Aligned words, one line a row, for logs and pipes."""
        columns, rows, said = self._numbered()
        lines = [[cell.replace("\n", "; ") for cell in row] for row in (columns, *rows)]
        widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
        words = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
        return "\n".join([self.title, *self.head, *(line.rstrip() for line in words), *said, *self.notes])

    def _numbered(self) -> tuple[Sequence[str], Sequence[Sequence[str]], list[str]]:
        """Columns, rows and notes: reasons have numbers, those alike the same one, for sentences fold badly."""
        said = list(dict.fromkeys(filter(None, self.reasons)))
        if not said:
            return self.columns, self.rows, []
        numbers = [f"({said.index(text) + 1})" if text else "" for text in self.reasons]
        rows = [(*row, number) for row, number in zip(self.rows, numbers, strict=True)]
        notes = [f"({number}) {'; '.join(text.splitlines())}" for number, text in enumerate(said, 1)]
        return (*self.columns, "why"), rows, notes

    def show(self, console: Console) -> None:
        """Drawn on a terminal, aligned words elsewhere."""
        if console.is_terminal:
            self._draw(console)
        else:
            print(f"\n{self.text()}", file=console.file)

    def drawn(self) -> str:
        """As on a terminal, without colours: for `repr`."""
        from rich.console import Console

        out = io.StringIO()
        self._draw(Console(file=out, width=120, force_jupyter=False, force_terminal=False))
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _draw(self, console: Console) -> None:
        # Sentences are not folded to the width of a table that may be narrow.
        for line in self.head:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print(self.table())
        for note in (*self._numbered()[2], *self.notes):
            console.print(note, markup=False, highlight=False, soft_wrap=True)
