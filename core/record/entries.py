"""What the record's tables are given: each entry is a job for a connection that writes.

Knows the records, the schema (``core.record.migrations``) and how text is cleaned before it is stored;
nothing of when a job is done, nor of what is held where it cannot be.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone

from core.record.plain import plain, plain_record
from core.record.stored import PAIR_NAMES, ROUND_NAMES, SETTING_NAMES, TOKEN_NAMES, pack_top
from core.records import PairInfo, Reply, Round, Settings, Token, writes_exactly
from core.text.detokenise import clean_text

Job = Callable[[sqlite3.Connection], object]


class NoQuestion(Exception):
    """A reply to a message that is not in the database."""


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _insert(table: str, names: Iterable[str]) -> str:
    names = tuple(names)
    columns = ", ".join(f'"{name}"' for name in names)
    return f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * len(names))})"


_INSERT_ROUND = _insert("rounds", ("reply_id", *ROUND_NAMES))
_INSERT_TOKEN = _insert("tokens", ("round_id", *TOKEN_NAMES))


def conversation(conversation_id: str, client: str | None, system_prompt: str) -> Job:
    values = [conversation_id, now(), client and clean_text(client), clean_text(system_prompt)]
    return lambda connection: connection.execute(
        "INSERT INTO conversations (id, created, client, system_prompt) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (id) DO NOTHING",
        values,
    )


def system_prompt(conversation_id: str, text: str) -> Job:
    values = [conversation_id, now(), clean_text(text)]
    return lambda connection: connection.execute(
        "INSERT INTO conversations (id, created, system_prompt) VALUES (?, ?, ?) "
        "ON CONFLICT (id) DO UPDATE SET system_prompt = excluded.system_prompt",
        values,
    )


def message(
    conversation_id: str, message_id: str, role: str, content: str = "", parent_id: str | None = None
) -> Job:
    """A message, and its conversation where that is not on record."""
    values = {
        "id": message_id,
        "conversation": conversation_id,
        "parent": parent_id,
        "role": role,
        "content": clean_text(content),
        "created": now(),
    }

    def job(connection: sqlite3.Connection) -> None:
        connection.execute(
            "INSERT INTO conversations (id, created) VALUES (:conversation, :created) "
            "ON CONFLICT (id) DO NOTHING",
            values,
        )
        connection.execute(
            """
            INSERT INTO messages (id, conversation_id, number, parent_id, role, content, created)
            VALUES (:id, :conversation,
                (SELECT coalesce(max(number) + 1, 0) FROM messages WHERE conversation_id = :conversation),
                (SELECT id FROM messages WHERE id = :parent), :role, :content, :created)
            """,
            values,
        )

    return job


def reply(
    reply_id: str,
    conversation_id: str,
    question_id: str,
    message_id: str,
    settings: Settings,
    pair: PairInfo,
    *,
    domain: str,
    prompt_tokens: int,
    kind: str | None,
    answers_reply_id: str | None,
    opening: str,
) -> Job:
    """A reply that begins, in the message that answers ``question_id``: a new one, ``message_id``, where
    there is none. Arguments are those of ``core.record.store.Store.begin_reply``.

    The job raises NoQuestion. Raises ``core.record.plain.NotPlain`` for what no table holds.
    """
    settings, pair = plain_record(settings), plain_record(pair)
    values = {name: getattr(pair, name) for name in PAIR_NAMES}
    values = {name: clean_text(v) if isinstance(v, str) else v for name, v in values.items()}
    values.update((name, getattr(settings, name)) for name in SETTING_NAMES)
    values.update(
        id=reply_id,
        conversation_id=conversation_id,
        created=now(),
        stop=json.dumps([clean_text(stop) for stop in settings.stop], ensure_ascii=False),
        exact=writes_exactly(settings, pair.drafter),
        domain_choice=domain,
        opening=clean_text(opening),
        prompt_tokens=plain("prompt_tokens", prompt_tokens),
    )
    answer_message = message(conversation_id, message_id, "assistant", parent_id=question_id)

    def job(connection: sqlite3.Connection) -> None:
        question = connection.execute(
            "SELECT 1 FROM messages WHERE id = ? AND conversation_id = ?", [question_id, conversation_id]
        ).fetchone()
        if question is None:
            raise NoQuestion
        answer = connection.execute(
            "SELECT id FROM messages WHERE parent_id = ? AND role = 'assistant'", [question_id]
        ).fetchone()
        if answer is None:
            answer_message(connection)
        in_message = answer[0] if answer else message_id
        latest = connection.execute(
            "SELECT id, number FROM replies WHERE message_id = ? ORDER BY number DESC LIMIT 1", [in_message]
        ).fetchone()
        answered = connection.execute("SELECT id FROM replies WHERE id = ?", [answers_reply_id]).fetchone()
        answered = answered or latest
        (prompt,) = connection.execute(
            "SELECT system_prompt FROM conversations WHERE id = ?", [conversation_id]
        ).fetchone()
        row = dict(
            values,
            message_id=in_message,
            number=latest[1] + 1 if latest else 0,
            kind=kind or ("regenerated" if latest else "first"),
            answers_reply_id=answered[0] if answered else None,
            system_prompt=prompt,
        )
        connection.execute(_insert("replies", row), list(row.values()))

    return job


def round_of(reply_id: str, round_: Round) -> Job:
    """A round, made of Python's own numbers, with its tokens. Raises ``struct.error`` for an id that no table
    holds."""
    values = {name: getattr(round_, name) for name in ROUND_NAMES}
    values["text"] = clean_text(round_.text)
    tokens = [_token_row(token) for token in round_.tokens]

    def job(connection: sqlite3.Connection) -> None:
        round_id = connection.execute(_INSERT_ROUND, (reply_id, *values.values())).lastrowid
        connection.executemany(_INSERT_TOKEN, [(round_id, *token) for token in tokens])

    return job


def _token_row(token: Token) -> tuple:
    values = {name: getattr(token, name) for name in TOKEN_NAMES}
    values["text"] = clean_text(token.text)
    values["label"] = token.label and clean_text(token.label)
    values["fate"] = token.fate.value
    values["top_p"] = pack_top(token.top_p)
    values["top_q"] = pack_top(token.top_q)
    return tuple(values.values())


def end(reply_id: str, reply: Reply, figures: Mapping[str, object]) -> Job:
    """How a reply ended, its ``figures`` by column, and the assistant's message. Raises
    ``core.record.plain.NotPlain`` for what no table holds."""
    reply = plain_record(reply)
    visible = clean_text(reply.visible_text)
    values = dict(
        figures,
        reused_tokens=reply.reused_tokens,
        prefill_seconds=reply.prefill_seconds,
        ttft_seconds=reply.ttft_seconds,
        seconds=reply.seconds,
        finish_reason=reply.finish_reason,
        error=reply.error and clean_text(reply.error),
        text=visible + clean_text(reply.text[reply.visible_chars :]),
        visible_chars=len(visible),
        tail=clean_text(reply.tail),
    )
    sets = ", ".join(f'"{name}" = ?' for name in values)

    def job(connection: sqlite3.Connection) -> None:
        connection.execute(f"UPDATE replies SET {sets} WHERE id = ?", [*values.values(), reply_id])
        # A plain repetition stands beside the reply it repeats, and does not replace it in the chat.
        connection.execute(
            "UPDATE messages SET content = ? WHERE id = "
            "(SELECT message_id FROM replies WHERE id = ? AND (kind != 'plain' OR number = 0))",
            [visible, reply_id],
        )

    return job


def nothing_of(conversation_id: str) -> Job:
    """Deletes a conversation and all of its replies."""
    return lambda connection: connection.execute("DELETE FROM conversations WHERE id = ?", [conversation_id])


def nothing(connection: sqlite3.Connection) -> None:
    """The job that deletes everything."""
    tables = ("tokens", "rounds", "replies", "messages", "conversations")
    for table in (*tables, "compared_replies", "comparisons"):
        connection.execute(f"DELETE FROM {table}")
