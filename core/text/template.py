"""From messages to prompt ids by the target's chat template: turns, control tokens, BOS.

The rules, in the order in which they apply (the sixth is ``core.text.chat``'s):

1. **Turns.** Messages without text (blank, or whitespace alone) and answers before the first question are
   left out; neighbours of one role become one turn, a blank line between them. So turns always alternate,
   as many templates demand. The conversation must end with a question.
2. **Typed control tokens are text.** What a message says never becomes a control token: neither the
   tokenizer's special tokens nor other added tokens that the template writes. Thinking tags in answers are
   the exception, because the template's own rule for earlier thoughts looks for them.
3. **The target's chat template** writes the turns, each text exactly as it is: as text, or where the
   question does not arrive so, as a list of one part ({"type": "text"}). A system prompt that the template
   refuses or leaves out is put before the first question instead, a blank line between them. Whether
   something arrived is known by writing the conversation with another text in its place: words may stand in
   a prompt for other reasons. A question that does not arrive either way is refused.
4. **Without a template** (a base model) the conversation is written as plain lines, the system prompt
   first and a blank line after it::

       User: the question
       Assistant: the answer
       User: the next question
       Assistant:

   A base model would go on with a question of its own: ``Prompt.stop`` names where to stop it.
5. **BOS** stands at the beginning exactly once where the tokenizer would put one before plain text, whether
   or not the template writes it; otherwise only if the template does.

Knows a Hugging Face tokenizer and nothing of models, sampling or the page. A tokenizer is only read, so
several threads may share one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from core.text.detokenise import PromptError, clean_text
from core.text.thoughts import END_THINK, THINK

ROLES = ("system", "user", "assistant")

NO_TEMPLATE = (
    "This model has no chat template: the conversation is given to it as plain lines (User: …, Assistant: …)."
)
SYSTEM_MERGED = "This model's chat template takes no system prompt: it was put before the first question."
PLAIN_STOP = "\nUser:"

_OPENED_THOUGHT = re.compile(rf"{THINK}\s*\Z")
_PRIVATE_USE = range(0xF0000, 0xFFFFE)  # characters that no text has a reason to hold
_ANCHORS = ("\n", "x", ".")
_BESIDE = 4  # ids that a template puts around a message, about: only for where borders lie


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation as a model reads it.

    ``ids`` are all of them, BOS and the reply's header included. ``dropped_messages`` counts the oldest
    messages left out for want of room. ``opening`` is the part of the reply that the template has already
    written ("<think>\\n", or ""): see ``core.text.thoughts``. ``notes`` are sentences for the
    reader. ``stop`` are strings at which the reply must end besides the reader's own.
    """

    ids: list[int]
    dropped_messages: int = 0
    opening: str = ""
    notes: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


class TemplateWriter:
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

    def sizes(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """About how many ids each message takes."""
        return [len(self._ids(clean_text(message["content"]))) + _BESIDE for message in messages]

    def behind_an_answer(self, turns: list[dict[str, str]]) -> str:
        """What the template writes between an answer and ``turns``, and those; "" where that is not known."""
        question, texts = {"role": "user", "content": "?"}, []
        for answer in ("x", "y"):
            chat = [question, {"role": "assistant", "content": answer}, *turns]
            try:
                texts.append(self._arrived(chat, header=False)[0])
            except PromptError:
                return ""
        one, other = (text[::-1] for text in texts)
        same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
        return texts[0][len(texts[0]) - same :]

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
            return *self._arrived(turns), ()
        try:
            text, given = self._arrived(turns)
            if self._shows(text, given, 0):  # Phi-3's template leaves it out without a word
                return text, given, ()
        except PromptError:  # Gemma's and Mistral's refuse the role
            pass
        system, question, *rest = turns
        merged = [{**question, "content": f"{system['content']}\n\n{question['content']}"}, *rest]
        text, given = self._arrived(merged)
        if not self._shows(text, given, 0):
            raise PromptError("The model's chat template leaves the system prompt out; please remove it.")
        return text, given, (SYSTEM_MERGED,)

    def _arrived(self, turns: list[dict[str, str]], header: bool = True) -> tuple[str, list[dict]]:
        """The template's text with the last turn in it, and the turns as it was given them: as texts, or
        where that does not arrive, as parts. Raises PromptError where it refuses them or leaves the last
        out."""
        refused = None
        try:
            text = self._render(turns, header)
            if self._shows(text, turns, -1, header):
                return text, turns
        except PromptError as error:
            refused = error
        try:
            given = [{**turn, "content": _as_part(turn["content"])} for turn in turns]
            text = self._render(given, header)
            if self._shows(text, given, -1, header):
                return self._texts_where_taken(text, given, turns, header)
        except PromptError:
            pass
        raise refused or PromptError(
            "The model's chat template leaves the question out; please begin a new conversation or load"
            " another model."
        )

    def _texts_where_taken(
        self, text: str, given: list[dict], turns: list[dict[str, str]], header: bool
    ) -> tuple[str, list[dict]]:
        """The same where some role is wanted as text all the same, as some templates want answers."""
        for role in {turn["role"] for turn in turns} - {turns[-1]["role"]}:
            mixed = [a if a["role"] == role else b for a, b in zip(turns, given, strict=True)]
            last = max(i for i, turn in enumerate(turns) if turn["role"] == role)
            try:
                other = self._render(mixed, header)
                if self._shows(other, mixed, last, header):
                    text, given = other, mixed
            except PromptError:
                continue
        return text, given

    def _shows(self, text: str, turns: list[dict], at: int, header: bool = True) -> bool:
        """Whether ``text``, which the template made of ``turns``, has the content of turn ``at`` in it: with
        another text in its place it is another."""
        content = turns[at]["content"]
        others = ("?", "!") if isinstance(content, str) else (_as_part("?"), _as_part("!"))
        other = others[content == others[0]]
        changed = list(turns)
        changed[at] = {**turns[at], "content": other}
        try:
            return self._render(changed, header) != text
        except PromptError:  # it looks into the text, so it has it
            return True

    def _render(self, turns: list[dict], header: bool = True) -> str:
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


def closing_ids(tokenizer) -> frozenset[int]:
    """The special tokens with which the chat template goes on right behind an answer: a model that writes one
    has ended its turn, whatever its files name as the end of a text (NX-06). None without a template.
    """
    writer, ids = TemplateWriter(tokenizer), set()
    for behind in ([], [{"role": "user", "content": "?"}]):
        text = writer.behind_an_answer(behind).lstrip()
        found = [
            (len(token.content), id_)
            for id_, token in tokenizer.added_tokens_decoder.items()
            if token.special and text.startswith(token.content)
        ]
        ids.update(id_ for _, id_ in sorted(found)[-1:])
    return frozenset(ids)


def turn_markers(tokenizer) -> frozenset[int]:
    """The ids of tokens that are not "special" and stand in the chat template all the same."""
    writer = TemplateWriter(tokenizer)
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(id for id, token in added if not token.special and token.content in writer._control)


def encode_text(tokenizer, text: str) -> list[int]:
    """Ids of an assistant's text in which the control tokens that it spells are text.

    Raises PromptError where it holds every private-use character.
    """
    writer = TemplateWriter(tokenizer)
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


def _as_part(text: str) -> list[dict[str, str]]:
    """A text as templates of models that also see or hear want it: a list of its one part."""
    return [{"type": "text", "text": text}]


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
