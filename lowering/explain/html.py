"""Sheets as one self-contained HTML page, to look at or to attach to a bug report: nothing is loaded from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html import escape

from .roof import drawn
from .sheet import Sheet

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --bar: #3b82f680; }
* { box-sizing: border-box; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p { margin: .3rem 0; white-space: pre-line; overflow-wrap: anywhere; }
.head { border-left: 4px solid #3b82f6; padding: .3rem .7rem; background: #3b82f618; }
.notes { font-size: .9em; opacity: .85; }
nav { display: flex; flex-wrap: wrap; gap: .4rem 1rem; align-items: center; }
nav input[type=search] { font: inherit; padding: .2rem .5rem; flex: 1 1 12rem; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .25rem .5rem; text-align: left; vertical-align: top; overflow-wrap: break-word; }
th { cursor: pointer; border-bottom: 2px solid; } td { white-space: pre-line; }
tbody { border-bottom: 1px solid var(--line); }
.number { text-align: right; font-variant-numeric: tabular-nums; } td.number { white-space: nowrap; }
.marked td { background: #e8b33926; } .marked td:first-child { font-weight: 600; }
.bar { display: block; min-width: 4.5rem; padding: 0 .3rem; margin-bottom: 1px; white-space: nowrap;
  background: linear-gradient(to left, var(--bar) var(--share), #8881 var(--share)); }
.badge { display: inline-block; padding: 0 .45em; border-radius: .7em; white-space: nowrap; background: #8883; }
.seen-here { background: #16a34a66; } .documented { background: #22c55e40; }
.in-use { background: #3b82f640; } .stated { background: #f59e0b50; } .nothing { background: #ef444450; }
.compiled { background: #a855f740; }
.why td { max-width: 20rem; padding-top: 0; font-size: .9em; }
summary { cursor: pointer; opacity: .75; } details p { margin-left: 1rem; }
figure { margin: 1rem 0; } svg { width: 100%; max-width: 44rem; height: auto; } figcaption { font-size: .9em; }
[hidden] { display: none; }
@media (max-width: 48rem) { th, td { padding: .2rem .3rem; } .badge { padding: 0 .3em; } }
@media (max-width: 36rem) {
  thead { display: none; } table, tbody, tr { display: block; }
  td { display: flex; gap: .7rem; } td[data-name]:empty { display: none; }
  td[data-name]::before { content: attr(data-name); flex: 0 0 7rem; opacity: .7; }
  .number { text-align: left; }
}
"""
_SCRIPT = """
const text = document.querySelector("nav input[type=search]"), kinds = [...document.querySelectorAll("nav [name]")];
const show = () => {
  const off = kinds.filter(x => !x.checked).map(x => x.name), word = text.value.toLowerCase();
  for (const body of document.querySelectorAll("tbody")) {
    const own = body.dataset.kinds.split(" ").filter(Boolean);
    const unwanted = own.length > 0 && own.every(x => off.includes(x));
    body.hidden = unwanted || !body.textContent.toLowerCase().includes(word);
  }
};
document.querySelector("nav").addEventListener("input", show);
for (const head of document.querySelectorAll("th")) head.addEventListener("click", () => {
  const table = head.closest("table"), at = head.cellIndex, of = body => body.rows[0].cells[at].textContent;
  const less = (a, b) => parseFloat(of(b)) - parseFloat(of(a)) || of(a).localeCompare(of(b));
  table.append(...[...table.tBodies].sort(less));
});
"""
NO_WORD = "torch"
"""The kind of a row whose badges say nothing: nothing has to speak for Torch's own operators."""


def page(title: str, sheets: Iterable[Sheet]) -> str:
    """The document: what is said of a row opens on demand, and rows can be chosen by words and by badges."""
    sheets = list(sheets)
    body = "\n".join(map(_section, sheets))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n'
        f"<body><h1>{escape(title)}</h1>\n{_filters(sheets)}\n{body}\n<script>{_SCRIPT}</script></body></html>\n"
    )


def _filters(sheets: Iterable[Sheet]) -> str:
    kinds = sorted({kind for sheet in sheets for row in sheet.rows for kind in _kinds(sheet, row)})
    boxes = "".join(f'<label><input type="checkbox" name="{kind}" checked> {_badge(kind)}</label>' for kind in kinds)
    return f'<nav><input type="search" placeholder="rows that hold ..." aria-label="filter">{boxes}</nav>'


def _kinds(sheet: Sheet, row: Iterable[str]) -> set[str]:
    """The words of a row's badges, as names of classes."""
    cells = zip(sheet.columns, row, strict=True)
    words = [word for column, cell in cells if column in sheet.badges for word in _words(cell) or [NO_WORD]]
    return {NO_WORD if word == "-" else word.replace(" ", "-") for word in words}


def _words(cell: str) -> list[str]:
    return [word for word in re.split(r" / |\n", cell) if word]


def _section(sheet: Sheet) -> str:
    head = "".join(f"<th{_class(sheet, name)}>{_breakable(name)}</th>" for name in sheet.columns)
    bodies = "\n".join(_body(sheet, index) for index in range(len(sheet.rows)))
    leading = "".join(f'<p class="head">{escape(line)}</p>' for line in sheet.head)
    notes = "".join(f"<p>{escape(note)}</p>" for note in sheet.notes)
    table = f"<table><thead><tr>{head}</tr></thead>\n{bodies}\n</table>"
    figures = "".join(map(drawn, sheet.roofs))
    notes = f'<div class="notes">{notes}</div>' if notes else ""
    return f"<section><h2>{escape(sheet.title)}</h2>{leading}{table}{figures}{notes}</section>"


def _class(sheet: Sheet, column: str) -> str:
    return ' class="number"' if column in sheet.numbers else ""


def _body(sheet: Sheet, index: int) -> str:
    """A row, and below it what is said of it."""
    row = sheet.rows[index]
    cells = "".join(
        f'<td{_class(sheet, column)} data-name="{escape(column)}">{_cell(sheet, column, cell)}</td>'
        for column, cell in zip(sheet.columns, row, strict=True)
    )
    said = _said(sheet.reasons[index], len(row)) if sheet.reasons else ""
    marked = ' class="marked"' if index in sheet.marked else ""
    return f'<tbody data-kinds="{" ".join(sorted(_kinds(sheet, row)))}"><tr{marked}>{cells}</tr>{said}</tbody>'


def _said(text: str, columns: int) -> str:
    if not text:
        return ""
    lines = "".join(f"<p>{escape(line)}</p>" for line in text.splitlines())
    return f'<tr class="why"><td colspan="{columns}"><details><summary>why</summary>{lines}</details></td></tr>'


def _cell(sheet: Sheet, column: str, cell: str) -> str:
    if column in sheet.badges:
        return " ".join(map(_badge, _words(cell)))
    if column in sheet.bars:
        return "".join(_bars(cell))
    return _breakable(cell)


def _breakable(text: str) -> str:
    """Names of kernels are long: a line may end at each of their underscores."""
    return escape(text).replace("_", "_<wbr>")


def _badge(word: str) -> str:
    return f'<span class="badge {escape(word.replace(" ", "-"))}">{escape(word.replace("-", " ") or "-")}</span>'


def _bars(cell: str) -> Iterator[str]:
    """One bar for each share of the cell, be it of several targets."""
    for word in re.split(r" / |\n", cell):
        found = re.search(r"([\d.]+)%", word)
        yield f'<span class="bar" style="--share: {found[1] if found else 0}%">{escape(word)}</span>'
