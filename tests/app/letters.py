"""A toy pair that chats: the real engine over tables of logits, with a chat template of letters.

The prompt holds every letter of every message, so that a conversation that gets another's words shows it.
"""

from __future__ import annotations

import dataclasses

from core.pairs.pair import Pair
from tests.core.toys import ToyTokenizer, table, toy_pair


class ChatTokenizer(ToyTokenizer):
    """Messages become their lower-case letters, each one id; other characters are left out."""

    chat_template = "letters"
    added_tokens_decoder: dict = {}
    bos_token_id = None

    def apply_chat_template(self, messages, tokenize=False, add_generation_prompt=True, **options) -> str:
        return "".join(message["content"] for message in messages)

    def __call__(self, text: str, add_special_tokens: bool = True, **options) -> dict:
        return {"input_ids": [ord(c) - ord("a") for c in text.lower() if "a" <= c <= "z"]}


def chat_pair(*, device: str = "cpu", context_length: int = 256, sharpness: float = 1.0) -> Pair:
    """Two tables that disagree, so that drafts are rejected too; no end-of-text, so that length ends it."""
    pair = toy_pair(
        table(1, 26, sharpness),
        table(2, 26, sharpness),
        context_length=context_length,
        draft_context_length=context_length,
    )
    pair.tokenizer = ChatTokenizer()
    pair.info = dataclasses.replace(pair.info, device=device, context_length=context_length)
    return pair
