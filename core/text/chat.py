"""As much of a conversation as fits: the prompt that a model reads.

``core.text.template`` writes it; here stands the last of its rules:

6. **What does not fit** is dropped, oldest turns first, question and answer together, up to the next of
   ``BLOCKS`` borders, so that several further turns fit behind the same beginning and only what is new of
   them is read. The system prompt and the newest question stay.

Knows a Hugging Face tokenizer and nothing of models, sampling or the page.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace

from core.text.detokenise import PromptError
from core.text.template import Prompt, TemplateWriter

BLOCKS = 4  # a conversation that is full is dropped from in parts of this share of its room


def encode_chat(tokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Ids of a chat ({"role", "content"} each), reply header included. Raises PromptError."""
    return TemplateWriter(tokenizer).prompt(messages).ids


def prompt_limit(context_length: int, max_new_tokens: int) -> int:
    """How many ids a prompt may take: the reply keeps the room it may need, at most half the context."""
    return context_length - min(max_new_tokens, context_length // 2)


def fit_chat(tokenizer, messages: Sequence[Mapping[str, str]], limit: int) -> Prompt:
    """As much of a chat ({"role", "content"} each) as fits into ``limit`` ids.

    Raises PromptError for an empty question, a chat that the template refuses, and when the system prompt
    and the newest question alone are too long.
    """
    writer, messages = TemplateWriter(tokenizer), list(messages)
    whole = writer.prompt(messages)
    if len(whole.ids) <= limit:
        return whole
    first = next(i for i, message in enumerate(messages) if message["role"] != "system")
    questions = [i for i, m in enumerate(messages) if m["role"] == "user" and m["content"].strip()]
    starts = [i for i in questions if i > first]
    tried: dict[int, Prompt] = {}

    def fits(start: int) -> bool:
        if start not in tried:
            tried[start] = writer.prompt(messages[:first] + messages[start:])
        return len(tried[start].ids) <= limit

    # Writing a long chat takes time: few tries. Where turns are so long that no border lies well, any turn.
    for some in (_at_borders(writer.sizes(messages), first, starts, max(limit // BLOCKS, 1)), starts):
        at = bisect_left(some, True, key=fits)
        if at < len(some):
            return replace(tried[some[at]], dropped_messages=some[at] - first)
    shortest = tried[starts[-1]] if starts else whole
    raise PromptError(
        f"The message is too long: it takes {len(shortest.ids):,} tokens with its system prompt and the model"
        f" has room for {limit:,}; please shorten it."
    )


def _at_borders(sizes: Sequence[int], first: int, starts: Sequence[int], block: int) -> list[int]:
    """Of ``starts`` the first behind each multiple of ``block`` ids, counted from message ``first``.

    A function of what was said before each of them alone, so that the next turn finds the same ones.
    """
    found, before, border, at = [], 0, block, first
    for start in starts:
        before += sum(sizes[at:start])
        at = start
        if before >= border:
            found.append(start)
            border = (before // block + 1) * block
    return found
