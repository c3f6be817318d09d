"""The tab that compares ways to draft: the same prompts, the same target, one run, intervals with figures.

A comparison runs in a thread of its own (``core.compare``) and goes on if the page is closed; any page shows
how far it is. One runs at a time. Replies of the chat come between. Results are kept in the record and can be
opened again; where the page is shared, the last run alone is shown. No figure is computed here.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import gradio as gr

from app import zero_gpu
from app.card import UNDEFINED
from app.conversation import Desk
from app.display import as_html
from app.events import AT_ONCE, PRIVATE
from app.exports import Exports
from app.loading import LoadingState
from core.compare import MAX_PROMPTS, CompareError, Step, compare, prompts_for
from core.compared import DOMAINS, PLAIN, SPEEDUP, Comparison, Row, table
from core.domain_table import Estimate
from core.drafters.names import DRAFTERS
from core.records import Settings
from core.settings import MAX_DRAFT_TOKENS, MAX_TREE_WIDTH, SettingsError, parse_settings

SHOWN = 30  # comparisons in the list
WATCH_SECONDS = 0.6

HEAD = (
    "<h2 class='margin-title'>Which way to draft?</h2><p class='lead'>The chosen drafters answer the same "
    "prompts with the same target, in turns, and plain decoding with them. Bars are the speed-up over plain; "
    "whiskers are 95% intervals from resampling prompts.</p>"
)
NOTHING = "<p class='quiet'>No comparison yet. Choose two or more drafters and press Start.</p>"
NOT_LENT = "Drafters cannot be compared on ZeroGPU: its GPU is lent to single replies."
RUNNING = "A comparison is running already: wait for its end, or cancel it."

# name, heading, small print, digits, factor
COLUMNS = (
    ("alpha", "α", "mean overlap", "{:.3f}", 1),
    ("draft_acceptance_rate", "Accepted", "of drafted", "{:.0f}%", 100),
    ("tokens_per_pass", "Per pass", "tokens", "{:.2f}", 1),
    ("seconds_per_round", "Drafting", "ms a round", "{:.1f}", 1e3),
    ("tokens_per_second", "Tokens/s", "without prefill", "{:.1f}", 1),
)


class Runner:
    """The one comparison that may run: begun by ``start``, looked at by any page through ``step``."""

    def __init__(self, desk: Desk):
        self._desk, self._lock = desk, threading.Lock()
        self._cancel: threading.Event | None = None
        self.step: Step | None = None
        self.problem = ""
        self.number = 0  # grows whenever there is something new to show

    @property
    def running(self) -> bool:
        return self._cancel is not None

    def start(self, engine: Any, drafters: Sequence[str], prompts: list, settings: Settings) -> None:
        """Raises CompareError while one runs."""
        with self._lock:
            if self._cancel is not None:
                raise CompareError(RUNNING)
            self._cancel = threading.Event()
            self.step, self.problem = None, ""
            self.number += 1
        work = (engine, drafters, prompts, settings, self._cancel)
        threading.Thread(target=self._run, args=work, name="comparison", daemon=True).start()

    def cancel(self) -> None:
        cancel = self._cancel
        if cancel is not None:
            cancel.set()

    def _run(self, engine: Any, drafters, prompts, settings: Settings, cancel: threading.Event) -> None:
        try:
            for self.step in compare(engine, drafters, prompts, settings, cancel):
                self.number += 1
            if self.step.comparison.replies:
                self._desk.store.add_comparison(self.step.comparison)
        except CompareError as error:
            self.problem = str(error)
        except Exception as error:  # a fault of ours: the page must learn of it
            self.problem = f"The comparison ended early ({type(error).__name__}: {error})."
        finally:
            self._cancel = None
            self.number += 1


class DraftersTab:
    """Lays the comparison out in the current block; ``mount`` connects it."""

    def __init__(self, desk: Desk):
        self.desk, self.runner = desk, Runner(desk)
        with gr.Column(elem_id="drafters"):
            gr.HTML(HEAD, apply_default_css=False)
            with gr.Row(elem_id="drafters-form"):
                self.drafters = gr.CheckboxGroup(
                    [], label="Drafters", info="Plain decoding always takes part.", elem_id="compare-drafters"
                )
            with gr.Row(elem_id="drafters-settings"):
                self.prompts = gr.Slider(
                    1, MAX_PROMPTS // 2, 3, step=1, label="Prompts", info="Of code, and of prose.",
                    elem_id="compare-prompts", min_width=150,
                )  # fmt: skip
                self.k = gr.Slider(
                    1, MAX_DRAFT_TOKENS, Settings().num_draft_tokens, step=1, label="Draft tokens (K)",
                    info="In a round.", elem_id="compare-k", min_width=150,
                )  # fmt: skip
                self.temperature = gr.Slider(
                    0, 2, Settings().temperature, step=0.05, label="Temperature", info="0 is argmax.",
                    elem_id="compare-temperature", min_width=150,
                )  # fmt: skip
                self.width = gr.Slider(
                    1, MAX_TREE_WIDTH, 1, step=1, label="Tree width", info="1 is a chain.",
                    elem_id="compare-tree-width", min_width=150,
                )  # fmt: skip
                self.most = gr.Slider(
                    16, 256, 64, step=16, label="Tokens", info="Most in a reply.",
                    elem_id="compare-tokens", min_width=150,
                )  # fmt: skip
            with gr.Row(elem_id="drafters-buttons"):
                self.begin = gr.Button(
                    "Start", variant="primary", elem_id="compare-start", scale=0, min_width=110
                )
                self.stop = gr.Button(
                    "Cancel", interactive=False, elem_id="compare-cancel", scale=0, min_width=110
                )
            self.progress = gr.HTML("", elem_id="compare-progress", apply_default_css=False)
            self.result = gr.HTML(NOTHING, elem_id="compare-result", apply_default_css=False)
            with gr.Row(visible=desk.personal, elem_id="compare-earlier"):
                self.earlier = gr.Dropdown(
                    [], label="Earlier comparisons", info="Kept in the record.", filterable=False,
                    elem_id="compare-list",
                )  # fmt: skip
                self.delete = gr.Button("Delete", size="sm", elem_id="compare-delete", scale=0, min_width=90)
                self.export = gr.Button(
                    "Comparisons (CSV)", size="sm", elem_id="export-comparisons", scale=0, min_width=150
                )
            self._files = Exports("comparisons-file")
            self._seen = gr.State(-1)
            self._timer = gr.Timer(WATCH_SECONDS)

    @property
    def watching(self) -> list[gr.components.Component]:
        return [self.drafters]

    def show_loading(self, state: LoadingState) -> dict:
        """The drafters of the pair that answers, the ones that need no more loading chosen."""
        if state.engine is None:
            return {self.drafters: gr.update(choices=[], value=[])}
        names = [name for name in state.engine.pair.drafters if name != PLAIN]
        choices = [(DRAFTERS[name][0].upper() + DRAFTERS[name][1:], name) for name in names]
        return {self.drafters: gr.update(choices=choices, value=names)}

    def mount(self, page: gr.Blocks) -> None:
        """Connect the handlers."""
        asked = [self.drafters, self.prompts, self.k, self.temperature, self.width, self.most]
        shown = [self._seen, self.progress, self.result, self.begin, self.stop, self.earlier]
        self.begin.click(self.start, asked, None, **PRIVATE).success(self.look, self._seen, shown, **AT_ONCE)
        self.stop.click(self.runner.cancel, None, None, **AT_ONCE)
        gr.on([page.load, self._timer.tick], self.look, self._seen, shown, **AT_ONCE)
        self.earlier.input(self.open, self.earlier, self.result, **PRIVATE)
        self.delete.click(self.remove, self.earlier, [self.earlier, self.result], **PRIVATE)
        self._files.connect(self.export, self.write)

    # ------------------------------------------------------------------ handlers

    def start(self, drafters: list[str], prompts, k, temperature, width, most) -> None:
        """Begin; raises gradio.Error with one sentence where that cannot be."""
        try:
            if zero_gpu.active():
                raise CompareError(NOT_LENT)
            engine = self.desk.engine
            if engine is None:
                raise CompareError(self.desk.loading.sentence)
            settings = parse_settings(
                temperature=temperature, num_draft_tokens=k, tree_width=width, max_new_tokens=most, seed=1
            )
            if not drafters:
                raise CompareError("Choose at least one drafter to compare with plain decoding.")
            self.runner.start(engine, drafters, prompts_for(prompts), settings)
        except (CompareError, SettingsError) as error:
            raise gr.Error(str(error), print_exception=False) from None

    def look(self, seen: int) -> dict:
        """What a page is shown when there is something new."""
        number, runner = self.runner.number, self.runner
        if number == seen:
            return {self._seen: seen}
        step, running = runner.step, runner.running
        update = {
            self._seen: number,
            self.progress: progress(step, running, runner.problem),
            self.begin: gr.update(interactive=not running),
            self.stop: gr.update(interactive=running),
        }
        if step is not None and step.comparison.replies:
            update[self.result] = result(step.comparison)
        if not running:
            chosen = step.comparison.id if step is not None and step.comparison.replies else None
            update[self.earlier] = self._list(chosen)
        return update

    def open(self, comparison_id: str | None) -> str:
        """An earlier comparison. The record is everybody's: only where the page is one person's."""
        if not self.desk.personal:
            return NOTHING
        for comparison in self.desk.store.comparisons(SHOWN):
            if comparison.id == comparison_id:
                return result(comparison)
        return NOTHING

    def remove(self, comparison_id: str | None) -> dict:
        if self.desk.personal and comparison_id:
            self.desk.store.delete_comparison(comparison_id)
        return {self.earlier: self._list(None), self.result: NOTHING}

    def write(self) -> str:
        """The path of the record's comparisons as CSV."""
        if not self.desk.personal:
            raise gr.Error("The record is exported where the page is yours alone.", print_exception=False)
        return self._files.write(self.desk.store, "comparisons")

    def _list(self, chosen: str | None) -> dict:
        if not self.desk.personal:
            return gr.update()
        kept = self.desk.store.comparisons(SHOWN)
        return gr.update(choices=[(title(one), one.id) for one in kept], value=chosen)


# ---------------------------------------------------------------------- what is shown


def title(comparison: Comparison) -> str:
    """A comparison in the list."""
    names = dict.fromkeys(reply.drafter for reply in comparison.replies if reply.drafter != PLAIN)
    settings = comparison.settings
    when = comparison.created[:16].replace("T", " ")
    ended = "" if comparison.complete else ", cancelled"
    return (
        f"{when} UTC: {', '.join(names)} with {comparison.target}, K = {settings.num_draft_tokens}, "
        f"temperature {settings.temperature:g}{ended}"
    )


def progress(step: Step | None, running: bool, problem: str) -> str:
    """How far the run is, as HTML; "" where none ran."""
    said = [problem] if problem else []
    if step is not None:
        said += step.problems
        share = step.done / step.total if step.total else 0
        count = f"{step.done} of {step.total} replies"
        head = f"<progress max='1' value='{share:.3f}'></progress>" if running else ""
        now = f"{count}: {step.now}" if running else f"{count}, {step.now}"
        return _status(f"{head}<span>{as_html(now)}</span>{_notes(said)}")
    if running:
        return _status("<progress></progress><span>Starting</span>")
    return _status(_notes(said)) if said else ""


def _status(content: str) -> str:
    return f"<div class='compare-progress' role='status'>{content}</div>"


def _notes(sentences: Sequence[str]) -> str:
    return "".join(f"<p class='notice'>{as_html(sentence)}</p>" for sentence in sentences)


def result(comparison: Comparison) -> str:
    """The table and its bars, code and prose, as HTML."""
    rows = table(comparison)
    settings = comparison.settings
    width = f", tree width {settings.tree_width}" if settings.tree_width > 1 else ""
    note = (
        f"{as_html(comparison.target)}, K = {settings.num_draft_tokens}{width}, temperature "
        f"{settings.temperature:g}, up to {settings.max_new_tokens} tokens a reply"
    )
    note += "" if comparison.complete else "; cancelled, with what was measured by then"
    note += "" if settings.exact else f". NOT EXACT: judged by {as_html(settings.verifier)}"
    ends = [e for row in rows if row.figures[SPEEDUP].value for e in _ends(row.figures[SPEEDUP])]
    scale = max([1.5, *ends])
    parts = [f"<p class='quiet'>{note}.</p>"]
    for domain in DOMAINS:
        own = [row for row in rows if row.domain == domain]
        if own:
            parts.append(_domain(domain, own, scale))
    return f"<div class='compare-result'>{''.join(parts)}</div>"


def _domain(domain: str, rows: Sequence[Row], scale: float) -> str:
    order = {name: place for place, name in enumerate(DRAFTERS)}
    heads = "".join(f"<th scope='col'>{head}<small>{small}</small></th>" for _, head, small, _, _ in COLUMNS)
    body = []
    for row in sorted(rows, key=lambda row: order.get(row.drafter, len(order))):
        cells = "".join(_cell(row.figures[name], form, by) for name, _, _, form, by in COLUMNS)
        body.append(
            f"<tr><th scope='row' title='{as_html(row.draft)}'>{as_html(row.drafter)}</th>"
            f"<td class='bar'>{_bar(row.figures[SPEEDUP], scale, row.drafter)}</td>{cells}</tr>"
        )
    count = max(row.replies for row in rows)
    replies = f"{count} {'reply' if count == 1 else 'replies'} each"
    return (
        f"<h3>{domain.capitalize()} <small>{replies}</small></h3>"
        "<div class='table-scroll'><table class='compare-table'><thead><tr><th scope='col'>Drafter</th>"
        f"<th scope='col'>Speed-up<small>over plain</small></th>{heads}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _ends(estimate: Estimate) -> tuple[float, ...]:
    return estimate.interval or (estimate.value,)


def _bar(estimate: Estimate, scale: float, drafter: str) -> str:
    """The speed-up as a bar from 0, a line at 1, and a whisker."""
    value = 1.0 if drafter == PLAIN else estimate.value
    if value is None:
        return UNDEFINED
    low, high = estimate.interval or (value, value)
    kind = "base" if drafter == PLAIN else "gain" if value >= 1 else "loss"
    left, width = (f"{100 * x / scale:.2f}%" for x in (low, high - low))
    whisker = f"<i class='whisker' style='left:{left};width:{width}'></i>" if high > low else ""
    told = f"{value:.2f}×" + (f" ({low:.2f} to {high:.2f})" if high > low else "")
    fill, one = (f"{100 * x / scale:.2f}%" for x in (value, 1))
    return (
        f"<div class='speed {kind}'><span class='track'><i class='fill' style='width:{fill}'></i>"
        f"<i class='one' style='left:{one}'></i>{whisker}</span><b>{told}</b></div>"
    )


def _cell(estimate: Estimate, form: str, by: float) -> str:
    if estimate.value is None:
        return f"<td>{UNDEFINED}</td>"
    interval = ""
    if estimate.interval:
        low, high = (form.format(by * end) for end in estimate.interval)
        interval = f"<small>{low} to {high}</small>"
    return f"<td>{form.format(by * estimate.value)}{interval}</td>"
