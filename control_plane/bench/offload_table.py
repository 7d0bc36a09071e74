"""Tables on a terminal, in Markdown, so that they can be put into a page as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def print_table(title: str, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """columns: of each row these values, under these heads."""
    cells = [list(columns.values()), *([_text(row[name]) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths)) + " |" for line in cells]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    print("\n".join([f"\n{title}:", "", lines[0], rule, *lines[1:]]), flush=True)


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)
