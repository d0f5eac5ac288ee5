"""A table of text that prints on a terminal, in a log, and on a page: the one form that every report here takes."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass
class Sheet:
    """Rows of cells under column names. A cell may have lines.

    `numbers` are the columns set flush right, `marked` the indices of rows that should stand out, `notes` lines below.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Collection[str] = ()
    marked: Collection[int] = ()
    notes: Sequence[str] = field(default=())

    def table(self) -> Table:
        """The rows as a rich table, without the notes."""
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=escape(self.title), title_justify="left")
        for column in self.columns:
            table.add_column(column, justify="right" if column in self.numbers else "left", overflow="fold")
        for index, row in enumerate(self.rows):
            table.add_row(*map(escape, row), style="bold yellow" if index in self.marked else None)
        return table

    def text(self) -> str:
        """Aligned words, one line a row, for logs and pipes."""
        lines = [[cell.replace("\n", "; ") for cell in row] for row in (self.columns, *self.rows)]
        widths = [max(len(line[at]) for line in lines) for at in range(len(self.columns))]
        words = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
        return "\n".join([self.title, *(line.rstrip() for line in words), *self.notes])

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
        console.print(self.table())
        # Notes are sentences: not folded to the width of a table that may be narrow.
        for note in self.notes:
            console.print(note, markup=False, highlight=False, soft_wrap=True)
