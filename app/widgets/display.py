"""How plain text is handed to Gradio so that it is shown exactly: in the chat, and inside HTML.

Gradio's chat renders Markdown in which HTML counts, so ``List<int>`` would lose its ``<int>``.
``show_reply`` keeps a reply's Markdown and makes everything else literal; ``show_question`` makes
all of a question literal, as typed. Both change only what is displayed: the true texts live in
``app.chat.conversation``. Pure functions; knows nothing of Gradio's components.
"""

from __future__ import annotations

import html
import re

FENCE = re.compile(r"^(?:[ \t]|>[ ]?|[-*+][ ]|\d{1,9}[.)][ ])*(?P<marks>`{3,}|~{3,})(?P<info>[^\n]*)$")
LIST_ITEM = re.compile(r"^ {0,3}(?:[-*+]|\d{1,9}[.)])(?: |\t|$)")
QUOTE_MARKS = re.compile(r"^[ \t]*(?:>[ \t]?)+")
BACKTICKS = re.compile(r"`+")

# $..$ is left alone: in chat text it is far more often a price than a formula.
LATEX_DELIMITERS = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\[", "right": "\\]", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
]


def as_html(text: str) -> str:
    """``text`` as inert HTML, also inside a Gradio template, where ``${`` and ``{{`` would count."""
    escaped = html.escape(text, quote=True)
    return escaped.replace("$", "&#36;").replace("{", "&#123;").replace("`", "&#96;")


def show_question(text: str) -> dict:
    """Chat content that shows ``text`` literally: no Markdown, every space and newline kept.

    All but letters, digits and single inner spaces becomes character references, which Markdown
    leaves alone and the browser turns back (the style sheet sets questions with ``pre-wrap``).
    """
    pieces = re.split(
        r"((?<=[^\W_]) (?=[^\W_])|[^\W_]+|, |(?<=[^\W\d_])[.?] (?=[^\W\d_])|(?<=[^\W\d_])[.?]$)", text
    )
    literal = "".join(
        piece if index % 2 else "".join(f"&#{ord(character)};" for character in piece)
        for index, piece in enumerate(pieces)
    )
    return _content(literal)


def show_reply(text: str) -> dict:
    """Chat content that renders ``text`` as Markdown and shows all HTML in it as the text it is."""
    return _content(markdown(text))


def markdown(text: str) -> str:
    """Markdown that displays ``text``: what looks like HTML or an image is literal, fences are closed.

    Code is left as it stands, for Markdown shows it literally anyway. Images would be fetched from
    wherever the model says, and diagrams drawn by a script, so both stay text. A fence left open,
    as while streaming or after Stop, is closed for display only.
    """
    shown: list[str] = []
    prose: list[str] = []
    fence: str | None = None
    in_list = in_indented = False
    previous_blank = True

    def flush() -> None:
        shown.extend(_literal_prose("\n".join(prose)).split("\n") if prose else ())
        prose.clear()

    for line in text.split("\n"):
        mark = FENCE.match(line)
        if fence is not None:
            shown.append(line)
            if mark and mark["marks"].startswith(fence) and not mark["info"].strip():
                fence = None
            continue
        if mark and not (mark["marks"][0] == "`" and "`" in mark["info"]):
            flush()
            fence = mark["marks"]
            # Closing it further left would end a list item and open a new fence instead.
            closing = re.sub(r"[-*+\d.)]", " ", line[: mark.start("marks")]) + fence
            start = mark.start("info")
            shown.append(line[:start] + re.sub(r"(?i)^\s*mermaid\b", "text", line[start:]))
            in_indented, previous_blank = False, False
            continue
        blank = not line.strip()
        if not blank:
            indented = line.startswith(("    ", "\t"))
            if LIST_ITEM.match(line):
                in_list = True
            elif previous_blank and not line.startswith((" ", "\t")):
                in_list = False
            in_indented = indented and not in_list and (previous_blank or in_indented)
        if in_indented and not blank:
            flush()
            shown.append(line)
        else:
            prose.append(line)
        previous_blank = blank
    flush()
    if fence is not None:
        shown.append(closing)
    return "\n".join(shown)


def _literal_prose(text: str) -> str:
    """Escape HTML and images outside code spans; a span never reaches over a blank line."""
    blocks = re.split(r"(\n[ \t]*\n)", text)
    return "".join(block if index % 2 else _literal_block(block) for index, block in enumerate(blocks))


def _literal_block(block: str) -> str:
    shown, position = [], 0
    runs = list(BACKTICKS.finditer(block))
    index = 0
    while index < len(runs):
        opening = runs[index]
        before = block[: opening.start()]
        escaped = (len(before) - len(before.rstrip("\\"))) % 2
        same = (i for i in range(index + 1, len(runs)) if runs[i][0] == opening[0])
        closing = None if escaped else next(same, None)
        if closing is None:
            index += 1
            continue
        shown.append(_escape(block[position : opening.start()], position == 0))
        shown.append(block[opening.start() : runs[closing].end()])
        position = runs[closing].end()
        index = closing + 1
    shown.append(_escape(block[position:], position == 0))
    return "".join(shown)


def _escape(text: str, at_line_start: bool) -> str:
    lines = []
    for line in text.split("\n"):
        # A ">" at the start of a line is Markdown's quotation; anywhere else it is itself.
        quote = QUOTE_MARKS.match(line) if at_line_start else None
        start = quote.end() if quote else 0
        rest = line[start:].replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        lines.append(line[:start] + rest.replace("![", "&#33;&#91;"))
        at_line_start = True
    return "\n".join(lines)


def _content(text: str) -> dict:
    # As a dictionary: plain strings pass inspect.cleandoc, which strips the first line's indentation.
    return {"type": "text", "text": text}
