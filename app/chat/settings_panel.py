"""The settings of the next reply, in the side panel: each with one line that says what it does.

``SettingsPanel.inputs`` are the components, in the order in which ``read_settings`` takes their
values. What is allowed is decided by ``core.settings``, once for page and terminal. What a model itself
suggests is shown, and fills the fields at a press: what the panel shows is what is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import gradio as gr

from app.serving import zero_gpu
from app.serving.loading import Loader, LoadingState
from app.widgets.display import as_html
from app.widgets.events import AT_ONCE
from core.drafters.names import TREE_DRAFTERS, title
from core.engine.auto_k import MOST, usual_k
from core.records import DOMAINS, Settings
from core.settings import (
    LOSSY,
    MAX_DRAFT_TOKENS,
    MAX_NEW_TOKENS,
    MAX_TREE_WIDTH,
    SUGGESTIBLE,
    parse_settings,
)

DEFAULTS = Settings()
AUTO_INFO = (
    "Before each round, at most K, from measured costs and this reply's acceptance. Usual on a card; "
    "what you choose stays."
)
NO_DRAFT = "Not with this pair: the target writes alone."
NOT_LENT = "Not on ZeroGPU, where the GPU is lent to replies alone and passes are not timed."
NOT_MEASURED = "What this pair's passes cost is not known: measure it under Models."
K_LABEL, K_INFO = "Draft tokens (K)", "How many tokens the draft proposes in a round."
MOST_LABEL, MOST_INFO = "Most draft tokens (K)", "The most that the draft proposes in a round."
OWN = "The pair's own"
DRAFTER_INFO = "How drafts are made. One that was not used yet takes a moment to make."
LOSSY_INFO = (
    "They keep drafts that the exact rule would not, so the text is no longer the target's own. "
    "How far it drifts is measured as it is written."
)
LOSSY_NAMES = {
    "greedy": "Greedy match: only the target's likeliest token",
    "threshold": "Threshold: p(x) above a bar",
    "draft-ratio": "Draft ratio: q(x) at least a share of p(x)",
    "target-ratio": "Target ratio: p(x) at least a share of q(x)",
    "typical": "Typical acceptance (Medusa)",
}
DOMAIN_NAMES = {"auto": "Detect", "maths": "Maths", "structured": "Structured data"}

# What a model may suggest, as a sentence names it.
SUGGESTED = dict(
    zip(SUGGESTIBLE, ("temperature", "top-k", "top-p", "min-p", "repetition penalty"), strict=True)
)


@dataclass(frozen=True)
class Choices:
    """What the panel says: checked settings, the domain choice, whether to record, and the drafter's name,
    None for the pair's own."""

    settings: Settings
    domain: str
    record: bool
    drafter: str | None

    @property
    def of_reply(self) -> tuple[Settings, str, bool, str | None]:
        """As ``app.chat.desk.Desk.ask`` takes them."""
        return self.settings, self.domain, self.record, self.drafter


class SettingsPanel:
    """Lays the panel out in the current block. ``system`` belongs to the conversation, not to a reply."""

    def __init__(self, loader: Loader):
        self._loader = loader
        gr.HTML("<h2 class='panel-title'>Settings</h2>", apply_default_css=False)
        self.inputs: list[gr.components.Component] = [*self._drafting(), *self._sampling(), *self._length()]
        self.domain = gr.Dropdown(
            [(DOMAIN_NAMES.get(name, name.capitalize()), name) for name in ("auto", *DOMAINS)],
            value="auto",
            label="Kind of text",
            info="What the record files tokens under; detected by span, or as you say.",
            elem_id="domain",
        )
        self.system = gr.Textbox(
            "",
            label="System prompt",
            info="Told to the model before the conversation.",
            lines=2,
            max_lines=8,
            elem_id="system",
        )
        self.record = gr.Checkbox(
            True, label="Record", info="Keep replies, rounds and tokens in the database.", elem_id="record"
        )
        self.inputs += [self.domain, self.record, *self._not_exact()]
        # Not input: where a pair cannot choose K, the box is emptied, and K is what it was.
        self.auto.change(switch_auto, [self.auto, self.k, self._fixed], [self.k, self._fixed], **AT_ONCE)
        # Input: only a person's own choice counts as one.
        gr.on([self.auto.input, self.k.input], lambda: True, None, self.chosen, **AT_ONCE)
        self.drafter.change(tree_update, self.drafter, self.tree_width, **AT_ONCE)
        self.lossy.change(threshold_update, self.lossy, self.threshold, **AT_ONCE)
        self.use_suggested.click(self._suggested, None, [*self._suggestible.values()], **AT_ONCE)

    def _drafting(self) -> list[gr.components.Component]:
        speculate = gr.Checkbox(
            True,
            label="Speculative decoding",
            info="Off: the target writes alone, one token a pass.",
            elem_id="speculate",
        )
        self.drafter = gr.Dropdown(
            [(OWN, "")], value="", label="Drafter", info=DRAFTER_INFO, elem_id="drafter", filterable=False
        )
        self.tree_width = gr.Slider(
            1,
            MAX_TREE_WIDTH,
            DEFAULTS.tree_width,
            step=1,
            label="Tree width",
            info="Candidates at each position; 1 is a chain.",
            visible=False,
            elem_id="tree-width",
        )
        self.k = gr.Slider(
            0,
            MAX_DRAFT_TOKENS,
            DEFAULTS.num_draft_tokens,
            step=1,
            label=K_LABEL,
            info=K_INFO,
            elem_id="num-draft-tokens",
        )
        self.chosen = gr.State(False)  # whether somebody has chosen K here, or that it is automatic
        self._fixed = gr.State(DEFAULTS.num_draft_tokens)  # K as it was before it was chosen automatically
        self.auto = gr.Checkbox(
            DEFAULTS.auto_draft_tokens,
            label="Choose K automatically",
            info=AUTO_INFO,
            interactive=False,
            elem_id="auto-draft-tokens",
        )
        verifier = gr.Radio(
            [
                ("Token by token: each draft alone", "token"),
                ("Block: a round's drafts together", "block"),
            ],
            value=DEFAULTS.verifier,
            label="Verification",
            info="Both are exact; block keeps no fewer.",
            elem_id="verifier",
        )
        return [speculate, self.drafter, self.tree_width, self.k, self.auto, verifier]

    def _not_exact(self) -> list[gr.components.Component]:
        """The lossy rules, apart from what is exact."""
        with gr.Accordion("For teaching: rules that are not exact", open=False, elem_id="not-exact"):
            gr.HTML(f"<p>{LOSSY_INFO}</p>", apply_default_css=False)
            self.lossy = gr.Dropdown(
                [("None: exact, as set above", ""), *((LOSSY_NAMES[rule], rule) for rule in LOSSY)],
                value="",
                label="Acceptance rule",
                info="Judges without a draw; in place of a refused draft the token is drawn from p.",
                elem_id="lossy-rule",
                filterable=False,
            )
            self.threshold = gr.Textbox(
                "",
                label="Threshold",
                info="The number that the rule takes.",
                visible=False,
                elem_id="acceptance-threshold",
            )
        return [self.lossy, self.threshold]

    def _sampling(self) -> list[gr.components.Component]:
        fields = {
            "temperature": gr.Slider(
                0,
                2,
                DEFAULTS.temperature,
                step=0.05,
                label="Temperature",
                info="0 always takes the most likely token.",
                elem_id="temperature",
            )
        }
        with gr.Row():
            fields["top_k"] = _short("Top-k", "k likeliest; 0 is off.", DEFAULTS.top_k)
            fields["top_p"] = _short("Top-p", "Up to this sum; 1 is off.", DEFAULTS.top_p)
        with gr.Row():
            fields["min_p"] = _short("Min-p", "Of the likeliest; 0 is off.", DEFAULTS.min_p)
            fields["repetition_penalty"] = _short(
                "Repetition penalty", "Above 1: fewer; 1 is off.", DEFAULTS.repetition_penalty
            )
        with gr.Row(visible=False, elem_id="suggestion") as self.suggestion:
            self.suggested = gr.HTML("", apply_default_css=False)
            self.use_suggested = gr.Button(
                "Use the model's own", size="sm", elem_id="use-suggested", min_width=60
            )
        self._suggestible = fields
        return list(fields.values())

    def _length(self) -> list[gr.components.Component]:
        with gr.Row():
            most = _short(
                "Most tokens", f"In a reply, to {MAX_NEW_TOKENS}.", DEFAULTS.max_new_tokens, "max-new-tokens"
            )
            seed = _short("Seed", "Blank: a new one.", "", placeholder="random")
        stop = gr.Textbox(
            "",
            label="Stop strings",
            info="One a line; the reply ends before it.",
            lines=2,
            elem_id="stop-strings",
        )
        return [most, seed, stop]

    @property
    def watching(self) -> list[gr.components.Component]:
        """What ``show_loading`` changes."""
        return [self.suggestion, self.suggested, self.auto, self.drafter, self.tree_width]

    def show_loading(self, state: LoadingState, chosen: bool) -> dict:
        """The panel's part of a new state of the loader; ``chosen``: somebody has chosen K here."""
        said = suggestion(state.engine.pair.suggested) if state.engine is not None else ""
        return {
            self.suggestion: gr.update(visible=bool(said)),
            self.suggested: said,
            self.auto: auto_update(state, chosen),
            self.drafter: drafter_update(state),
            self.tree_width: gr.update(visible=False, value=DEFAULTS.tree_width),
        }

    def _suggested(self) -> dict:
        """The fields as the loaded model suggests them; what it does not name is off."""
        engine = self._loader.state.engine
        given = engine.pair.suggested if engine is not None else {}
        off = {"top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
        values = {**off, **{name: value for name, value in given.items() if name in SUGGESTIBLE}}
        return {
            self._suggestible[name]: value if name == "temperature" else f"{value:g}"
            for name, value in values.items()
        }


def _short(
    label: str, info: str, value: object, elem_id: str | None = None, placeholder: str | None = None
) -> gr.Textbox:
    """A field of half the panel's width."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    elem_id = elem_id or label.lower().replace(" ", "-")
    return gr.Textbox(text, label=label, info=info, min_width=110, elem_id=elem_id, placeholder=placeholder)


def auto_update(state: LoadingState, chosen: bool) -> dict:
    """The box for automatic K: where the pair that answers has no costs it is empty, and says why. A person's
    own choice stays; where there was none, it is ticked on a card."""
    if state.engine is None:
        return gr.update(interactive=False)
    pair = state.engine.pair
    if pair.costs is not None:
        own = {} if chosen else {"value": usual_k(pair.info.device, pair.costs)[1]}
        return gr.update(interactive=True, info=AUTO_INFO, **own)
    why = NO_DRAFT if pair.info.drafter == "plain" else NOT_LENT if zero_gpu.active() else NOT_MEASURED
    return gr.update(interactive=False, value=False, info=why)


def drafter_update(state: LoadingState) -> dict:
    """The drafters of the pair that answers, its own chosen."""
    if state.engine is None:
        return gr.update(choices=[(OWN, "")], value="")
    own, *_ = names = [state.engine.pair.info.drafter, *state.engine.pair.drafters]
    return gr.update(choices=[(_name(name, own), name) for name in dict.fromkeys(names)], value=own)


def _name(drafter: str, own: str) -> str:
    """A drafter in the list."""
    return title(drafter) + (" (this pair's own)" if drafter == own else "")


def tree_update(drafter: str) -> dict:
    """The width of trees, where the drafter makes any."""
    if drafter in TREE_DRAFTERS:
        return gr.update(visible=True)
    return gr.update(visible=False, value=DEFAULTS.tree_width)


def threshold_update(rule: str) -> dict:
    """The number that a lossy rule takes, begun at its usual one."""
    if LOSSY.get(rule) is None:
        return gr.update(visible=False, value="")
    usual, low, high = LOSSY[rule]
    return gr.update(visible=True, value=f"{usual:g}", info=f"From {low:g} to {high:g}; usually {usual:g}.")


def switch_auto(auto: bool, k: int, fixed: int) -> tuple[dict, int]:
    """The slider and the K to come back to: the slider sets the most that may be chosen while ``auto``."""
    if auto:
        return gr.update(value=MOST, maximum=MOST, label=MOST_LABEL, info=MOST_INFO), k
    return gr.update(value=fixed, maximum=MAX_DRAFT_TOKENS, label=K_LABEL, info=K_INFO), fixed


def suggestion(suggested: Mapping[str, float]) -> str:
    """What a model suggests, in one line; "" where it suggests nothing."""
    said = [f"{SUGGESTED[name]} {value:g}" for name, value in suggested.items() if name in SUGGESTED]
    return f"<p>The model suggests {as_html(', '.join(said))}.</p>" if said else ""


def read_settings(
    speculate: bool,
    drafter: str,
    tree_width: object,
    num_draft_tokens: object,
    auto_draft_tokens: bool,
    verifier: str,
    temperature: object,
    top_k: object,
    top_p: object,
    min_p: object,
    repetition_penalty: object,
    max_new_tokens: object,
    seed: object,
    stop: str,
    domain: str,
    record: bool,
    lossy: str,
    acceptance_threshold: object,
) -> Choices:
    """Checked choices from the panel's values. Raises core.settings.SettingsError with one sentence."""
    settings = parse_settings(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        num_draft_tokens=num_draft_tokens if speculate else 0,
        auto_draft_tokens=auto_draft_tokens,
        max_new_tokens=max_new_tokens,
        stop=stop,
        seed=seed,
        verifier=lossy or verifier,
        acceptance_threshold=acceptance_threshold,
        tree_width=tree_width,
    )
    return Choices(settings, domain, record, drafter or None)
