"""A reply under way, whoever writes it: the engine in this process, or a GPU process elsewhere.

Knows records and text, no model; imports no torch, so that it may be used before anything touches that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from core.records import Reply, Round, Settings
from core.text.detokenise import decode


class Underway:
    """An iterator of ``Round``; ``reply`` is set when the reply has ended, however it did.

    ``prompt_tokens`` counts the prompt; ``reused_tokens``, those of it that a kept cache already held, and
    ``prefill_seconds`` are None until they are known. Successive ``next`` calls may come from different
    threads. Who writes fills ``_done`` in ``_run``, and calls ``_finish`` at the end.
    """

    def __init__(self, pair: Any, settings: Settings, prompt_tokens: int):
        self.settings = settings
        self.prompt_tokens = prompt_tokens
        self.reused_tokens: int | None = None
        self.prefill_seconds: float | None = None
        self.reply: Reply | None = None
        self._pair = pair
        self._done: list[Round] = []
        self._rounds = self._run()

    def __iter__(self) -> Iterator[Round]:
        return self

    def __next__(self) -> Round:
        return next(self._rounds)

    def close(self) -> None:
        """Ends the reply now and gives back what it holds; what was emitted stays."""
        self._rounds.close()
        if self.reply is None:  # never started
            self._finish("cancelled", None)

    def _run(self) -> Iterator[Round]:
        """The rounds, as they happen. A generator: nothing of it runs before the first ``next``."""
        raise NotImplementedError

    def _visible_chars(self, text: str) -> int:
        """How many characters of ``text`` are to be shown."""
        return len(text)

    def _finish(self, finish_reason: str, error: str | None) -> None:
        # From the rounds given out: one that died half-way has committed tokens nobody saw.
        rounds = self._done
        emitted = [token for round_ in rounds for token in round_.tokens if token.emitted]
        text = decode(self._pair.tokenizer, [token.id for token in emitted])
        prefill = self.prefill_seconds or 0.0
        self.reply = Reply(
            token_ids=tuple(token.id for token in emitted),
            text=text,
            visible_chars=self._visible_chars(text),
            tail=text[sum(len(token.text) for token in emitted) :],
            finish_reason=finish_reason,
            error=error,
            settings=self.settings,
            pair=self._pair.info,
            prompt_tokens=self.prompt_tokens,
            prefill_seconds=prefill,
            ttft_seconds=prefill + rounds[0].seconds if emitted else None,
            seconds=prefill + sum(round_.seconds for round_ in rounds),
            num_rounds=len(rounds),
            reused_tokens=self.reused_tokens,
        )
