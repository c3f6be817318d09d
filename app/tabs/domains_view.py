"""The comparison of domains as HTML and as the value of its chart. Pure functions; all text is escaped."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from app.chat.figures import decimal, percent
from app.chat.why import UNDEFINED
from app.widgets.display import as_html
from core.figures.intervals import FEW, Interval
from core.record.domain_table import (
    ALL,
    Choice,
    DomainRow,
    DomainTable,
    Estimate,
)
from core.records import DOMAINS

LABELS = {**{domain: domain.capitalize() for domain in DOMAINS}, ALL: "All text"}


@dataclass(frozen=True)
class Shown:
    """How a measure is shown: its column's heading and small print, the chart's switch and axis, a figure."""

    heading: str
    small: str
    switch: str
    axis: str
    write: Callable[[float | None], str | None]
    share: bool = False  # from 0 to 1


MEASURES = {
    "draft_acceptance_rate": Shown(
        "Draft acceptance",
        "accepted / drafted",
        "Acceptance",
        "draft acceptance rate, accepted / drafted",
        percent,
        share=True,
    ),
    "alpha": Shown(
        "α", "mean overlap", "α", "α, mean overlap Σ min(p, q)", lambda value: decimal(value, 3), share=True
    ),
    "tokens_per_pass": Shown(
        "Tokens per pass",
        "emitted / rounds",
        "Per pass",
        "tokens per pass of the target",
        lambda value: decimal(value, 2),
    ),
    "tokens_per_second": Shown(
        "Tokens/s",
        "without prefill",
        "Tokens/s",
        "tokens per second, without prefill",
        lambda value: decimal(value, 1),
    ),
}
POOLED = "top-k, top-p, min-p or repetition penalty"
HEAD = """<div class="domains-head"><h2 class="domains-title">Where does the draft pay off?</h2>
<p>The same pair on different kinds of text: acceptance belongs to the text as much as to the models.</p>
</div>"""
RULES = f"""<details class="meanings domains-rules"><summary>How this is counted</summary><ul>
<li>A round belongs to the kind of text that its first token stands in.</li>
<li>Every round on record counts, also of replies that were stopped or interrupted.</li>
<li>Figures are sums over all rounds; intervals hold 95% and come from resampling whole replies 2,000 times
(Efron &amp; Tibshirani, 1993), since tokens of one reply resemble each other. One reply has no interval.</li>
<li>Below {FEW} replies such an interval is known to be too narrow: those are marked †.</li>
<li>Speed-up: tokens/s over those of the same target at the same temperature with K = 0, on the same kind of
text.</li>
<li>Not held fixed: {POOLED}, stop strings, the length limit, system prompts.</li>
</ul></details>"""
FEW_MARK = f"<i class='few' title='Fewer than {FEW} replies: too narrow'>†</i>"
CHART = "<div class='plot-note' hidden></div><div class='plot' role='img' hidden></div>"


def table_html(table: DomainTable, choice: Choice) -> str:
    """The comparison as a table, with what there is of it in a sentence below."""
    drafts = table.combination.num_draft_tokens > 0
    beside = drafts and any(row.plain_replies for row in table.rows)
    heads = [_head(shown.heading, shown.small) for shown in MEASURES.values()]
    if beside:
        heads.append(_head("Speed-up", "over plain, K = 0"))
    heads += [_head(name, "") for name in ("Replies", "Rounds", "Drafted", "Emitted")]
    body = "".join(_row(row, beside) for row in table.rows)
    foot = f"<tfoot>{_row(table.whole, beside)}</tfoot>" if table.whole and len(table.rows) > 1 else ""
    return (
        "<div class='domains-scroll' tabindex='0' role='region' aria-label='Domains compared'>"
        f"<table class='domains'><thead><tr><th scope='col'>Text</th>{''.join(heads)}</tr></thead>"
        f"<tbody>{body}</tbody>{foot}</table></div>{_remarks(table, choice, FEW_MARK in body + foot)}"
    )


def _head(heading: str, small: str) -> str:
    return f"<th scope='col'>{heading}<small>{small}</small></th>"


def _row(row: DomainRow, beside: bool) -> str:
    cells = [_estimate(row.measures[name], shown.write) for name, shown in MEASURES.items()]
    if beside:
        cells.append(_estimate(row.speedup, _times))
    counts = (len(row.replies), row.sums.rounds, row.sums.drafted, row.sums.emitted)
    cells += [f"<td class='count'>{count:,}</td>" for count in counts]
    return f"<tr><th scope='row'>{as_html(LABELS[row.domain])}</th>{''.join(cells)}</tr>"


def _estimate(estimate: Estimate, write: Callable[[float | None], str | None]) -> str:
    """A cell: the figure, and its interval in small print, marked where it is too narrow."""
    value, small = write(estimate.value) or UNDEFINED, ""
    if estimate.interval is not None:
        mark = FEW_MARK if estimate.replies < FEW else ""
        small = f"{_between(estimate.interval, write)}{mark}"
    elif estimate.value is not None:
        small = UNDEFINED
    return f"<td><b>{value}</b><small>{small}</small></td>"


def _between(interval: Interval, write: Callable[[float | None], str | None]) -> str:
    low, high = (write(end) for end in interval)
    shared = next((unit for unit in ("%", "×") if low.endswith(unit)), "")
    return f"{low.removesuffix(shared)} – {high}"


def _times(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}×"


def _remarks(table: DomainTable, choice: Choice, marked: bool) -> str:
    present = {row.domain for row in table.rows}
    absent = [LABELS[domain].lower() for domain in DOMAINS if domain not in present]
    remarks = []
    if choice.replies == 1:
        remarks.append("One reply has no interval: write at least one more with these settings.")
    if absent:
        remarks.append(f"Not on record with these settings: {', '.join(absent)}.")
    if choice.filter_settings > 1:
        remarks.append(f"Pools {choice.filter_settings} different settings of {POOLED}.")
    if table.combination.num_draft_tokens > 0 and not any(row.plain_replies for row in table.rows):
        remarks.append("“Answer again plainly” in the chat gives the plain speed to compare with.")
    if marked:
        remarks.append(f"† Fewer than {FEW} replies: the interval is too narrow.")
    return f"<p class='domains-remarks'>{as_html(' '.join(remarks))}</p>" if remarks else ""


def chart_value(table: DomainTable, metric: str) -> str:
    """What the chart draws, as JSON: ``measures`` has each measure's drawing, ``metric`` is the one shown."""
    return json.dumps({"metric": metric, "measures": {name: _drawing(table, name) for name in MEASURES}})


def _drawing(table: DomainTable, name: str) -> dict:
    shown = MEASURES[name]
    domains = [_domain(row, name) for row in table.rows if row.measures[name].value is not None]
    summary = "; ".join(f"{domain['label']} {domain['text']}" for domain in domains)
    return {
        "axis": shown.axis,
        "share": shown.share,
        "percent": shown.write is percent,
        "domains": domains,
        "note": "" if domains else "Nothing was drafted with these settings: choose Tokens/s, or another K.",
        "summary": f"{shown.axis}: {summary}",
    }


def _domain(row: DomainRow, name: str) -> dict:
    write = MEASURES[name].write
    measured = [(reply.measure(name), reply.rounds) for reply in row.replies]
    measured = [(value, rounds) for value, rounds in measured if value is not None]
    estimate = row.measures[name]
    between = f", 95% interval {_between(estimate.interval, write)}" if estimate.interval else ""
    return {
        "label": LABELS[row.domain],
        "count": _plural(len(measured), "reply", "replies"),
        "values": [value for value, _ in measured],
        "texts": [f"{write(value)} in {_plural(rounds, 'round')}" for value, rounds in measured],
        "value": estimate.value,
        "interval": estimate.interval,
        "text": f"{write(estimate.value)}{between}",
        "plain": row.plain_speed.value if name == "tokens_per_second" else None,
    }


def _plural(count: int, one: str, many: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"
