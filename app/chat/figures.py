"""The live figures of the current reply, each with what it means; "–" where a figure is undefined.

The panel is drawn once and its script only puts new texts into the cells, so that a tooltip or a
selection survives the updates of a reply that streams. Knows ``app.chat.answer.Answer`` and
``core.figures.metrics``; no figure is computed here.
"""

from __future__ import annotations

import json

import gradio as gr

from app.chat.answer import Answer
from app.chat.conversation import Turn
from app.chat.why import UNDEFINED
from app.widgets.display import as_html
from core.drafters.names import TREE_DRAFTERS

# The first ones stand two in a row; those in WIDE have a row of their own.
FIGURES = (
    (
        "ttft",
        "First token",
        "Time to first token: from the start of reading the prompt to the end of the first round.",
    ),
    ("speed", "Tokens/s", "Emitted tokens per second of the rounds, the prompt's time apart."),
    ("per_pass", "Per pass", "tokens_per_pass: emitted tokens out of target passes."),
    ("rate", "Accepted", "draft_acceptance_rate: accepted tokens out of all drafted ones."),
    (
        "alpha",
        "α",
        "Mean overlap Σ min(p, q) over tested positions: the acceptance to expect, with less noise.",
    ),
    (
        "drift",
        "Drift",
        "Of a rule that is not exact: mean total variation between what it writes at a tested position and "
        "what the target would. 0 is exact, 1 has nothing in common.",
    ),
    ("rounds", "Rounds", "One draft phase, one target pass, one commit each."),
    ("emitted", "Tokens", "Emitted tokens: accepted, resampled, bonus and plain."),
    (
        "finish",
        "Ended",
        "Why the reply ended: at the end-of-text token, a stop string, a limit, Stop or an error.",
    ),
    (
        "drafting",
        "Drafting",
        "K, the tokens that the draft proposes in a round: fixed, or chosen before each; and how they are "
        "judged.",
    ),
    (
        "speedup",
        "Speed-up",
        "Over plain decoding. Predicted from costs measured at load and the acceptance of this reply; "
        "measured is its tokens/s against a plain round as timed at load. Answer again plainly times this "
        "very reply.",
    ),
    (
        "prefill",
        "Prefill",
        "The time both models took to read what was new of the prompt, and its share of the reply's time.",
    ),
    (
        "reused",
        "Already read",
        "Tokens at the prompt's beginning that were read for an earlier prompt and kept.",
    ),
    ("context", "Context used", "Tokens of the prompt and the reply, out of those the target can hold."),
    (
        "seed",
        "Seed",
        "The seed of this reply: with it, the same settings and the same conversation give it again.",
    ),
)
METER = "<progress class='context-meter' max='1' value='0' aria-hidden='true'></progress>"
WIDE = ("finish", "drafting", "speedup", "prefill", "reused", "context", "seed")

ENDINGS = {
    "eos_token": "end of text",
    "stop_string": "stop string",
    "length": "length limit",
    "cancelled": "stopped",
    "error": "error",
    "interrupted": "interrupted",
}

PREDICTED = (
    "Predicted from costs measured at load and the acceptance of this reply, as if acceptances were "
    "independent: on real text mostly a little too high."
)

SCRIPT = """
const cells = {};
for (const cell of element.querySelectorAll('[data-figure]')) cells[cell.dataset.figure] = cell;
const list = element.querySelector('.figures'), note = element.querySelector('.figures-note');
const meter = element.querySelector('.context-meter');
function show() {
  const texts = JSON.parse(props.value || '{}');
  for (const name in cells) {
    const text = texts[name] ?? '\\u2013';
    if (cells[name].textContent !== text) cells[name].textContent = text;
  }
  note.textContent = texts.note ?? '';
  list.classList.toggle('inexact', !!texts.inexact);
  meter.value = texts.used ?? 0;
}
watch('value', show);
show();
"""


def FiguresPanel(**kw: object) -> gr.HTML:
    """The component; its value is what ``figures_value`` returns."""
    cells = "".join(
        f"<div class='figure{' wide' if name in WIDE else ''}' title='{as_html(meaning)}'><dt>{label}</dt>"
        f"<dd data-figure='{name}'>{UNDEFINED}</dd>{METER if name == 'context' else ''}</div>"
        for name, label, meaning in FIGURES
    )
    meanings = "".join(f"<li><b>{label}</b> {as_html(meaning)}</li>" for _, label, meaning in FIGURES)
    template = (
        "<h2 class='margin-title'>This reply</h2>"
        f"<dl class='figures' aria-label='Figures of the current reply'>{cells}</dl>"
        "<p class='figures-note' role='status'></p>"
        f"<details class='meanings'><summary>What these mean</summary><ul>{meanings}</ul></details>"
    )
    return gr.HTML("{}", html_template=template, js_on_load=SCRIPT, apply_default_css=False, **kw)


def figures_value(answer: Answer | None) -> str:
    """The panel's value: a JSON object of texts; what is undefined is left out and shown as "–".

    Beside them ``used``, the share of the context (0 to 1), ``inexact``, whether every figure is marked
    as not exact, and ``note``, a sentence where one is due.
    """
    if answer is None:
        return "{}"
    figures = answer.figures()
    context, context_length = answer.context_tokens, answer.info.context_length
    texts = {
        "ttft": seconds(answer.ttft_seconds),
        "speed": decimal(figures.tokens_per_second, 1),
        "rate": percent(figures.draft_acceptance_rate),
        "alpha": decimal(figures.alpha, 3),
        "drift": "0, exact" if answer.exact else decimal(figures.drift, 3),
        "per_pass": decimal(figures.tokens_per_pass, 2),
        "rounds": str(figures.rounds),
        "emitted": str(figures.emitted),
        "finish": ENDINGS.get(answer.finish_reason or "", answer.finish_reason),
        "drafting": _drafting(answer),
        "speedup": _speedup(answer),
        "prefill": _prefill(answer),
        "reused": _reused(answer),
        "context": None if context is None else f"{context:,} of {context_length:,} tokens",
        "seed": str(answer.settings.seed),
        "used": None if context is None else context / context_length,
        "inexact": None if answer.exact else True,
        "note": _note(answer),
    }
    return json.dumps({name: text for name, text in texts.items() if text is not None})


def _drafting(answer: Answer) -> str:
    if not answer.drafted:
        return "none, K = 0"
    k = f"K = {answer.settings.num_draft_tokens}"
    if answer.chooses_k:
        mean = decimal(answer.figures().mean_draft_tokens, 1)
        k = "K auto" if mean is None else f"K auto, mean {mean}"
    settings, who = answer.settings, answer.info.drafter
    rule = answer.not_exact or f"by {settings.verifier}"
    width = f", tree of {settings.tree_width}" if settings.tree_width > 1 and who in TREE_DRAFTERS else ""
    return f"{who}, {k}{width}, {rule}"


def _speedup(answer: Answer) -> str | None:
    """Predicted and measured, one as undefined where only the other is known."""
    predicted, measured = (
        None if value is None else f"{value:.2f}×"
        for value in (answer.predicted_speedup if answer.drafted else None, answer.measured_speedup)
    )
    if predicted is None and measured is None:
        return None
    return f"predicted {predicted or UNDEFINED}, measured {measured or UNDEFINED}"


def _prefill(answer: Answer) -> str | None:
    took, share = seconds(answer.prefill_seconds), answer.prefill_share
    if took is None or share is None:
        return took
    return f"{took}, {'under 1%' if share < 0.005 else f'{share:.0%}'} of the reply"


def _reused(answer: Answer) -> str | None:
    reused, prompt = answer.reused_tokens, answer.prompt_tokens
    return None if reused is None or prompt is None else f"{reused:,} of {prompt:,} tokens"


def _note(answer: Answer) -> str | None:
    """What the figures mean for drafting, where they say it plainly."""
    share = answer.prefill_share
    if not answer.done.is_set() or share is None or share <= 0.5 or not answer.drafted:
        return None
    return (
        f"Reading the prompt took {share:.0%} of this reply's time. Drafting makes writing faster, not "
        "reading, so it cannot help much here."
    )


def comparison(turn: Turn | None) -> str:
    """The measured speed-up of a reply over its plain repetition, as HTML; empty before there are both."""
    measured = turn.speedup if turn else None
    if measured is None:
        return ""
    speculative, plain, ratio = measured
    predicted = _predicted(turn.kept.predicted_speedup)
    inexact = f"<span class='inexact'>{as_html(turn.kept.not_exact)}</span>" if turn.kept.not_exact else ""
    verdict = "the two cannot be compared"
    if ratio is not None:
        verdict = f"<b>{ratio:.2f}×</b> the plain speed" + (": drafting pays off here" if ratio > 1 else "")
        verdict += ": drafting costs more than it saves here" if ratio < 1 else ""
    return (
        "<p class='comparison' role='status'><span>Measured</span>"
        f"<span>speculative <b>{decimal(speculative.tokens_per_second, 1) or UNDEFINED}</b> tokens/s</span>"
        f"<span>plain <b>{decimal(plain.tokens_per_second, 1) or UNDEFINED}</b> tokens/s</span>"
        f"<span>{verdict}</span>{predicted}{inexact}</p>"
    )


def _predicted(speedup: float | None) -> str:
    return "" if speedup is None else f"<span title='{PREDICTED}'>predicted <b>{speedup:.2f}×</b></span>"


def seconds(value: float | None) -> str | None:
    """Seconds for people: milliseconds below one second."""
    if value is None:
        return None
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"


def decimal(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"
