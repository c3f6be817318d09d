"""The Read view's messages."""

from __future__ import annotations

from app.chat.answer import Answer
from app.chat.conversation import Conversation, Turn
from app.chat.read_view import chat_messages
from core.records import Settings
from core.text.template import Prompt
from tests.app.toy import PAIR
from tests.core.builders import reply_of, rounds_of


def told(text: str, opening: str = "", done: bool = True) -> list[dict]:
    """The messages of a conversation of one reply."""
    answer = Answer("key", "first", Settings(), "auto", PAIR, Prompt([1], opening=opening))
    answer.reply = reply_of(rounds_of("p"), text=text, visible_chars=len(text))
    if done:
        answer.done.set()
    conversation = Conversation("key")
    conversation.turns = [Turn("Why?", [answer])]
    return chat_messages(conversation)[1:]


def texts(messages: list[dict]) -> list[str]:
    return [message["content"][0]["text"] for message in messages]


def test_a_reply_without_thoughts_is_one_message():
    messages = told("Because.")
    assert texts(messages) == ["Because."] and "metadata" not in messages[0]


def test_thoughts_are_folded_above_the_answer_and_shown_as_inert_text():
    thoughts, answer = told("<think>\nIs <b> it?\n</think>Because.")
    assert thoughts["metadata"] == {"title": "Thoughts", "status": "done"}
    assert texts([thoughts, answer]) == ["Is &lt;b&gt; it?", "Because."]


def test_thoughts_that_the_template_opened_are_open_while_they_are_written():
    (thoughts,) = told("Is it", opening="<think>\n", done=False)
    assert thoughts["metadata"]["status"] == "pending" and texts([thoughts]) == ["Is it"]
    (thoughts,) = told("Is it", opening="<think>\n")  # stopped
    assert thoughts["metadata"]["status"] == "done"


def test_blank_thoughts_are_not_shown():
    assert texts(told("<think>\n\n</think>Because.")) == ["Because."]
