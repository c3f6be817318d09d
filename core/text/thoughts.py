"""A reply's thoughts and its answer, told apart by the tags that models write around thoughts."""

from __future__ import annotations

import re

THINK, END_THINK = "<think>", "</think>"


def split_thoughts(text: str, opening: str = "") -> tuple[str | None, str]:
    """A reply's leading thoughts and its answer: ("a plan", "Answer") of "<think>a plan</think>Answer".

    There are thoughts only if ``text`` begins with "<think>" (after white space), or if the prompt had opened
    them (``Prompt.opening``). They end at the first "</think>"; later ones, as in quoted code, belong to the
    answer. Without an end, as while they are written or after Stop, all is thoughts and the answer is "".
    Without thoughts: (None, text). Nothing but the tags is taken away: both parts keep their white space, so
    thoughts may be blank.
    """
    begin = re.match(rf"(\s*){THINK}", text)
    if begin is None and not opening:
        return None, text
    space, start = (begin[1], begin.end()) if begin else ("", 0)
    thoughts, _, answer = text[start:].partition(END_THINK)
    return space + thoughts, answer


def as_message(text: str, opening: str = "") -> dict[str, str]:
    """A reply as a message of the conversation that goes on: whole, with what the prompt had opened.

    The template then treats earlier thoughts by its own rule; most drop them. A reply without text stays
    empty, and is left out of the next prompt.
    """
    return {"role": "assistant", "content": opening + text if text.strip() else ""}
