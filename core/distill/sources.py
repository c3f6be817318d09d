"""The user's own text as a corpus: files of chats, plain text, and the conversations that Redline recorded.

``read`` goes by a file's ending:

    .jsonl    a chat a line: {"messages": [{"role": ..., "content": ...}, ...]}, every answer in it is
              learned, or {"prompt": ..., "response": ...}
    .npz      a corpus (``core.distill.corpus``)
    .db       Redline's database: every reply on record
    others    plain text in UTF-8. It is cut into passages, and each is learned as the reply to a question
              that is the text before it, so that drafts meet it where they work: behind a chat template

Prompts are written by ``core.chat``, as the page writes them. What does not fit into the limit is cut: a
prompt's oldest turns, a reply's end. Knows a tokenizer and no model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from core.chat import fit_chat
from core.distill.corpus import Chat, Corpus, CorpusError
from core.stored import StoredConversation, StoreError, conversation, reading, summaries
from core.text import PromptError

LIMIT = 1024  # ids of a chat
LEAD, PASSAGE = 64, 384  # ids of plain text that stand as a question, and as its reply
UNKNOWN = float("nan")  # the temperature of a text that was not drawn


def read(
    path: str | os.PathLike, tokenizer, *, limit: int = LIMIT, target_fingerprint: str | None = None
) -> Corpus:
    """The corpus of a file, of at most ``limit`` ids a chat. Raises CorpusError naming file and line.

    From a database with ``target_fingerprint`` only what that target wrote, as the very ids it wrote; without
    it the text of every reply, whoever wrote it.
    """
    path = Path(path)
    if path.suffix == ".npz":
        return Corpus.load(path)
    if path.suffix == ".jsonl":
        chats = list(_chats(path, tokenizer, limit))
    elif path.suffix in (".db", ".sqlite"):
        chats = list(_history(path, tokenizer, limit, target_fingerprint))
    else:
        chats = list(_passages(_text(path), tokenizer, limit))
    if not chats:
        raise CorpusError(f"There is no reply to learn from in {path}: name a file with more text.")
    return Corpus.of(chats)


# --- Files of chats ----------------------------------------------------------------------------------------


def _chats(path: Path, tokenizer, limit: int) -> Iterator[Chat]:
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            messages = _messages(json.loads(line))
            answers = [n for n, m in enumerate(messages) if m["role"] == "assistant" and m["content"].strip()]
            if not answers:
                raise ValueError("no message of the assistant holds text")
            for n in answers:
                yield _chat(tokenizer, messages[:n], _encode(tokenizer, messages[n]["content"]), limit)
        except (ValueError, RecursionError) as error:  # of json and core.chat, too
            reason = "it is not JSON" if isinstance(error, json.JSONDecodeError) else str(error).rstrip(".")
            raise CorpusError(
                f'{path}, line {number}: {reason}; each line must be {{"messages": [...]}} or {{"prompt": '
                '..., "response": ...}.'
            ) from error


def _messages(line: object) -> list[dict[str, str]]:
    """The messages of a line. Raises ValueError."""
    if not isinstance(line, Mapping):
        raise ValueError("it is not an object")
    if "messages" in line:
        messages = line["messages"]
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise ValueError('"messages" is not a list')
    elif "prompt" in line and "response" in line:
        messages = [
            {"role": "user", "content": line["prompt"]},
            {"role": "assistant", "content": line["response"]},
        ]
    else:
        raise ValueError('it has neither "messages" nor "prompt" and "response"')
    for message in messages:
        values = [message.get(name) for name in ("role", "content")] if isinstance(message, Mapping) else []
        if not values or not all(isinstance(value, str) for value in values):
            raise ValueError("a message has no role and content that are text")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _chat(
    tokenizer,
    messages: Sequence[Mapping[str, str]],
    reply: list[int],
    limit: int,
    temperature: float = UNKNOWN,
) -> Chat:
    """A reply behind the prompt of ``messages``, which may take half of ``limit``. Raises PromptError."""
    prompt = fit_chat(tokenizer, messages, limit - min(len(reply), limit // 2)).ids
    return Chat(np.asarray([*prompt, *reply][:limit], np.int64), len(prompt), temperature)


def _encode(tokenizer, text: str, end: bool = True) -> list[int]:
    """Ids of a reply; control tokens that it spells are text. ``end``: its end belongs to it."""
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id] if end and tokenizer.eos_token_id is not None else ids


# --- Plain text --------------------------------------------------------------------------------------------


def _passages(text: str, tokenizer, limit: int) -> Iterator[Chat]:
    ids = _encode(tokenizer, text, end=False)
    for begin in range(0, len(ids) - LEAD, LEAD + PASSAGE):
        lead = tokenizer.decode(ids[begin : begin + LEAD])
        passage = ids[begin + LEAD : begin + LEAD + PASSAGE]
        if lead.strip():
            try:
                yield _chat(tokenizer, [{"role": "user", "content": lead}], passage, limit)
            except PromptError as error:
                raise CorpusError(
                    f"The text cannot be put behind this target's chat template: {error}"
                ) from error


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise CorpusError(f"{path}, line {line}: it is not UTF-8; please save the file as UTF-8.") from error
    except OSError as error:
        raise CorpusError(
            f"{path} cannot be read ({error.strerror or error}): name a file that can be."
        ) from error


# --- The record --------------------------------------------------------------------------------------------


def _history(path: Path, tokenizer, limit: int, fingerprint: str | None) -> Iterator[Chat]:
    try:
        with reading(path) as connection:
            for summary in summaries(connection, limit=-1, client=None):  # SQLite's word for all
                yield from _replies(conversation(connection, summary.id), tokenizer, limit, fingerprint)
    except StoreError as error:
        raise CorpusError(str(error)) from error


def _replies(recorded: StoredConversation, tokenizer, limit: int, fingerprint: str | None) -> Iterator[Chat]:
    messages = [{"role": message.role, "content": message.content} for message in recorded.messages]
    for number, message in enumerate(recorded.messages):
        for reply in message.replies:
            if fingerprint is None:
                ids = _encode(tokenizer, reply.text, reply.finish_reason == "eos_token")
            else:
                ids = list(reply.token_ids) if reply.pair.target_fingerprint == fingerprint else []
            if not ids or not reply.text.strip():
                continue
            system = [{"role": "system", "content": reply.system_prompt}]
            try:
                yield _chat(tokenizer, system + messages[:number], ids, limit, reply.settings.temperature)
            except PromptError:  # what this target's template refuses, another one's took
                continue


def read_all(
    paths: Sequence[str | os.PathLike],
    tokenizer,
    *,
    limit: int = LIMIT,
    target_fingerprint: str | None = None,
) -> Corpus:
    """The corpora of several files as one, each prompt once. Raises CorpusError."""
    corpora = [read(path, tokenizer, limit=limit, target_fingerprint=target_fingerprint) for path in paths]
    return Corpus.of(chain.from_iterable(corpora)).distinct()
