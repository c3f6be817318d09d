"""The Models tab: what runs, and a picker for another pair.

A pair is loaded by ``desk.loader`` in its own thread; this tab says what it would take before and how far it
is meanwhile. Only a personal page may change what runs, for everybody who is connected shares it; elsewhere
the tab only tells. Names, licences and sentences come from strangers' files: all is shown as inert text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import gradio as gr

from app.chat.desk import Desk
from app.serving import choosing, zero_gpu
from app.serving.loading import LoadingRefused, LoadingState
from app.tabs.pairs_view import (
    FORM_NAMES,
    facts,
    failure,
    passes,
    question_about,
    question_about_own,
    running,
)
from app.tabs.products_view import products
from app.widgets.display import as_html
from app.widgets.events import AT_ONCE, PRIVATE
from app.widgets.masthead import loading_strip, progress_strip
from app.widgets.watching import watched
from core.machine.progress import Progress
from core.models.asked import DEVICES, DTYPES, QUANTIZE
from core.models.errors import LoadError
from core.models.sources import EMBEDDED, SpecError
from core.pairs.catalogue import CATALOGUE, Entry
from core.pairs.spec import CUSTOM, PairSpec

log = logging.getLogger(__name__)

DEVICE_NAMES = {"auto": "A card where there is one", "cpu": "Processor", "cuda": "CUDA card"}
DTYPE_NAMES = {"auto": "What suits the device"}

SHARED = "Everybody who reaches this page shares one pair, so only its owner chooses it, where it is started."
ZERO_GPU = (
    "On ZeroGPU the pair is chosen by the Space's variables, because models reach the GPU only from the "
    "start."
)
WRITING = "A reply is being written: measure when it has ended."
MEASURE_AGAIN = (
    "The figures on record for this pair came from other weights of the same name: measure it again before "
    "comparing."
)
AUTOMATIC = dict.fromkeys(choosing.FORMS, "auto")
ASK_HUB = "Asking how much there is to download."


class ModelsTab:
    """Lays itself out in the current block; opening ``tab``, which it is in, brings it up to date."""

    def __init__(self, desk: Desk, tab: gr.Tab):
        self.desk = desk
        self.may_choose = desk.personal and not zero_gpu.active()
        with gr.Row(elem_id="models"):
            with gr.Column(elem_id="models-runs", min_width=320, scale=1):
                gr.HTML("<h2 class='margin-title'>What runs</h2>", apply_default_css=False)
                self.runs = gr.HTML("", elem_id="runs", apply_default_css=False)
                self.measuring = gr.HTML("", elem_id="measuring", apply_default_css=False)
                with gr.Row(elem_id="runs-actions", visible=self.may_choose):
                    self.measure = gr.Button(
                        "Measure again", size="sm", interactive=False, elem_id="measure", min_width=84
                    )
                    self.unload = gr.Button(
                        "Unload", size="sm", interactive=False, elem_id="unload", min_width=84
                    )
                if not self.may_choose:
                    reason = ZERO_GPU if zero_gpu.active() else SHARED
                    gr.HTML(f"<p class='quiet'>{as_html(reason)}</p>", apply_default_css=False)
            with gr.Column(elem_id="models-picker", min_width=320, scale=2, visible=self.may_choose):
                self._lay_out_picker()
        self._connect(tab)

    def _lay_out_picker(self) -> None:
        gr.HTML("<h2 class='margin-title'>Another pair</h2>", apply_default_css=False)
        with gr.Row(elem_id="models-choice"):
            self.pair = gr.Radio(
                [("The embedded pair", EMBEDDED)]
                + [(entry.title, name) for name, entry in CATALOGUE.items()]
                + [("A pair of your own", CUSTOM)],
                value=EMBEDDED,
                label="Pair",
                show_label=False,
                container=False,
                elem_id="pair-choice",
                min_width=220,
            )
            with gr.Column(min_width=260, scale=2):
                self.facts = gr.HTML("", elem_id="pair-facts", apply_default_css=False)
                with gr.Column(visible=False, elem_id="custom-pair") as self.custom:
                    self.target = gr.Textbox(
                        label="Target",
                        info="The big model: a hub id (owner/name), a folder, or a .gguf file.",
                        elem_id="custom-target",
                    )
                    self.draft = gr.Textbox(
                        label="Draft",
                        info="The small one, with the same tokenizer; blank lets the target write alone.",
                        elem_id="custom-draft",
                    )
                with gr.Accordion("How it runs", open=False, elem_id="pair-form"):
                    self.how = [
                        gr.Dropdown(choices, value="auto", label=label, elem_id=f"pair-{name}", min_width=150)
                        for name, label, choices in (
                            ("quantize", "Quantisation of the target", _named(QUANTIZE, FORM_NAMES)),
                            ("draft_quantize", "Quantisation of the draft", _named(QUANTIZE, FORM_NAMES)),
                            ("device", "Device", _named(DEVICES, DEVICE_NAMES)),
                            ("dtype", "Type of activations", _named(DTYPES, DTYPE_NAMES)),
                        )
                    ]
                self.load = gr.Button("Load", variant="primary", elem_id="load-pair", min_width=84)
                self.doomed = gr.State(None)  # the pair that is asked about
                with gr.Column(visible=False, elem_id="confirm-load") as self.confirm:
                    self.question = gr.HTML("", apply_default_css=False)
                    with gr.Row():
                        self.yes = gr.Button(
                            "Load", variant="primary", size="sm", elem_id="load-yes", min_width=84
                        )
                        self.no = gr.Button("Not now", size="sm", elem_id="load-no", min_width=84)
                self.progress = gr.HTML("", elem_id="models-loading", apply_default_css=False)

    def _connect(self, tab: gr.Tab) -> None:
        chosen = [self.pair, self.target, self.draft, *self.how]
        asked = [self.doomed, self.question, self.confirm, self.load, self.progress]
        tab.select(self.refresh, chosen, [self.runs, self.facts], **AT_ONCE)
        gr.on(
            [component.change for component in (self.pair, *self.how)],
            self.choose,
            chosen,
            [self.facts, self.custom, *asked],
            **AT_ONCE,
        )
        self.no.click(self.not_now, None, asked, **AT_ONCE)
        # What may have changed the loader's state, for whoever shows it.
        self.changing = [
            self.load.click(self.ask, chosen, asked, **PRIVATE),
            self.yes.click(self.agree, self.doomed, asked, **AT_ONCE),
            self.unload.click(self.give_up, None, None, **PRIVATE),
            self.measure.click(self.measure_again, None, [self.measuring, self.measure], **PRIVATE),
        ]

    # ------------------------------------------------------------------ what is shown

    @property
    def choice(self) -> list[gr.components.Component]:
        """What ``look_at`` changes."""
        return [self.pair, self.facts, self.custom, *self.how]

    @property
    def watching(self) -> list[gr.components.Component]:
        """What ``show_loading`` changes."""
        return [self.runs, self.unload, self.measure, self.load, self.progress]

    def show_loading(self, state: LoadingState) -> dict:
        """The tab's part of a new state of the loader."""
        return {
            self.runs: self._running(state),
            self.unload: gr.update(interactive=state.engine is not None and not state.loading),
            self.measure: gr.update(interactive=can_measure(state)),
            self.load: gr.update(interactive=not state.loading),
            self.progress: self._strip(state),
        }

    def refresh(self, name: str, target: str, draft: str, *how: str) -> tuple[str, str]:
        """What changes with time: memory free and held."""
        return self._running(self.desk.loading), facts(name, _how(how))

    def choose(self, name: str, target: str, draft: str, *how: str) -> dict:
        """Another pair is looked at."""
        return {
            self.facts: facts(name, _how(how)),
            self.custom: gr.update(visible=name == CUSTOM),
            **self.not_now(),
            self.progress: self._strip(self.desk.loading),  # in place of what was said of another choice
        }

    def _strip(self, state: LoadingState) -> str:
        return loading_strip(state) if state.loading or state.failed else ""

    def _running(self, state: LoadingState) -> str:
        engine = state.engine
        if engine is None:
            return f"<p class='quiet'>{as_html(state.sentence)}</p>"
        info = engine.pair.info
        notes = list(engine.pair.notes)
        if self.desk.store.changed_since_measured(info):
            notes.insert(0, MEASURE_AGAIN)
        kept = engine.cache_bytes, engine.cache_limit
        costs = passes(engine.pair.costs, engine.pair.acceptance)
        return running(info, notes, *kept) + costs + products(engine.pair.products)

    # ------------------------------------------------------------------ loading

    def ask(self, name: str, target: str, draft: str, *how: str) -> Iterator[dict]:
        """Load the chosen pair, or ask first: of a download, and always of a pair of one's own."""
        if not self.may_choose:
            return
        try:
            pair = choosing.chosen(name, target, draft, _how(how))
            yield {**self.not_now(), self.progress: f"<p class='quiet'>{ASK_HUB}</p>"}
            question = question_about_own(pair) if name == CUSTOM else question_about(pair)
        except (SpecError, LoadError) as error:
            yield {self.progress: failure(str(error))}
            return
        if question:
            yield {
                self.doomed: pair,
                self.question: question,
                self.confirm: gr.update(visible=True),
                self.load: gr.update(visible=False),
                self.progress: "",
            }
        else:
            yield {self.progress: self._begin(pair)}

    def agree(self, pair: PairSpec | None) -> dict:
        """Load what was asked about."""
        said = self._begin(pair) if pair is not None and self.may_choose else ""
        return {**self.not_now(), self.progress: said}

    def not_now(self) -> dict:
        """The question, put away."""
        return {self.doomed: None, self.confirm: gr.update(visible=False), self.load: gr.update(visible=True)}

    def look_at(self, entry: Entry) -> dict:
        """The picker at this pair of the catalogue, in the forms that suit the device."""
        return {
            self.pair: entry.name,
            self.facts: facts(entry.name, AUTOMATIC),
            self.custom: gr.update(visible=False),
            **dict.fromkeys(self.how, "auto"),
        }

    def _begin(self, pair: PairSpec) -> str:
        try:
            self.desk.loader.start(pair)
        except LoadingRefused as error:
            return failure(str(error))
        return loading_strip(self.desk.loading)

    def measure_again(self) -> Iterator[dict]:
        """Look at the products anew and time the passes of the pair that runs, saying how far that is, unless
        a reply is being written with it."""
        state = self.desk.loader.state
        if not self.may_choose or not can_measure(state):
            return
        said: list[tuple[Callable[[str], None], str]] = []
        for sentence, fraction in watched(lambda say: self._measure(state.engine, say, said)):
            yield {
                self.measuring: progress_strip(sentence, fraction),
                self.measure: gr.update(interactive=False),
            }
        for tell, sentence in said:
            tell(sentence)
        yield {self.measuring: "", self.measure: gr.update(interactive=can_measure(self.desk.loader.state))}

    def _measure(self, engine: Any, say: Progress, said: list[tuple[Callable[[str], None], str]]) -> None:
        """``said`` gets what is to be told at the end: only the event itself can tell."""
        from core.engine import calibration  # imports torch
        from core.pairs.pair import look_again

        with engine.idle() as free:
            if not free:
                said.append((gr.Warning, WRITING))
                return
            try:
                say(calibration.MEASURING, None)
                if (sentence := look_again(engine.pair, say)) is not None:
                    said.append((gr.Info, sentence))
                engine.pair.costs = calibration.measure_again(engine.pair, say)
            except Exception as error:  # whatever it is, the pair goes on with what it had
                log.exception("Measuring failed")
                sentence = f"The passes could not be measured ({type(error).__name__}: {error})."
                said.append((gr.Warning, sentence))
        self.desk.loader.renew()  # also after a failure: the products may have been looked at before it

    def give_up(self) -> None:
        if not self.may_choose:
            return
        try:
            self.desk.loader.unload()
        except LoadingRefused as error:
            gr.Warning(str(error))


def _named(values: tuple[str, ...], names: dict[str, str]) -> list[tuple[str, str]]:
    return [(names.get(value, value), value) for value in values]


def _how(values: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(choosing.FORMS, values, strict=True))


def can_measure(state: LoadingState) -> bool:
    """Whether there is a pair with a draft, and nothing being loaded beside it."""
    return state.engine is not None and not state.loading and state.engine.pair.info.drafter != "plain"
