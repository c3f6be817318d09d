"""The evidence on products as a table: which form was right on this machine, how quick, and what it runs.

Knows ``core.models.linear.findings.Found`` and HTML; nothing of Gradio. Everything that is not a number is
shown as inert text, for verdicts hold what libraries say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.widgets.display import as_html

if TYPE_CHECKING:
    from core.models.linear.findings import Evidence, Found

ROLES = (("layers", "layers"), ("head", "head"), ("draft", "drafts"))


def products(found: Found | None) -> str:
    """A section that opens; "" where nothing was looked for."""
    if found is None:
        return ""
    from core.models.linear.findings import DISTURBED, ROWS  # with torch, which the page does not wait for

    head = "".join(f"<th scope='col'>{rows} {'row' if rows == 1 else 'rows'}</th>" for rows in ROWS)
    lines = "".join(_line(entry, found) for entry in found.table)
    attention = ", ".join(
        f"{as_html(name)} {_milliseconds(few)} and {_milliseconds(many)}"
        for name, (few, many) in found.attended.items()
    )
    return (
        "<details class='model products'><summary class='role'>Products on this processor</summary>"
        "<p class='quiet'>Each form is checked against float64 on hard inputs, then timed in the target's "
        "sizes: milliseconds of all layers, by rows of a pass.</p>"
        "<div class='scroll'><table class='costs'><thead><tr><th scope='col'>Form</th>"
        f"<th scope='col'>Right</th>{head}</tr></thead>"
        f"<tbody>{lines}</tbody></table></div>"
        f"<p class='quiet'>Attention of a layer over 4 and 256 rows: {attention}; runs in "
        f"{as_html(found.attention)}.{f' {DISTURBED}' if found.disturbed else ''}</p></details>"
    )


def _line(entry: Evidence, found: Found) -> str:
    chosen = ", ".join(word for role, word in ROLES if getattr(found, role) == entry.form)
    runs = f"<i>{chosen}</i>" if chosen else ""
    name = f"<th scope='row'>{as_html(entry.form)}{runs}</th>"
    right = "yes" if entry.right else "no" if entry.verdict.startswith("wrong") else "–"
    if not entry.right:
        why = f"<td colspan='4'>{as_html(entry.verdict)}</td>"
        return f"<tr class='left-out'>{name}<td>{right}</td>{why}</tr>"
    cells = "".join(f"<td>{_milliseconds(seconds)}</td>" for seconds in entry.layers)
    best = " class=best" if chosen else ""
    return f"<tr{best}>{name}<td>{right}</td>{cells}</tr>"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f}" if seconds < 0.01 else f"{1000 * seconds:,.0f}"
