"""One table as Markdown, CSV, LaTeX (booktabs) and HTML; all by pandas."""

from __future__ import annotations

import html
import re

import pandas as pd

from results.artefacts import Table

_LATEX = {"±": r"$\pm$", "→": r"$\rightarrow$"}
_SPECIAL = re.compile(r"([%&_#{}])")


def to_markdown(table: Table) -> str:
    frame = table.frame.map(lambda cell: cell.replace("|", r"\|"))
    aligned = ["left" if _is_text(frame[column]) else "right" for column in frame]
    body = frame.to_markdown(index=False, colalign=aligned, disable_numparse=True)
    return f"**{table.title}**\n\n{body}\n\n{table.caption}\n"


def to_csv(table: Table) -> str:
    """One row per number, full precision, with its kind, spread and error."""
    return table.cells.to_csv(index=False, lineterminator="\n")


def to_latex(table: Table) -> str:
    """A booktabs table; needs ``\\usepackage{booktabs}``."""
    frame = table.frame.map(_latex).rename(columns=_latex)
    columns = "".join("l" if _is_text(table.frame[column]) else "r" for column in table.frame)
    body = frame.style.hide(axis="index").to_latex(
        hrules=True,
        column_format=columns,
        caption=_latex(table.title),
        label=f"tab:{table.name}",
        position_float="centering",
    )
    note = "\\par\\smallskip\\footnotesize\\raggedright " + _latex(table.caption)
    return body.replace("\\end{table}", note + "\n\\end{table}")


def to_html(table: Table) -> str:
    """A table whose numbers are right-aligned; text is escaped."""
    heads = "".join(f"<th>{html.escape(str(column))}</th>" for column in table.frame)
    text = [_is_text(table.frame[column]) for column in table.frame]
    rows, previous = [], None
    for row in table.frame.itertuples(index=False, name=None):
        # A rule whenever the first column changes groups rows without merged cells.
        start = ' class="group"' if previous is not None and row[0] != previous else ""
        cells = "".join(
            f"<td{'' if is_text else ' class=n'}>{html.escape(cell)}</td>"
            for cell, is_text in zip(row, text, strict=True)
        )
        rows.append(f"<tr{start}>{cells}</tr>")
        previous = row[0]
    return (
        f'<table id="{table.name}"><caption><b>{html.escape(table.title)}</b><br>{html.escape(table.caption)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _is_text(column: pd.Series) -> bool:
    return not column.str.match(r"^([-+]?[\d.]|-?$)").all()


def _latex(text: str) -> str:
    escaped = _SPECIAL.sub(r"\\\1", text)
    for sign, command in _LATEX.items():
        escaped = escaped.replace(sign, command)
    return escaped
