"""What runs and what is being loaded, in a line each: the masthead's pair and the loading strip.

Pure functions from the records to HTML, in which every name is inert text. Knows no component.
"""

from __future__ import annotations

from pathlib import Path

from app.serving.loading import LoadingState
from app.widgets.display import as_html
from core.records import PairInfo

LOGO = (Path(__file__).resolve().parents[2] / "assets" / "logo.svg").read_text("utf-8")


def precision(quantization: str, dtype: str) -> str:
    """How weights and activations run: "nf4, bfloat16", or the type alone where nothing is quantised."""
    return dtype if quantization == "none" else f"{quantization}, {dtype}"


def masthead(info: PairInfo | None) -> str:
    """The wordmark and, once it is loaded, the pair: target, draft, precision of the target, device."""
    chip = ""
    if info is not None:
        parts = [
            info.target,
            info.draft or "no draft",
            precision(info.quantization, info.dtype),
            info.device,
        ]
        chip = "<p class='pair' title='target · draft · precision of the target · device'>"
        chip += " <i>·</i> ".join(f"<span>{as_html(part)}</span>" for part in parts) + "</p>"
        if info.exactness_note:
            chip += f"<p class='exactness'>{as_html(info.exactness_note)}</p>"
    return f"<header class='masthead'><h1>{LOGO}<span>Redline</span></h1>{chip}</header>"


def loading_strip(state: LoadingState) -> str:
    """How far loading is, in words and as a bar; after a failure, what to do; "" where all is well."""
    if state.engine is not None and not (state.loading or state.failed):
        return ""
    goes_on = ""
    if state.engine is not None:
        meanwhile = " meanwhile" if state.loading else ""
        name = as_html(state.engine.pair.info.target)
        goes_on = f"<p class='goes-on'>The chat goes on with {name}{meanwhile}.</p>"
    sentence = f"<p>{as_html(state.sentence)}</p>"
    if not state.loading:
        kind = "failed" if state.failed else "idle"
        return f"<div class='loading {kind}' role='alert'>{sentence}{goes_on}</div>"
    return progress_strip(state.sentence, state.fraction, goes_on)


def progress_strip(sentence: str, fraction: float | None, below: str = "") -> str:
    """What is being done, and a bar, which only moves where ``fraction`` is None; ``below`` is HTML."""
    value = "" if fraction is None else f" value='{min(max(fraction, 0), 1):.3f}'"
    bar = f"<progress max='1'{value}></progress>"
    return f"<div class='loading busy' role='status'><p>{as_html(sentence)}</p>{bar}{below}</div>"
