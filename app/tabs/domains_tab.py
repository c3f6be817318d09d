"""The tab that compares code, prose, maths, structured text and the rest: where does this draft pay off?

Dropdowns hold fixed what ``core.record.domain_table`` holds fixed; each offers what is on record with the
choices to its left, so that no choice leads to an empty table. The record holds everybody's replies, so it is
compared only where one person can reach the page (``Desk.personal``), which every handler here asks again. No
figure is computed here.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

import gradio as gr

from app.chat.desk import Desk
from app.chat.why import UNDEFINED
from app.tabs.domains_view import CHART, HEAD, MEASURES, RULES, chart_value, table_html
from app.widgets.charts import chart_script
from app.widgets.display import as_html
from app.widgets.events import AT_ONCE, PRIVATE
from app.widgets.exports import USUAL, Exports
from core.record.domain_table import (
    PAIR_NAMES,
    Choice,
    Combination,
    choices,
    default_choice,
    domain_table,
)
from core.record.stored import StoreError, reading, why_unusable

NOT_ALONE = "Domains are compared where the page is yours alone: this one shows nobody the others' replies."
NOTHING_YET = (
    "Write at least two replies with code and prose, with Record switched on: “Explain a binary search and "
    "show it in Python” will do. Then come back to see on which kind of text the draft pays off, and how "
    "sure that is."
)
# Changed in the browser: the chart's value has every measure.
SWITCH = "(metric, value) => JSON.stringify({...JSON.parse(value), metric})"

AXES = ("pair", "drafter", "num_draft_tokens", "temperature", "verifier")
WIDTHS = {"pair": 240, "drafter": 150, "num_draft_tokens": 100, "temperature": 100, "verifier": 158}
ALWAYS_LAST = {**PRIVATE, "trigger_mode": "always_last"}


class DomainsTab:
    """Lays the comparison out in the current block, a ``gr.Tab`` where there is one; ``mount`` connects it.

    Needs ``app.widgets.charts.PLOTLY_SCRIPT`` as a static file and ``assets/domains.css`` beside
    ``page.css``.
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


# ---------------------------------------------------------------------- chart
