"""The user's own text as a corpus: files of chats, plain text, and the conversations that Redline recorded.

``read`` goes by a file's ending:

    .jsonl    a chat a line: {"messages": [{"role": ..., "content": ...}, ...]}, every answer in it is
              learned, or {"prompt": ..., "response": ...}
    .npz      a corpus (``core.distill.corpus``)
    .db       Redline's database: every reply on record
    others    plain text in UTF-8. It is cut into passages, and each is learned as the reply to a question
              that is the text before it, so that drafts meet it where they work: behind a chat template

Prompts are written by ``core.text.chat``, as the page writes them. What does not fit into the limit is cut: a
prompt's oldest turns, a reply's end. Files are read line by line, and no further than there is room for what
is learned of them (``most``). Knows a tokenizer and no model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from core.distill.corpus import Chat, Corpus, CorpusError
from core.record.stored import StoredConversation, StoreError, conversation, reading, summaries
from core.text.chat import fit_chat
from core.text.detokenise import PromptError
from core.text.template import encode_text, turn_markers

LIMIT = 1024  # ids of a chat
LEAD, PASSAGE = 64, 384  # ids of plain text that stand as a question, and as its reply
LONGEST_LINE = 1 << 26  # bytes: a line that is longer is no chat
BLOCK = 1 << 22  # characters of plain text that are encoded together
UNKNOWN = float("nan")  # the temperature of a text that was not drawn


def read(
    path: str | os.PathLike,
    tokenizer,
    *,
    limit: int = LIMIT,
    target_fingerprint: str | None = None,
    most: int | None = None,
) -> Corpus:
    """The corpus of a file, of at most ``limit`` ids a chat. Raises CorpusError naming file and line, also
    where the file holds more than ``most`` ids: what there is room to learn from.

    From a database with ``target_fingerprint`` only what that target wrote, as the very ids it wrote; without
    it the text of every reply, whoever wrote it.
    """
    path = Path(path)
    if path.suffix == ".npz":
        return Corpus.load(path)
    if path.suffix == ".jsonl":
        found = _chats(path, tokenizer, limit)
    elif path.suffix in (".db", ".sqlite"):
        found = ((None, chat) for chat in _history(path, tokenizer, limit, target_fingerprint))
    else:
        found = _passages(path, tokenizer, limit)
    chats, ids = [], 0
    for line, chat in found:
        ids += len(chat.ids)
        if most is not None and ids > most:
            where = f"{path}, line {line:,}" if line else str(path)
            raise CorpusError(
                f"{where}: up to here the text has more than the {most:,} tokens that there is room for: "
                "give less text, or name a folder on a larger disk with --out."
            )
        chats.append(chat)
    if not chats:
        empty = "it is empty: name a file with text." if _is_empty(path) else None
        raise CorpusError(
            f"{path}, line 1: {empty}"
            if empty
            else f"There is no reply to learn from in {path}: name a file with more text."
        )
    return Corpus.of(chats)


def _is_empty(path: Path) -> bool:
    try:
        return path.stat().st_size == 0
    except OSError:
        return False


# --- Files of chats ----------------------------------------------------------------------------------------


def _chats(path: Path, tokenizer, limit: int) -> Iterator[tuple[int, Chat]]:
    """Each with the number of its line."""
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            messages = _messages(json.loads(line))
            answers = [n for n, m in enumerate(messages) if m["role"] == "assistant" and m["content"].strip()]
            if not answers:
                raise ValueError("no message of the assistant holds text")
            for n in answers:
                reply = _encode(tokenizer, messages[n]["content"])
                yield number, _chat(tokenizer, messages[:n], reply, limit)
        except (ValueError, RecursionError) as error:  # of json and core.text.chat, too
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
        if any("\ud800" <= sign <= "\udfff" for value in values for sign in value):
            # Two halves of one character were joined by json already.
            raise ValueError("a message holds half a character (a lone surrogate, as \\ud83d)")
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
    if turn_markers(tokenizer).intersection(ids):  # those that are not "special" were not split
        ids = encode_text(tokenizer, text)
    return [*ids, tokenizer.eos_token_id] if end and tokenizer.eos_token_id is not None else ids


# --- Plain text --------------------------------------------------------------------------------------------


def _passages(path: Path, tokenizer, limit: int) -> Iterator[tuple[int, Chat]]:
    """Each with the number of the line up to which the text was read."""
    for line, text in _blocks(path):
        ids = _encode(tokenizer, text, end=False)
        for begin in range(0, len(ids) - LEAD, LEAD + PASSAGE):
            lead = tokenizer.decode(ids[begin : begin + LEAD])
            passage = ids[begin + LEAD : begin + LEAD + PASSAGE]
            if lead.strip():
                try:
                    yield line, _chat(tokenizer, [{"role": "user", "content": lead}], passage, limit)
                except PromptError as error:
                    raise CorpusError(
                        f"The text cannot be put behind this target's chat template: {error}"
                    ) from error


def _blocks(path: Path) -> Iterator[tuple[int, str]]:
    """The text in parts of whole lines, each with the number of its last, so that a large file is never in
    memory whole. The line feed between two parts begins the second.
    """
    lines, size, number = [], 0, 0
    for number, line in _lines(path):
        lines.append(line)
        size += len(line) + 1
        if size >= BLOCK:
            yield number, "\n".join(lines)
            lines, size = [""], 0
    if lines != [""]:
        yield number, "\n".join(lines)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file in UTF-8, numbered from 1, without their line feeds: the parts between those."""
    number, ended = 0, True
    try:
        with open(path, "rb") as file:
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    most = f"{LONGEST_LINE >> 20} MB"
                    raise CorpusError(
                        f"{path}, line {number:,}: it is longer than {most}; please break it up."
                    )
                ended = line.endswith(b"\n")
                yield number, line.removesuffix(b"\n").decode("utf-8-sig" if number == 1 else "utf-8")
        if number and ended:  # the empty part behind the last
            yield number + 1, ""
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{path}, line {number}: it is not UTF-8; please save the file as UTF-8."
        ) from error
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
    most: int | None = None,
) -> Corpus:
    """The corpora of several files as one, each prompt once; ``most`` ids of each. Raises CorpusError."""
    corpora = [
        read(path, tokenizer, limit=limit, target_fingerprint=target_fingerprint, most=most) for path in paths
    ]
    return Corpus.of(chain.from_iterable(corpora)).distinct()
