"""A scripted pair and engine for tests of the page: no model, real records.

``ToyEngine(script)`` answers every prompt with what ``script`` says: a text, or a function from the
last question to a text. Each round keeps up to K pieces as accepted drafts, and every third round
strikes one and resamples it, so that all fates occur. The seed and K decide nothing but these fates; a K that
is chosen automatically grows by one every fourth round. The drafter "ngram" finds one piece a round,
"recycling" makes trees where they are asked for, and "plain" drafts nothing. A rule that is not exact
drifts by 0.12.
``pause`` seconds pass in each round; ``gate``, if given, must be set for a reply to go past its
second round, so that a test can look at a reply in progress without guessing times. The real
interface is that of ``core.engine.loop``.

Run: ``python -m tests.app.toy [PORT]`` serves the page with it on 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from core.figures.costs import Costs
from core.records import Fate, PairInfo, Reply, Round, Settings, Token
from core.text.detokenise import PromptError
from core.text.domains import DomainTracker
from tests.core import builders

PAIR = replace(
    builders.PAIR, target="Toy-135M", draft="Toy-draft", draft_quantization="int8", context_length=2048
)

COSTS = Costs(draft=0.002, verify=(0.010,) * 4 + (0.014,) * 5, overhead=0.001)

PIECE = re.compile(r"\s?\w+|\s+(?=\s)|\s?[^\w\s]|\s")
END = "<|im_end|>"


class ToyTokenizer:
    """One id for each piece of text it has met; the chat template joins role and content."""

    eos_token_id = 0
    all_special_ids = (0,)
    bos_token_id = None
    added_tokens_decoder: dict = {}
    chat_template = "see apply_chat_template"

    def __init__(self) -> None:
        self._pieces = [END]
        self._ids = {END: 0}

    def ids(self, text: str) -> list[int]:
        ids = []
        for piece in PIECE.findall(text):
            if piece not in self._ids:
                self._ids[piece] = len(self._pieces)
                self._pieces.append(piece)
            ids.append(self._ids[piece])
        return ids

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict:
        return {"input_ids": self.ids(text)}

    def apply_chat_template(self, messages, tokenize=False, add_generation_prompt=True) -> str:
        return "".join(f"<{m['role']}>{m['content']}</{m['role']}>\n" for m in messages) + "<assistant>"

    def decode(self, ids, **options) -> str:
        return "".join(self._pieces[id] for id in ids if id)

    def convert_ids_to_tokens(self, id: int) -> str:
        return self._pieces[id]


class ToyPair:
    def __init__(self, info: PairInfo = PAIR) -> None:
        self.info, self.tokenizer = info, ToyTokenizer()
        self.suggested: dict[str, float] = {}
        self.costs: Costs | None = COSTS
        self.acceptance = 0.5
        self.notes: tuple[str, ...] = ()
        self.products = None
        self.drafters = (info.drafter, "ngram", "recycling", "plain")

    def drafting(self, name: str | None) -> ToyPair:
        if name in (None, self.info.drafter):
            return self
        if name not in self.drafters:
            raise PromptError(f"This pair has no drafter {name!r}: choose one of {', '.join(self.drafters)}.")
        other = copy.copy(self)
        other.info = replace(self.info, drafter=name, draft=f"Toy {name}")
        return other


class ToyEngine:
    """See the module. ``prompts`` keeps the text of every prompt that was asked for."""

    def __init__(
        self,
        script: str | Callable[[str], str],
        *,
        pause: float = 0.0,
        gate: threading.Event | None = None,
        fail_after: int | None = None,
        info: PairInfo = PAIR,
    ) -> None:
        self.pair = ToyPair(info)
        self.script = script if callable(script) else lambda question: script
        self.pause, self.gate, self.fail_after = pause, gate, fail_after
        self.lock = threading.Lock()
        self.prompts: list[str] = []
        self.read: list[int] = []  # ids of the last prompt and its reply: what a kept cache would hold
        self.cache_limit = 64 << 20

    @property
    def cache_bytes(self) -> int:
        return len(self.read) << 12

    @property
    def busy(self) -> bool:
        return self.lock.locked()

    @contextlib.contextmanager
    def idle(self) -> Iterator[bool]:
        free = self.lock.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self.lock.release()

    def generate(
        self, prompt_ids, settings: Settings, *, cancel=None, domain="auto", drafter=None
    ) -> ToyGeneration:
        self.prompts.append(self.pair.tokenizer.decode(prompt_ids))
        info = self.pair.drafting(drafter).info
        return ToyGeneration(self, list(prompt_ids), settings, cancel or threading.Event(), domain, info)


class ToyGeneration:
    def __init__(
        self,
        engine: ToyEngine,
        prompt_ids: list[int],
        settings: Settings,
        cancel,
        domain: str,
        info: PairInfo,
    ) -> None:
        self.info = info
        self.engine, self.prompt_ids, self.settings, self.cancel = engine, prompt_ids, settings, cancel
        self.prompt_tokens, self.prefill_seconds, self.reply = len(prompt_ids), None, None
        self.reused_tokens: int | None = None
        self._domains = DomainTracker(domain)
        self._rounds = self._run()

    def __iter__(self) -> ToyGeneration:
        return self

    def __next__(self) -> Round:
        return next(self._rounds)

    def close(self) -> None:
        self._rounds.close()

    def _run(self) -> Iterator[Round]:
        rounds: list[Round] = []
        reason, error = "cancelled", None
        while not self.engine.lock.acquire(timeout=0.01):
            if self.cancel.is_set():
                break
        else:
            try:
                self._prefill()
                prompt = self.engine.pair.tokenizer.decode(self.prompt_ids)
                question = re.findall(r"<user>(.*?)</user>", prompt, re.DOTALL)[-1]
                ids = self.engine.pair.tokenizer.ids(self.engine.script(question)) + [0]
                ids = ids[: self.settings.max_new_tokens]
                while ids and not self.cancel.is_set():
                    if len(rounds) == 2 and self.engine.gate is not None:
                        while not self.engine.gate.wait(0.005) and not self.cancel.is_set():
                            pass
                        if self.cancel.is_set():
                            break
                    if len(rounds) == self.engine.fail_after:
                        reason, error = "error", "The target gave no usable distribution."
                        break
                    time.sleep(self.engine.pause)
                    round, ids = self._round(len(rounds), ids, sum(r.emitted for r in rounds))
                    if not ids:
                        reason = "eos_token" if round.tokens[-1].id == 0 else "length"
                        round = replace(round, finish_reason=reason)
                    rounds.append(round)
                    yield round
            finally:
                self.reply = self._reply(rounds, reason, error)
                self.engine.lock.release()
        self.reply = self.reply or self._reply(rounds, reason, error)

    def _prefill(self) -> None:
        """Reads in no time what the engine has read already."""
        pairs = zip(self.prompt_ids[:-1], self.engine.read, strict=False)
        self.reused_tokens = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.engine.read = self.prompt_ids
        self.prefill_seconds = 0.025 * (1 - self.reused_tokens / self.prompt_tokens)

    def _round(self, index: int, ids: list[int], emitted: int) -> tuple[Round, list[int]]:
        k = self.settings.num_draft_tokens
        reason = "fixed" if k else "plain"
        if self.settings.auto_draft_tokens and self.engine.pair.costs:
            k, reason = 1 + index // 4 % k, "auto"
        if self.info.drafter == "plain":
            k, reason = 0, "plain"
        count = max(0, min(k, len(ids) - 1))
        if self.info.drafter == "ngram" and count > 1:
            count, reason = 1, "no_match"
        struck = index % 3 == 2 and count > 1
        kept = count // 2 if struck else count
        fates = [Fate.ACCEPTED] * kept
        if struck:
            fates += [Fate.REJECTED, *[Fate.DISCARDED] * (count - kept - 1), Fate.RESAMPLED]
        else:
            fates.append(Fate.BONUS if count else Fate.PLAIN)
        tokens, take = [], 0
        wrong = self.engine.pair.tokenizer.ids(" instead")[0]
        for place, fate in enumerate(fates):
            emits = fate not in (Fate.REJECTED, Fate.DISCARDED)
            id = ids[take] if emits else wrong
            tokens.append(
                self._token(
                    place,
                    id,
                    fate,
                    kept if fate is Fate.RESAMPLED else place,
                    emitted + take if emits else None,
                )
            )
            take += emits
        if self.info.drafter == "recycling" and self.settings.tree_width > 1 and count:
            tokens = self._with_a_sibling(tokens, wrong)
        text = "".join(token.text for token in tokens if token.emitted)
        return (
            Round(
                index=index,
                num_draft_tokens=k,
                num_draft_tokens_reason=reason,
                tokens=tuple(tokens),
                text=text,
                context_tokens=self.prompt_tokens + emitted + take,
                draft_seconds=0.002 * count,
                target_seconds=0.010,
                overhead_seconds=0.001,
                drafter=self.info.drafter if count else None,
            ),
            ids[take:],
        )

    def _with_a_sibling(self, chain: list[Token], wrong: int) -> list[Token]:
        """The round with a refused candidate before its first draft, and one behind that, never tested."""
        first = self._token(0, wrong, Fate.REJECTED, 0, None)
        behind = replace(self._token(1, wrong, Fate.DISCARDED, 1, None), parent=0)
        moved = [
            replace(token, index=token.index + 2, parent=None if token.parent is None else token.parent + 2)
            for token in chain
        ]
        return [replace(first, p=0.1), behind, *moved]

    def _token(self, index: int, id: int, fate: Fate, position: int, emitted_index: int | None) -> Token:
        text = self.engine.pair.tokenizer.decode([id])
        emits = emitted_index is not None
        domain, mono = self._domains.push(text) if emits else self._domains.peek([text])[0]
        figures: dict = {}
        if fate is not Fate.DISCARDED:
            figures = dict(p=0.6, entropy_p=1.2, p_raw=0.55, top_p=((id, 0.6), (1, 0.1)))
        if fate in (Fate.ACCEPTED, Fate.REJECTED):
            q, u = (0.5, 0.25) if fate is Fate.ACCEPTED else (0.9, 0.95)
            figures |= dict(q=q, u=u, overlap=0.8, entropy_q=1.3, top_q=((id, q), (1, 0.2)))
            if not self.settings.exact:
                figures |= dict(u=None, drift=0.12)
        return Token(
            index=index,
            id=id,
            text=text,
            fate=fate,
            position=position,
            label=None if text else END,
            parent=index - 1 if index else None,
            emitted_index=emitted_index,
            domain=domain,
            monospaced=mono,
            **figures,
        )

    def _reply(self, rounds: list[Round], reason: str, error: str | None) -> Reply:
        ids = tuple(token.id for round in rounds for token in round.tokens if token.emitted)
        text = self.engine.pair.tokenizer.decode(ids)
        prefill = self.prefill_seconds or 0.0
        return Reply(
            token_ids=ids,
            text=text,
            visible_chars=len(text),
            tail="",
            finish_reason=reason,
            error=error,
            settings=self.settings,
            pair=self.info,
            prompt_tokens=self.prompt_tokens,
            prefill_seconds=prefill,
            ttft_seconds=prefill + rounds[0].seconds if rounds else None,
            seconds=prefill + sum(round.seconds for round in rounds),
            num_rounds=len(rounds),
            reused_tokens=self.reused_tokens,
        )


LETTER = """Dear Ruth,

The lamp turns and the sea answers. Tonight a **small** ship went by, its lights low, and I counted the waves
between us: nineteen. You would have laughed at me, for I said good night to it aloud.

```python
def primes(n: int) -> list[int]:
    found: list[int] = []
    candidate = 2
    while len(found) < n:
        if all(candidate % prime for prime in found):
            found.append(candidate)
        candidate += 1
    return found
```

Two things I have learned here. First, silence is not empty; second, $3 buys a week of oil. Write soon, and
tell me whether the orchard at \\(x = 4\\) still stands.
"""


def main() -> None:
    from app.chat.desk import Desk
    from app.page import build, launch
    from app.serving.loading import Loader
    from core.record.store import Store

    def load(spec, progress):
        for step in range(10):
            progress("Unpacking the toy.", step / 10)
            time.sleep(0.2)
        names = {"pair": spec.name, "target": spec.target, "draft": spec.draft or ""} if spec else {}
        engine = ToyEngine(LETTER * 2, pause=0.03, info=replace(PAIR, **names))
        engine.pair.suggested = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
        return engine

    loader = Loader(load)
    loader.start()
    store = Store(Path(tempfile.mkdtemp()) / "toy.db")
    launch(build(Desk(loader, store)), "127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 7870)


if __name__ == "__main__":
    main()
