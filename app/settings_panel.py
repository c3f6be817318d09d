"""The settings of the next reply, in the side panel: each with one line that says what it does.

``SettingsPanel.inputs`` are the components, in the order in which ``read_settings`` takes their
values. What is allowed is decided by ``core.settings``, once for page and terminal.
"""

from __future__ import annotations

from dataclasses import dataclass

import gradio as gr

from core.records import DOMAINS, Settings
from core.settings import MAX_DRAFT_TOKENS, MAX_NEW_TOKENS, parse_settings

DEFAULTS = Settings()
DOMAIN_NAMES = {"auto": "Detect", "maths": "Maths", "structured": "Structured data"}


@dataclass(frozen=True)
class Choices:
    """What the panel says: checked settings, the domain choice, and whether to record."""

    settings: Settings
    domain: str
    record: bool


@dataclass(frozen=True)
class SettingsPanel:
    """The panel's components. ``system`` is separate: it belongs to the conversation, not to a reply."""

    system: gr.Textbox
    record: gr.Checkbox
    inputs: list[gr.components.Component]


def build() -> SettingsPanel:
    """Lay the panel out in the current Gradio block."""
    gr.HTML("<h2 class='panel-title'>Settings</h2>", apply_default_css=False)
    speculate = gr.Checkbox(
        True,
        label="Speculative decoding",
        info="Off: the target writes alone, one token a pass.",
        elem_id="speculate",
    )
    num_draft_tokens = gr.Slider(
        0,
        MAX_DRAFT_TOKENS,
        DEFAULTS.num_draft_tokens,
        step=1,
        label="Draft tokens (K)",
        info="How many tokens the draft proposes in a round.",
        elem_id="num-draft-tokens",
    )
    temperature = gr.Slider(
        0,
        2,
        DEFAULTS.temperature,
        step=0.05,
        label="Temperature",
        info="0 always takes the most likely token.",
    )
    with gr.Row():
        top_k = gr.Textbox("0", label="Top-k", info="k likeliest; 0 is off.", min_width=110, elem_id="top-k")
        top_p = gr.Textbox(
            "1", label="Top-p", info="Up to this sum; 1 is off.", min_width=110, elem_id="top-p"
        )
    with gr.Row():
        max_new_tokens = gr.Textbox(
            str(DEFAULTS.max_new_tokens),
            label="Most tokens",
            info=f"In a reply, to {MAX_NEW_TOKENS}.",
            min_width=110,
            elem_id="max-new-tokens",
        )
        seed = gr.Textbox(
            "", label="Seed", info="Blank: a new one.", min_width=110, placeholder="random", elem_id="seed"
        )
    stop = gr.Textbox(
        "",
        label="Stop strings",
        info="One a line; the reply ends before it.",
        lines=2,
        elem_id="stop-strings",
    )
    domain = gr.Dropdown(
        [(DOMAIN_NAMES.get(name, name.capitalize()), name) for name in ("auto", *DOMAINS)],
        value="auto",
        label="Kind of text",
        info="What the record files tokens under; detected by span, or as you say.",
        elem_id="domain",
    )
    system = gr.Textbox(
        "",
        label="System prompt",
        info="Told to the model before the conversation.",
        lines=2,
        max_lines=8,
        elem_id="system",
    )
    record = gr.Checkbox(
        True, label="Record", info="Keep replies, rounds and tokens in the database.", elem_id="record"
    )
    inputs = [
        speculate,
        num_draft_tokens,
        temperature,
        top_k,
        top_p,
        max_new_tokens,
        seed,
        stop,
        domain,
        record,
    ]
    return SettingsPanel(system, record, inputs)


def read_settings(
    speculate: bool,
    num_draft_tokens: object,
    temperature: object,
    top_k: object,
    top_p: object,
    max_new_tokens: object,
    seed: object,
    stop: str,
    domain: str,
    record: bool,
) -> Choices:
    """Checked choices from the panel's values. Raises core.settings.SettingsError with one sentence."""
    settings = parse_settings(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        num_draft_tokens=num_draft_tokens if speculate else 0,
        max_new_tokens=max_new_tokens,
        stop=stop,
        seed=seed,
    )
    return Choices(settings, domain, record)
