"""The tab that compares ways to draft: the same prompts, the same target, one run, intervals with figures.

A comparison runs in a thread of its own (``core.compare``); one at a time in a process, and replies of the
chat come between. Where the page is one person's, the run goes on when the page is closed, every page of
theirs shows it, and earlier ones can be opened from the record. Where it is shared, a run belongs to the page
that began it: others see that one is running and nothing of it, and it ends when that page is closed.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import gradio as gr

from app.chat.desk import NOT_DRAFTING, Desk
from app.serving import zero_gpu
from app.serving.loading import LoadingState
from app.tabs.compared_view import progress, result, rule_name, title
from app.widgets.events import AT_ONCE, PRIVATE
from app.widgets.exports import USUAL, Exports
from core.compare import MAX_PROMPTS, CompareError, Step, compare, prompts_for
from core.drafters.names import title as drafter_title
from core.record.compared import PLAIN, Comparison
from core.records import Settings
from core.settings import MAX_DRAFT_TOKENS, MAX_TREE_WIDTH, VERIFIERS, SettingsError, parse_settings

log = logging.getLogger(__name__)

SHOWN = 30  # comparisons in the list
RUNS_KEPT = 32  # of pages that share this process
WATCH_SECONDS = 0.6

HEAD = (
    "<div class='domains-head'><h2 class='domains-title'>Which way to draft?</h2>"
    "<p>The chosen drafters answer the same prompts with the same target, in turns, and plain decoding with "
    "them. Intervals are 95%, from resampling prompts.</p></div>"
)
NOTHING = "<p class='domains-empty'>No comparison yet: choose drafters and press Start.</p>"
NONE_CHOSEN = "Choose at least one drafter to compare with plain decoding."
NOT_LENT = "Drafters cannot be compared on ZeroGPU: its GPU is lent to single replies."
NOT_ALONE = "The record is exported where the page is yours alone."
RUNNING = "A comparison is running already: wait for its end, or cancel it."
ANOTHER = "Somebody else's comparison is running: yours can begin when it has ended."
CHANGED = "Another pair was loaded, so the comparison ended with what was measured by then."
FAULT = "The comparison ended early: whoever runs this page finds the reason in its log."


@dataclass(eq=False)
class Run:
    """One comparison of ``owner``: a page where pages are shared, "" where they are one person's."""

    owner: str
    cancel: threading.Event = field(default_factory=threading.Event)
    step: Step | None = None
    problem: str = ""


class Runner:
    """The comparisons of a process, one at a time; the newest of each owner is kept to be looked at."""

    def __init__(self, desk: Desk):
        self._desk, self._lock = desk, threading.Lock()
        self._runs: OrderedDict[str, Run] = OrderedDict()
        self.running: Run | None = None
        self.number = 0  # grows whenever there is something new to show

    def of(self, owner: str) -> Run | None:
        return self._runs.get(owner)

    def start(
        self, owner: str, engine: Any, drafters: Sequence[str], prompts: list, settings: Settings
    ) -> None:
        """Raises CompareError while one runs."""
        with self._lock:
            if self.running is not None:
                raise CompareError(RUNNING if self.running.owner == owner else ANOTHER)
            self.running = run = Run(owner)
            self._runs[owner] = run
            self._runs.move_to_end(owner)
            while len(self._runs) > RUNS_KEPT:
                self._runs.popitem(last=False)
            self.number += 1
        work = (run, engine, drafters, prompts, settings)
        threading.Thread(target=self._run, args=work, name="comparison", daemon=True).start()

    def cancel(self, owner: str) -> None:
        """End the owner's comparison, if one runs, after the round in flight."""
        run = self.running
        if run is not None and run.owner == owner:
            run.cancel.set()

    def forget(self, comparison_id: str | None = None) -> None:
        """Forget what was measured in that comparison, or in all; one that runs goes on."""
        with self._lock:
            for owner, run in list(self._runs.items()):
                measured = run.step.comparison.id if run.step is not None else None
                if run is not self.running and comparison_id in (None, measured):
                    del self._runs[owner]
            self.number += 1

    def _run(self, run: Run, engine: Any, drafters, prompts, settings: Settings) -> None:
        try:
            for step in compare(engine, drafters, prompts, settings, run.cancel):
                run.step = step
                self.number += 1
                if self._desk.engine is not engine and not run.cancel.is_set():
                    run.problem = CHANGED  # the weights of this one are to be freed
                    run.cancel.set()
        except CompareError as error:
            run.problem = str(error)
        except Exception:  # a fault of ours: the page must learn of it
            log.exception("A comparison ended with an error")
            run.problem = FAULT
        finally:
            if run.step is not None and run.step.comparison.replies:
                self._desk.store.add_comparison(run.step.comparison)
            self.running = None
            self.number += 1


class DraftersTab:
    """Lays the comparison out in the current block; ``mount`` connects it."""

    def __init__(self, desk: Desk):
        self.desk, self.runner = desk, Runner(desk)
        desk.also_forget.append(self.runner.forget)
        with gr.Column(elem_id="drafters"):
            gr.HTML(HEAD, apply_default_css=False)
            with gr.Column(elem_id="compare-form"):
                self._lay_form_out()
            self.progress = gr.HTML("", elem_id="compare-progress", apply_default_css=False)
            self.result = gr.HTML(NOTHING, elem_id="compare-result", apply_default_css=False)
            with gr.Row(visible=desk.personal, elem_id="compare-earlier"):
                self.earlier = gr.Dropdown(
                    [], label="Comparisons on record", filterable=False, elem_id="compare-list", scale=1
                )
                self.delete = gr.Button("Delete", size="sm", elem_id="compare-delete", scale=0, min_width=80)
                self.export = gr.Button(
                    "All (CSV)", size="sm", elem_id="export-comparisons", scale=0, min_width=100
                )
                self._files = Exports("comparisons-file")
            self._seen, self._opened = gr.State(-1), gr.State(None)
            self._timer = gr.Timer(WATCH_SECONDS)

    def _lay_form_out(self) -> None:
        self.drafters = gr.CheckboxGroup(
            [], label="Drafters", info="Plain decoding always takes part.", elem_id="compare-drafters"
        )
        usual = Settings()
        fields = (
            ("Prompts", "compare-prompts", 1, MAX_PROMPTS // 2, 3, 1, "of each kind"),
            ("K", "compare-k", 1, MAX_DRAFT_TOKENS, usual.num_draft_tokens, 1, "drafts a round"),
            ("Temperature", "compare-temperature", 0, 2, usual.temperature, 0.05, "0 is argmax"),
            ("Tree width", "compare-tree-width", 1, MAX_TREE_WIDTH, 1, 1, "1 is a chain"),
            ("Reply", "compare-tokens", 16, 256, 64, 16, "most tokens"),
        )
        with gr.Row(elem_id="compare-settings"):
            self.fields = [
                gr.Slider(low, high, value, step=step, label=label, info=info, elem_id=name, min_width=170)
                for label, name, low, high, value, step, info in fields
            ]
            verifier = gr.Dropdown(
                [(rule_name(name), name) for name in VERIFIERS],
                value=usual.verifier,
                label="Verification",
                info="how drafts are judged",
                filterable=False,
                elem_id="compare-verifier",
                min_width=170,
            )
            self.fields.append(verifier)
        with gr.Row(elem_id="compare-buttons"):
            self.begin = gr.Button(
                "Start", variant="primary", size="sm", elem_id="compare-start", scale=0, min_width=110
            )
            self.stop = gr.Button(
                "Cancel", interactive=False, size="sm", elem_id="compare-cancel", scale=0, min_width=110
            )

    @property
    def watching(self) -> list[gr.components.Component]:
        return [self.drafters]

    def show_loading(self, state: LoadingState) -> dict:
        """The drafters of the pair that answers, all chosen."""
        if state.engine is None:
            return {self.drafters: gr.update(choices=[], value=[])}
        names = [name for name in state.engine.pair.drafters if name != PLAIN]
        choices = [(drafter_title(name), name) for name in names]
        return {self.drafters: gr.update(choices=choices, value=names)}

    def mount(self, page: gr.Blocks) -> None:
        """Connect the handlers."""
        looked = [self._seen, self._opened]
        shown = [self._seen, self.progress, self.result, self.begin, self.stop, self.earlier]
        begun = self.begin.click(self.start, [self.drafters, *self.fields], self._opened, **PRIVATE)
        begun.success(self.look, looked, shown, **AT_ONCE)
        self.stop.click(self.cancel, None, None, **AT_ONCE)
        gr.on([page.load, self._timer.tick], self.look, looked, shown, **AT_ONCE)
        self.earlier.input(self.open, self.earlier, [self._opened, self.result], **PRIVATE)
        self.delete.click(self.remove, self.earlier, [self._opened, self.earlier, self.result], **PRIVATE)
        self._files.connect(self.export, self.write)
        if not self.desk.personal:
            page.unload(self.cancel)

    # ------------------------------------------------------------------ handlers

    def start(
        self,
        drafters: list[str],
        prompts,
        k,
        temperature,
        width,
        most,
        verifier: str,
        request: gr.Request | None = None,
    ) -> None:
        """Begin, and follow what is begun; raises gradio.Error with one sentence where that cannot be."""
        try:
            if zero_gpu.active():
                raise CompareError(NOT_LENT)
            engine = self.desk.engine
            if engine is None:
                raise CompareError(self.desk.loading.sentence)
            settings = parse_settings(
                temperature=temperature,
                num_draft_tokens=k,
                tree_width=width,
                max_new_tokens=most,
                verifier=verifier,
                seed=1,
            )
            if not drafters:
                raise CompareError(NONE_CHOSEN)
            self.runner.start(self._owner(request), engine, drafters, prompts_for(prompts), settings)
        except (CompareError, SettingsError) as error:
            raise gr.Error(str(error), print_exception=False) from None

    def cancel(self, request: gr.Request | None = None) -> None:
        self.runner.cancel(self._owner(request))

    def look(self, seen: int, opened: str | None, request: gr.Request | None = None) -> dict:
        """What a page is shown when there is something new; what was opened from the record stays there."""
        number, running = self.runner.number, self.runner.running
        if number == seen:
            return {self._seen: seen}
        run = self.runner.of(self._owner(request))
        own = running is not None and running is run
        update = {
            self._seen: number,
            self.progress: self._progress(run, own, running is not None),
            self.begin: gr.update(interactive=running is None),
            self.stop: gr.update(interactive=own),
        }
        found = run.step.comparison if run is not None and run.step is not None else None
        if found is not None and not found.replies:
            found = None
        if not own and self.desk.personal:
            kept = self.desk.store.comparisons(SHOWN)
            found = found or (kept[0] if kept else None)
            chosen = opened or (found.id if found else None)
            update[self.earlier] = _list(kept, chosen)
        if opened is None and found is not None:
            update[self.result] = result(found)
        return update

    def open(self, comparison_id: str | None) -> dict:
        """An earlier comparison. The record is everybody's: only where the page is one person's."""
        kept = self.desk.store.comparisons() if self.desk.personal else []
        found = next((one for one in kept if one.id == comparison_id), None)
        return {
            self._opened: found.id if found else None,
            self.result: result(found) if found else NOTHING,
        }

    def remove(self, comparison_id: str | None) -> dict:
        """Delete a comparison of the record and show the newest that is left."""
        if not self.desk.personal:
            return {self._opened: None}
        if comparison_id:
            self.runner.forget(comparison_id)
            self.desk.store.delete_comparison(comparison_id)
        kept = self.desk.store.comparisons(SHOWN)
        newest = kept[0] if kept else None
        return {
            self._opened: newest.id if newest else None,
            self.earlier: _list(kept, newest.id if newest else None),
            self.result: result(newest) if newest else NOTHING,
        }

    def write(self, form: str = USUAL) -> str:
        """The path of the record's comparisons as CSV."""
        if not self.desk.personal:
            raise gr.Error(NOT_ALONE, print_exception=False)
        return self._files.write(self.desk.store, "comparisons", form=form)

    def _owner(self, request: gr.Request | None) -> str:
        """Whose comparison a page's is: each page its own where people share them."""
        return "" if self.desk.personal or request is None else request.session_hash

    def _progress(self, run: Run | None, own: bool, running: bool) -> str:
        if running and not own:
            return progress(None, False, [ANOTHER])
        if run is None:
            return ""
        notes = [run.problem] if run.problem else []
        problems = run.step.problems if run.step is not None else ()
        # Why something cannot be read, paths and all, is its owner's matter.
        notes += problems if self.desk.personal else [NOT_DRAFTING] * bool(problems)
        return progress(run.step, own, notes)


def _list(kept: Sequence[Comparison], chosen: str | None) -> dict:
    return gr.update(choices=[(title(one), one.id) for one in kept], value=chosen)
