"""The redline view: a conversation at reading size, every token in the colour of its fate.

``RedlineView`` makes a ``gr.HTML`` whose value is an append-only string, one JSON array a line, made by
joining what ``encode_user``, ``encode_reply_start``, ``encode_round`` and ``encode_reply_end`` return. Its
own script (``assets/token_view.js``) draws it with ``textContent`` alone: the template is fixed, and nothing
a model or a person wrote is ever part of a template, of HTML or of an attribute. While a reply streams only
the new lines travel. What a card shows is fetched when it opens, from the ``details`` callable.

It knows no engine and no database. ``python -m tests.app.scripted`` shows a scripted stream in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import gradio as gr

from app.chat.card import is_tree
from core.records import Fate, Round

ASSETS = Path(__file__).resolve().parents[2] / "assets"

CODES = {
    Fate.ACCEPTED: "a",
    Fate.REJECTED: "r",
    Fate.DISCARDED: "d",
    Fate.RESAMPLED: "s",
    Fate.BONUS: "b",
    Fate.PLAIN: "p",
}
BRANCH = "o"  # of a tree: discarded, and beside the text rather than behind it; shown on demand

# Escaped although JSON need not: half characters, which UTF-8 cannot hold, and "<", so that no tag travels.
_ESCAPED = re.compile("[<\ud800-\udfff]")


def _line(*record: object) -> str:
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"


def encode_user(text: str) -> str:
    """A turn of the person's."""
    return _line("u", text)


def encode_reply_start(reply_key: str, temperature: float, note: str = "") -> str:
    """The start of a reply. ``reply_key`` comes back to ``details``; ``note`` is a caption above it."""
    return _line("s", reply_key, temperature, note)


def encode_round(round: Round) -> str:
    """One round with all its tokens, drafted and made: [code, text], then 1 if monospaced, then a label."""
    tokens, discarded = [], BRANCH if is_tree(round) else CODES[Fate.DISCARDED]
    for token in round.tokens:
        code = discarded if token.fate is Fate.DISCARDED else CODES[token.fate]
        record: list[object] = [code, token.text]
        if token.monospaced or token.label:
            record.append(int(token.monospaced))
        if token.label:
            record.append(token.label)
        tokens.append(record)
    return _line("r", round.index, round.num_draft_tokens, tokens)


def encode_reply_end(
    visible_chars: int | None = None,
    finish_reason: str | None = None,
    tail: str = "",
    error: str | None = None,
) -> str:
    """The end of a reply, with the fields of ``Reply`` of the same names.

    Text after ``visible_chars`` characters is shown faint, as no part of the reply; None: all is visible.
    """
    return _line("e", visible_chars, finish_reason, tail, error)


def RedlineView(value: str = "", *, details: Callable[[str, int], dict], **kw: object) -> gr.HTML:
    """The component. ``details(key, i)`` returns ``app.chat.card.token_details`` of token ``i`` of reply
    ``key``.

    ``i`` counts all tokens of the reply's rounds from 0 (``app.chat.card.locate`` finds it); where there is
    no such token (any more), ``details`` returns ``{}`` or raises LookupError, and the card says so. Further
    arguments are those of ``gr.HTML``. To change it from a handler, return the string or ``gr.update(...)``.
    """

    # Not a subclass, because Gradio writes a .pyi file beside every module that subclasses a component.
    def fetch_details(request: list) -> dict:
        # Anyone who can reach the server can call this: only a (text, whole number) pair goes through.
        if not (isinstance(request, list) and [type(part) for part in request] == [str, int]):
            return {}
        try:
            return details(*request)
        except LookupError:
            return {}

    style = json.dumps((ASSETS / "token_view.css").read_text("utf-8"))
    script = (ASSETS / "token_view.js").read_text("utf-8")
    return gr.HTML(
        value,
        html_template="<div class='rl'></div>",
        # The style rides in the script: a css_template would be compiled anew at every change of the value.
        js_on_load=f"const STYLE = {style};\n{script}",
        apply_default_css=False,
        server_functions=[fetch_details],
        **kw,
    )
