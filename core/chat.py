"""Everything between messages and prompt ids: turns, the chat template, thoughts, what fits.

The rules, in the order in which they apply:

1. **Turns.** Messages without text (blank, or whitespace alone) and answers before the first question are
   left out; neighbours of one role become one turn, a blank line between them. So turns always alternate,
   as many templates demand. The conversation must end with a question.
2. **Typed control tokens are text.** What a message says never becomes a control token: neither the
   tokenizer's special tokens nor other added tokens that the template writes. Thinking tags in answers are
   the exception, because the template's own rule for earlier thoughts looks for them.
3. **The target's chat template** writes the turns, each text exactly as it is. A system prompt that the
   template refuses or leaves out is put before the first question instead, a blank line between them.
4. **Without a template** (a base model) the conversation is written as plain lines, the system prompt
   first and a blank line after it::

       User: the question
       Assistant: the answer
       User: the next question
       Assistant:

   A base model would go on with a question of its own: ``Prompt.stop`` names where to stop it.
5. **BOS** stands at the beginning exactly once where the tokenizer would put one before plain text, whether
   or not the template writes it; otherwise only if the template does.
6. **What does not fit** is dropped, oldest turns first, question and answer together. The system prompt and
   the newest question stay.

Knows a Hugging Face tokenizer and nothing of models, sampling or the page. A tokenizer is only read, so
several threads may share one.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from core.text import PromptError, clean_text

ROLES = ("system", "user", "assistant")
THINK, END_THINK = "<think>", "</think>"

NO_TEMPLATE = (
    "This model has no chat template: the conversation is given to it as plain lines (User: …, Assistant: …)."
)
SYSTEM_MERGED = "This model's chat template takes no system prompt: it was put before the first question."
PLAIN_STOP = "\nUser:"

_OPENED_THOUGHT = re.compile(rf"{THINK}\s*\Z")
_PRIVATE_USE = range(0xF0000, 0xFFFFE)  # characters that no text has a reason to hold
_ANCHORS = ("\n", "x", ".")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation as a model reads it.

    ``ids`` are all of them, BOS and the reply's header included. ``dropped_messages`` counts the oldest
    messages left out for want of room. ``opening`` is the part of the reply that the template has already
    written ("<think>\\n", or ""): see ``split_thoughts`` and ``as_message``. ``notes`` are sentences for the
    reader. ``stop`` are strings at which the reply must end besides the reader's own.
    """

    ids: list[int]
    dropped_messages: int = 0
    opening: str = ""
    notes: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


# --- Prompts -----------------------------------------------------------------------------------------------


def encode_chat(tokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Ids of a chat ({"role", "content"} each), reply header included. Raises PromptError."""
    return _Writer(tokenizer).prompt(messages).ids


def prompt_limit(context_length: int, max_new_tokens: int) -> int:
    """How many ids a prompt may take: the reply keeps the room it may need, at most half the context."""
    return context_length - min(max_new_tokens, context_length // 2)


def fit_chat(tokenizer, messages: Sequence[Mapping[str, str]], limit: int) -> Prompt:
    """As much of a chat ({"role", "content"} each) as fits into ``limit`` ids.

    Raises PromptError for an empty question, a chat that the template refuses, and when the system prompt
    and the newest question alone are too long.
    """
    writer, messages = _Writer(tokenizer), list(messages)
    whole = writer.prompt(messages)
    if len(whole.ids) <= limit:
        return whole
    first = next(i for i, message in enumerate(messages) if message["role"] != "system")
    questions = [i for i, m in enumerate(messages) if m["role"] == "user" and m["content"].strip()]
    starts = [i for i in questions if i > first]
    tried: dict[int, Prompt] = {}

    def fits(start: int) -> bool:
        tried[start] = writer.prompt(messages[:first] + messages[start:])
        return len(tried[start].ids) <= limit

    at = bisect_left(starts, True, key=fits)  # writing a long chat takes time: few tries
    if at < len(starts):
        return replace(tried[starts[at]], dropped_messages=starts[at] - first)
    shortest = tried[starts[-1]] if starts else whole
    raise PromptError(
        f"The message is too long: it takes {len(shortest.ids):,} tokens with its system prompt and the model"
        f" has room for {limit:,}; please shorten it."
    )


class _Writer:
    """How one tokenizer writes conversations."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        if isinstance(template, Mapping):  # several, by name
            template = template.get("default")
        self._template: str = template or ""
        self._control = [
            token.content
            for token in tokenizer.added_tokens_decoder.values()
            # Some models have turn markers that are not "special". A single character cannot be broken.
            if (token.special or token.content in self._template) and len(token.content.strip()) > 1
        ]
        bos = tokenizer.bos_token_id
        self._bos = [bos] if bos is not None and tokenizer("x")["input_ids"][:1] == [bos] else []

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> Prompt:
        """The prompt of all ``messages``. Raises PromptError."""
        turns, mark = self._break_control_tokens(_turns(messages))
        opening, notes, stop = "", (), ()
        if self._template:
            text, turns, notes = self._rendered(turns)
            opening = self._opening(text, turns)
        else:
            text, notes, stop = _plain(turns), (NO_TEMPLATE,), (PLAIN_STOP,)
        ids = self._encode(text, mark)
        if ids[:1] != self._bos:
            ids = self._bos + ids
        return Prompt(ids, opening=opening, notes=notes, stop=stop)

    def _break_control_tokens(self, turns: list[dict[str, str]]) -> tuple[list[dict[str, str]], str | None]:
        """``turns`` with a mark inside of every control token, and the mark; None if there is none.

        The text is later cut at the marks and its pieces are encoded one by one, so that no piece holds a
        control token of a message's. The mark is one character: no template can split it or trim it away.
        """
        everything = "".join(turn["content"] for turn in turns)
        control = [token for token in self._control if token in everything]
        if not control:
            return turns, None
        mark = next((chr(code) for code in _PRIVATE_USE if chr(code) not in everything), None)
        if mark is None:
            raise PromptError("The message holds every private-use character; please leave some of them out.")
        return [{**turn, "content": _marked(turn, control, mark)} for turn in turns], mark

    def _rendered(self, turns: list[dict[str, str]]) -> tuple[str, list[dict[str, str]], tuple[str, ...]]:
        """The template's text, the turns as they were given to it, and notes."""
        if turns[0]["role"] != "system":
            return self._render(turns), turns, ()
        try:
            text = self._render(turns)
        except PromptError:  # Gemma's and Mistral's templates refuse the role
            text = ""
        if turns[0]["content"].strip() in text:  # Phi-3's leaves it out without a word
            return text, turns, ()
        system, question, *rest = turns
        merged = [{**question, "content": f"{system['content']}\n\n{question['content']}"}, *rest]
        return self._render(merged), merged, (SYSTEM_MERGED,)

    def _render(self, turns: list[dict[str, str]], header: bool = True) -> str:
        try:
            return self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=header)
        except Exception as error:  # a template is a program of the model's: anything may go wrong in it
            reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
            raise PromptError(
                f"The model's chat template refuses this conversation ({reason}): please begin a new one or"
                " load another model."
            ) from error

    def _opening(self, text: str, turns: list[dict[str, str]]) -> str:
        """The thinking tag that the reply's header ends with, or ""."""
        found = _OPENED_THOUGHT.search(text)
        if found is None:
            return ""
        messages = self._render(turns, header=False)  # the tag may be the last word of the question
        return "" if text.startswith(messages) and found.start() < len(messages) else found.group()

    def _encode(self, text: str, mark: str | None) -> list[int]:
        first, *rest = text.split(mark) if mark else [text]
        ids = list(self._ids(first))
        for piece in rest:
            ids += self._ids_inside(piece)
        return ids

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _ids_inside(self, piece: str) -> list[int]:
        """Ids of a piece from within a text.

        Tokenizers of the SentencePiece kind put a space before what they are given, so the piece is encoded
        behind an anchor whose ids are then taken away; the anchor must not melt into the piece.
        """
        for anchor in _ANCHORS:
            before, both = self._ids(anchor), self._ids(anchor + piece)
            if both[: len(before)] == before:
                return both[len(before) :]
        return self._ids(piece)


def turn_markers(tokenizer) -> frozenset[int]:
    """The ids of tokens that are not "special" and stand in the chat template all the same."""
    writer = _Writer(tokenizer)
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(id for id, token in added if not token.special and token.content in writer._control)


def encode_text(tokenizer, text: str) -> list[int]:
    """Ids of an assistant's text in which the control tokens that it spells are text.

    Raises PromptError where it holds every private-use character.
    """
    writer = _Writer(tokenizer)
    (turn,), mark = writer._break_control_tokens([{"role": "assistant", "content": text}])
    return writer._encode(turn["content"], mark)


def _turns(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Alternating turns (rule 1), the system prompt first if there is one. Raises PromptError."""
    turns: list[dict[str, str]] = []
    for message in messages:
        role, content = message["role"], clean_text(message["content"])
        if role not in ROLES:
            raise PromptError(f"A message has the role {role!r}; please use one of {', '.join(ROLES)}.")
        if not content.strip():
            continue
        before = turns[-1]["role"] if turns else "system"
        if before == role and turns:
            turns[-1]["content"] += "\n\n" + content
        elif role == "system" and turns:
            raise PromptError("Only the first message can be a system prompt; please move it there.")
        elif role != "assistant" or before != "system":
            turns.append({"role": role, "content": content})
    if not messages or messages[-1]["role"] != "user":
        raise PromptError("There is nothing to answer; please end the conversation with a question.")
    if not messages[-1]["content"].strip():
        raise PromptError("The message is empty; please write something.")
    return turns


def _marked(turn: Mapping[str, str], control: Sequence[str], mark: str) -> str:
    """A turn's text with ``mark`` behind the first character of each control token, overlapping ones too."""
    if turn["role"] == "assistant":
        control = [token for token in control if token not in (THINK, END_THINK)]
    tokens = "|".join(map(re.escape, control)) or "(?!)"  # the latter matches nowhere
    return re.sub(f"(?={tokens})(.)", rf"\1{mark}", turn["content"], flags=re.DOTALL)


def _plain(turns: Sequence[Mapping[str, str]]) -> str:
    """The conversation of a model without a template (rule 4)."""
    text = ""
    for turn in turns:
        content = turn["content"]
        if turn["role"] == "system":
            text += content + "\n\n"
        elif turn["role"] == "user":
            text += f"User: {content}\nAssistant:"
        else:  # an answer brings its own space where the model wrote one
            text += ("" if content[0].isspace() else " ") + content + "\n"
    return text


# --- Thoughts ----------------------------------------------------------------------------------------------


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


# --- Histories ---------------------------------------------------------------------------------------------


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
