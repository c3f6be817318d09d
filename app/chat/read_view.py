"""The Read view's messages for ``gr.Chatbot``: clean text, a reply's thoughts folded above it.

The texts are made for display (``app.widgets.display``); the true ones stay in ``app.chat.conversation``.
"""

from __future__ import annotations

from app.chat.answer import Answer
from app.chat.conversation import PLAIN_CAPTION, Conversation
from app.widgets.display import show_question, show_reply
from core.text.thoughts import split_thoughts

# A message of its own, so that no reply's text holds it.
CAPTION = {"type": "text", "text": f"<div class='caption'>{PLAIN_CAPTION.capitalize()}</div>"}


def chat_messages(conversation: Conversation) -> list[dict]:
    """The whole conversation. Thoughts are a message of their own, open only while they are written."""
    messages = []
    for turn in conversation.turns:
        messages.append({"role": "user", "content": [show_question(turn.question)]})
        for answer in turn.shown:
            if answer is turn.repeated:
                messages.append({"role": "assistant", "content": [CAPTION]})
            messages.extend(_reply(answer))
    return messages


def _reply(answer: Answer) -> list[dict]:
    thoughts, said = split_thoughts(answer.text, answer.opening)
    messages = []
    if thoughts and thoughts.strip():
        thinking = not said and not answer.done.is_set()
        messages.append(
            {
                "role": "assistant",
                "content": [show_reply(thoughts.strip("\n"))],
                "metadata": {"title": "Thoughts", "status": "pending" if thinking else "done"},
            }
        )
    if said or not messages:
        messages.append({"role": "assistant", "content": [show_reply(said)]})
    return messages
