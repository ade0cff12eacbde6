"""HTML tables that a notebook shows for objects of kqview."""

from collections.abc import Mapping
from html import escape


def table(title: str, rows: Mapping[str, object]) -> str:
    """A caption and a row for each name and value; everything in it is escaped."""
    lines = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th>"
        f"<td style='text-align:left'>{escape(str(value))}</td></tr>"
        for name, value in rows.items()
    )
    return f"<table><caption>{escape(title)}</caption>{lines}</table>"
