"""Histories that programs hand over, in any shape that Gradio has had, as plain messages."""

from __future__ import annotations

from collections.abc import Mapping

from core.text.detokenise import PromptError, clean_text
from core.text.template import ROLES


def flatten_history(history: object) -> list[dict[str, str]]:
    """Messages with plain text, {"role", "content"} each, of a history in any shape that Gradio has had.

    Messages with a text or a list of parts ({"type": "text", "text": ...} or texts, a line break between
    them) as content, other keys such as ``metadata`` and ``options`` ignored; and pairs [question, answer]
    of old. Turns without text (None, blank) are left out; None is an empty history. Raises PromptError for
    anything else: other roles, files, other shapes.
    """
    if history is None:
        return []
    if not isinstance(history, (list, tuple)):
        raise PromptError("The history must be a list of messages, each with a role and a content.")
    messages = []
    for number, item in enumerate(history, 1):
        for role, content in _said(item, number):
            if role not in ROLES:
                raise PromptError(
                    f"Message {number} of the history has the role {role!r}; please use one of"
                    f" {', '.join(ROLES)}."
                )
            text = clean_text(_text_of(content, number))
            if text.strip():
                messages.append({"role": role, "content": text})
    return messages


def _said(item: object, number: int) -> list[tuple[object, object]]:
    """Role and content of each turn in one entry of a history."""
    if isinstance(item, Mapping):
        return [(item.get("role"), item.get("content"))]
    if isinstance(item, (list, tuple)) and len(item) == 2:
        return [("user", item[0]), ("assistant", item[1])]
    raise PromptError(
        f"Message {number} of the history needs a role and a content, or must be a pair of a question and an"
        " answer."
    )


def _text_of(content: object, number: int) -> str:
    parts = content if isinstance(content, (list, tuple)) else [content]
    texts = [part.get("text") if _is_text_part(part) else part for part in parts]
    if not all(text is None or isinstance(text, str) for text in texts):
        raise PromptError(f"Message {number} of the history holds more than text; please send text alone.")
    return "\n".join(text for text in texts if text)


def _is_text_part(part: object) -> bool:
    """One that says so, or that holds a text and nothing else: Gradio's files have no type."""
    if not isinstance(part, Mapping):
        return False
    if "type" in part:
        return part["type"] == "text"
    return "text" in part and not any(value for name, value in part.items() if name != "text")
