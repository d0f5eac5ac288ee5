"""Sheets as one self-contained HTML page, to look at or to attach to a bug report. No scripts, nothing loaded."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from .sheet import Sheet

_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { padding: .3rem .7rem; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid; white-space: nowrap; } td { border-bottom: 1px solid #8884; white-space: pre-line; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.marked td { background: #e8b33933; font-weight: 600; } p { margin: .3rem 0; white-space: pre-line; }
.scroll { overflow-x: auto; }
"""


def page(title: str, sheets: Iterable[Sheet]) -> str:
    """The document."""
    body = "\n".join(map(_section, sheets))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n'
        f"<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def _section(sheet: Sheet) -> str:
    kinds = [' class="number"' if column in sheet.numbers else "" for column in sheet.columns]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, sheet.columns, strict=True))
    rows = "\n".join(_row(row, kinds, index in sheet.marked) for index, row in enumerate(sheet.rows))
    notes = "".join(f"<p>{escape(note)}</p>" for note in sheet.notes)
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'
    return f"<section><h2>{escape(sheet.title)}</h2>{table}{notes}</section>"


def _row(cells: Iterable[str], kinds: Iterable[str], marked: bool) -> str:
    shown = "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(cells, kinds, strict=True))
    return f'<tr class="marked">{shown}</tr>' if marked else f"<tr>{shown}</tr>"
