"""The tab that compares code, prose, maths, structured text and the rest: where does this draft pay off?

Dropdowns hold fixed what ``core.domain_table`` holds fixed; each offers what is on record with the choices to
its left, so that no choice leads to an empty table. The record holds everybody's replies, so it is compared
only where one person can reach the page (``Desk.personal``), which every handler here asks again.
No figure is computed here.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import gradio as gr

from app.card import UNDEFINED
from app.charts import chart_script
from app.desk import Desk
from app.display import as_html
from app.events import AT_ONCE, PRIVATE
from app.exports import USUAL, Exports
from app.figures import decimal, percent
from core.domain_table import (
    ALL,
    PAIR_NAMES,
    Choice,
    Combination,
    DomainRow,
    DomainTable,
    Estimate,
    choices,
    default_choice,
    domain_table,
)
from core.intervals import FEW, Interval
from core.records import DOMAINS
from core.stored import StoreError, reading, why_unusable

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

NOT_ALONE = "Domains are compared where the page is yours alone: this one shows nobody the others' replies."
NOTHING_YET = (
    "Write at least two replies with code and prose, with Record switched on: “Explain a binary search and "
    "show it in Python” will do. Then come back to see on which kind of text the draft pays off, and how "
    "sure that is."
)
POOLED = "top-k, top-p, min-p or repetition penalty"
# Changed in the browser: the chart's value has every measure.
SWITCH = "(metric, value) => JSON.stringify({...JSON.parse(value), metric})"

AXES = ("pair", "drafter", "num_draft_tokens", "temperature", "verifier")
WIDTHS = {"pair": 240, "drafter": 150, "num_draft_tokens": 100, "temperature": 100, "verifier": 158}
ALWAYS_LAST = {**PRIVATE, "trigger_mode": "always_last"}


class DomainsTab:
    """Lays the comparison out in the current block, a ``gr.Tab`` where there is one; ``mount`` connects it.

    Needs ``app.charts.PLOTLY_SCRIPT`` as a static file and ``assets/domains.css`` beside ``page.css``.
    """

    def __init__(self, desk: Desk):
        self.desk = desk
        with gr.Column(elem_id="domains"):
            self._lay_out()

    def _lay_out(self) -> None:
        gr.HTML(HEAD, apply_default_css=False)
        self.notice = gr.HTML("", elem_id="domains-notice", apply_default_css=False)
        with gr.Column(visible=False, elem_id="domains-content") as self.content:
            with gr.Row(elem_id="domains-filters"):
                labels = ("Pair", "Drafter", "K", "Temperature", "Exactness")
                self.filters = [
                    gr.Dropdown(
                        [],
                        label=label,
                        filterable=False,
                        elem_id=f"domains-{axis.replace('_', '-')}",
                        min_width=WIDTHS[axis],
                        scale=3 if axis == "pair" else 1,
                    )
                    for axis, label in zip(AXES, labels, strict=True)
                ]
            self.table = gr.HTML("", elem_id="domains-table", apply_default_css=False)
            with gr.Column(elem_id="domains-sheet"):
                with gr.Row(elem_id="domains-sheet-head"):
                    gr.HTML("<h3 class='margin-title'>Reply by reply</h3>", apply_default_css=False)
                    self.metric = gr.Radio(
                        [(shown.switch, name) for name, shown in MEASURES.items()],
                        value=next(iter(MEASURES)),
                        label="What the chart shows",
                        show_label=False,
                        container=False,
                        elem_id="domains-metric",
                        elem_classes="segmented",
                    )
                self.chart = gr.HTML(
                    "{}",
                    html_template=CHART,
                    js_on_load=chart_script("domains_chart.js"),
                    elem_id="domains-chart",
                    apply_default_css=False,
                )
            with gr.Row(elem_id="domains-foot"):
                gr.HTML(RULES, apply_default_css=False)
                self.export = gr.Button(
                    "Domains (CSV)", size="sm", elem_id="export-domains", min_width=120, scale=0
                )
                self._files = Exports("domains-file")

    def mount(self, page: gr.Blocks) -> None:
        """Connect the handlers: the record is read whenever the tab is opened (without a tab, the page)."""
        shown = [self.notice, self.content, *self.filters, self.table, self.chart]
        asked = [*self.filters, self.metric]
        above = self.table.parent
        while above is not None and not isinstance(above, gr.Tab):
            above = above.parent
        opened = page.load if above is None else above.select
        opened(self.show, asked, shown, **PRIVATE)
        for dropdown in self.filters:
            dropdown.input(self.show, asked, shown, **ALWAYS_LAST)
        self.metric.input(None, [self.metric, self.chart], self.chart, js=SWITCH, **AT_ONCE)
        self._files.connect(self.export, self.write)

    # ------------------------------------------------------------------ handlers

    def show(
        self,
        pair: str | None,
        drafter: str | None,
        num_draft_tokens: int | str | None,
        temperature: float | None,
        verifier: str | None,
        metric: str,
    ) -> dict:
        """The comparison of the combination that is nearest to these choices, earlier ones counting first."""
        if not self.desk.personal:
            return self._only(NOT_ALONE)
        try:
            if not self.desk.store.path.is_file():
                return self._only(NOTHING_YET)
            with reading(self.desk.store.path) as connection:
                found = choices(connection)
                if not found:
                    return self._only(NOTHING_YET)
                wanted = (pair, drafter, num_draft_tokens, temperature, verifier)
                chosen, offered = narrow(found, wanted)
                table = domain_table(connection, chosen.combination)
        except StoreError as error:
            return self._only(str(error))
        except sqlite3.Error as error:
            return self._only(why_unusable(self.desk.store.path, error))
        filters = zip(self.filters, offered, axis_values(chosen.combination), strict=True)
        return {
            self.notice: "",
            self.content: gr.update(visible=True),
            **{dropdown: gr.update(choices=options, value=value) for dropdown, options, value in filters},
            self.table: table_html(table, chosen),
            self.chart: chart_value(table, metric),
        }

    def _only(self, sentence: str) -> dict:
        return {
            self.notice: f"<p class='domains-empty' role='status'>{as_html(sentence)}</p>",
            self.content: gr.update(visible=False),
            self.table: "",
            self.chart: "{}",
        }

    def write(self, form: str = USUAL) -> str:
        """The whole comparison, every combination, as a CSV file."""
        if not self.desk.personal:
            raise gr.Error(NOT_ALONE, print_exception=False)
        return self._files.write(self.desk.store, "domains", form=form)


# ---------------------------------------------------------------------- filters


def axis_values(combination: Combination) -> tuple[str, str, int | str, float, str]:
    """The combination in the terms of the dropdowns, in the order of ``AXES``; K is "auto 8" up to 8.

    The width of trees stands with the drafter ("eagle ×3"), a threshold with its rule ("typical 0.09").
    """
    k, width = combination.num_draft_tokens, combination.tree_width
    threshold = combination.acceptance_threshold
    return (
        _pair_key(combination),
        combination.drafter + (f" ×{width}" if width > 1 else ""),
        f"auto {k}" if combination.auto_draft_tokens else k,
        combination.temperature,
        combination.verifier + ("" if threshold is None else f" {threshold:g}"),
    )


def narrow(
    found: Sequence[Choice], wanted: Sequence[object]
) -> tuple[Choice, list[list[tuple[str, str | int | float]]]]:
    """The choice nearest to ``wanted``, and what each dropdown then offers, as (label, value).

    Going through ``AXES``, what is wanted is kept where it is on record with the values before it; otherwise
    the value is that of the combination with most replies that drafted. ``found`` must not be empty.
    """
    left, offered = list(found), []
    for number, (axis, value) in enumerate(zip(AXES, wanted, strict=True)):
        values = {axis_values(choice.combination)[number]: choice.combination for choice in left}
        names = pair_labels(list(values.values())) if axis == "pair" else {}
        labels = [(names.get(key) or _label(axis, key), key) for key in values]
        offered.append(labels if axis == "pair" else sorted(labels, key=_place))
        if value not in values:
            value = axis_values(default_choice(left).combination)[number]
        left = [choice for choice in left if axis_values(choice.combination)[number] == value]
    return left[0], offered


def _place(option: tuple[str, str | int | float]) -> tuple[bool, str | int | float]:
    """Where an option stands: numbers first, by size."""
    return isinstance(option[1], str), option[1]


def pair_labels(pairs: Sequence[Combination]) -> dict[str, str]:
    """A name for each pair: its models, precision and device, and whatever else tells it from the others."""
    labels = {}
    for one in pairs:
        parts = [f"{one.target} ← {one.draft}" if one.draft else f"{one.target} alone"]
        parts += [one.quantization, one.device]
        for name in PAIR_NAMES:
            said = name in ("target", "draft", "quantization", "device")
            if not said and len({getattr(other, name) for other in pairs if _same_names(one, other)}) > 1:
                parts.append(f"{name.replace('_', ' ')} {getattr(one, name)[:12] or UNDEFINED}")
        labels[_pair_key(one)] = " · ".join(parts)
    return labels


def _same_names(one: Combination, other: Combination) -> bool:
    return all(
        getattr(one, name) == getattr(other, name) for name in ("target", "draft", "quantization", "device")
    )


def _pair_key(combination: Combination) -> str:
    return json.dumps([getattr(combination, name) for name in PAIR_NAMES], ensure_ascii=False)


def _label(axis: str, value: object) -> str:
    names = {
        ("drafter", "model"): "A draft model",
        ("drafter", "plain"): "None",
        ("num_draft_tokens", 0): "0 (plain)",
        ("temperature", 0): "0 (greedy)",
        ("verifier", "token"): "Exact, by token",
        ("verifier", "block"): "Exact, by block",
    }
    if (axis, value) in names:
        return names[axis, value]
    if axis == "verifier":
        return f"Not exact: {value}"
    if axis == "num_draft_tokens" and isinstance(value, str):
        return f"auto (≤ {value.removeprefix('auto ')})"
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---------------------------------------------------------------------- table

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


# ---------------------------------------------------------------------- chart


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
