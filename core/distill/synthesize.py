"""The target writes chats for its draft to learn from: the user's turn too, behind an opening phrase.

``synthesize`` needs a transformers causal language model with a chat template, on the CPU or a card, and
writes shards (``core.distill.corpus``), each complete or absent, each from a seed of its own: a call that was
interrupted goes on with the first shard that is missing. A user's turn begins with a phrase of
``data/openings.json``; the model writes on at ``PROMPT_TEMPERATURE`` until it ends the turn, and then the
answer, over its whole vocabulary, at one of ``TEMPERATURES``.

How it is fast: many chats run in one pass, and chats that begin together, a *cohort*, always have the same
length. A cohort attends over its own cache without a mask or padding, while the matrix products take
all cohorts' rows at once; what ends leaves its place to the cohort's last row, and when enough have ended a
new cohort begins behind a copy of the template's own opening.

Knows nothing of drafts and of training. The model must let its attention be replaced (transformers'
``AttentionInterface``), without windows and without a cap on scores; others are refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AttentionInterface

from core.distill.corpus import Chat, Corpus, CorpusError, held_out
from core.machine.progress import Progress, silent
from core.text.detokenise import end_token_ids
from core.text.template import turn_markers

OPENINGS = Path(__file__).resolve().parents[2] / "data" / "openings.json"
DOMAINS = {"code": 0.40, "prose": 0.35, "open": 0.25}
PROMPT_TEMPERATURE = 0.85
# α is judged at 1, and people chat at 0 to 0.8.
TEMPERATURES = {1.0: 0.45, 0.8: 0.28, 0.6: 0.11, 0.3: 0.07, 0.0: 0.09}
MAX_TURN, MAX_REPLY = 96, 384  # ids
SHARD = 1500  # chats
SLOTS, COHORT = 256, 32  # chats in one pass, and how many begin together
TRIES = 400  # chats begun for each that is wanted, before the target is given up
GROWTH = 128  # positions by which a cohort's cache grows

ATTENTION = "redline_cohorts"
REFUSED = (
    "This target's attention cannot be replaced, or looks through a window, so it cannot write many chats at "
    "once: train on your own text."
)


# --- Openings ----------------------------------------------------------------------------------------------


class Openings:
    """How users' turns begin. ``pick`` draws a domain, a phrase of it, and what fills the phrase's names."""

    def __init__(self, path: Path = OPENINGS, domains: dict[str, float] = DOMAINS):
        phrases = json.loads(path.read_text(encoding="utf-8"))
        self._phrases = {domain: phrases[domain] for domain in domains}
        self._weights = list(domains.values())
        self._fill = phrases["fill"]

    def pick(self, draw: random.Random) -> str:
        (domain,) = draw.choices(list(self._phrases), self._weights)
        filled = {name: draw.choice(words) for name, words in self._fill.items()}
        return draw.choice(self._phrases[domain]).format_map(filled)


@dataclass(frozen=True)
class _Frame:
    """What a chat template writes around a user's turn, as ids: before it, and from its end to the reply."""

    before: list[int]
    after: list[int]
    ends: frozenset[int]  # ids that end a turn
    special: frozenset[int]  # ids that no turn may hold
    context: int  # ids of a chat that the model has room for


def _frame(model, tokenizer) -> _Frame:
    if not tokenizer.chat_template:
        raise CorpusError("This target has no chat template to write chats with: train on your own text.")
    mark = "\U000f0000"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = text.partition(mark)
    before, after = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))
    ends = end_token_ids(tokenizer, model.config.to_dict(), model.generation_config.to_dict())
    # The template's own tokens count, also where they are added and not "special".
    special = frozenset(tokenizer.all_special_ids) | turn_markers(tokenizer)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    return _Frame(before, after, ends | special.intersection(after[:1]), special, context)


# --- Writing -----------------------------------------------------------------------------------------------


def synthesize(
    model,
    tokenizer,
    count: int,
    out: str | os.PathLike,
    *,
    seed: int = 0,
    kept_out: bool = False,
    openings: Openings | None = None,
    temperatures: dict[float, float] = TEMPERATURES,
    slots: int = SLOTS,
    cohort: int = COHORT,
    progress: Progress = silent,
) -> list[Path]:
    """Shards in the folder ``out`` with ``count`` chats or a few more, in order; those there already stay.

    All prompts are of one side of ``held_out``: the held-out side if ``kept_out``. Same model, seed, options
    and machine: same shards. ``temperatures`` maps a reply's temperature to how often it is used; ``slots``
    chats run in one pass and ``cohort`` of them begin together. Raises CorpusError.
    """
    if count < 1 or not 1 <= cohort <= slots:
        raise CorpusError("Ask for at least one chat, and for no more to begin together than run at once.")
    frame, openings, shards = _frame(model, tokenizer), openings or Openings(), []
    with _cohort_attention(model), torch.inference_mode():
        for index, done in enumerate(range(0, count, SHARD)):
            path = Path(out) / f"chats-{seed}-{index:04d}.npz"
            shards.append(path)
            if path.exists():
                continue
            chats = _Chats(
                frame,
                lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
                openings,
                random.Random(f"{seed} {index}"),
                temperatures,
                lambda prompt: held_out(prompt) == kept_out,
            )
            size = min(SHARD, count - done)
            for finished in _write(model, frame.before, chats, size, slots, cohort):
                written = min(done + finished, count)  # those begun together end together, a few more
                progress(f"Writing chats: {written:,} of {count:,}", written / count)
            Corpus.of(chats.finished).save(path)
    return shards


# --- One chat ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Row:
    """A chat under way. ``ids`` are all of it; ``forced`` those of its next ids that are not drawn."""

    ids: list[int]
    forced: list[int]
    temperature: float  # of the reply
    turn_limit: int  # ids up to which the user's turn must have ended
    prompt_len: int = 0  # 0 while the user's turn is written
    drawn: float = field(default=PROMPT_TEMPERATURE)  # temperature of the next draw


class _Chats:
    """Begins chats and takes their drawn ids; ``finished`` are those that are done."""

    def __init__(
        self,
        frame: _Frame,
        encode: Callable[[str], list[int]],
        openings: Openings,
        draw: random.Random,
        temperatures: dict[float, float],
        wanted: Callable[[list[int]], bool],
    ):
        self._frame, self._encode, self._openings, self.draw = frame, encode, openings, draw
        self._temperatures = temperatures
        self._wanted = wanted
        self.finished: list[Chat] = []
        self.begun = 0
        self.prompts = 0  # how many were wanted

    def begin(self) -> _Row:
        opening = self._encode(self._openings.pick(self.draw))
        (temperature,) = self.draw.choices(list(self._temperatures), list(self._temperatures.values()))
        self.begun += 1
        ids = [*self._frame.before, opening[0]]
        limit = min(len(ids) + MAX_TURN, self._frame.context - len(self._frame.after))
        return _Row(ids, opening[1:], temperature, limit)

    def take(self, row: _Row, drawn: int) -> bool:
        """Adds a chat's next id, the drawn one unless one is forced; False when the chat is over."""
        frame = self._frame
        if row.forced:
            row.ids.append(row.forced.pop(0))
            return bool(row.prompt_len) or len(row.ids) < row.turn_limit
        if row.prompt_len:
            row.ids.append(drawn)
            full = len(row.ids) - row.prompt_len == MAX_REPLY or len(row.ids) == frame.context
            if drawn in frame.ends or full:
                self.finished.append(Chat(np.asarray(row.ids), row.prompt_len, row.temperature))
                return False
            return True
        if drawn == frame.after[0] or drawn in frame.ends:
            prompt = row.ids + frame.after
            if not self._wanted(prompt):
                return False
            self.prompts += 1
            row.ids.append(frame.after[0])
            row.forced, row.prompt_len, row.drawn = frame.after[1:], len(prompt), row.temperature
            return True
        row.ids.append(drawn)
        return drawn not in frame.special and len(row.ids) < row.turn_limit


# --- Many chats in one pass --------------------------------------------------------------------------------


class _Cohort:
    """Chats of the same length and their cache, a pair of (rows, heads, capacity, size) a layer."""

    def __init__(self, rows: list[_Row], prefix: _Cohort | None = None):
        self.rows = rows
        self.length = 0
        self._cache: dict[int, list[torch.Tensor]] = {}
        if prefix is not None:
            self.length = prefix.length
            for layer, pair in prefix._cache.items():
                self._cache[layer] = [
                    _room(x[:, :, : self.length].expand(len(rows), -1, -1, -1), self.length + GROWTH)
                    for x in pair
                ]

    @property
    def layers(self) -> int:
        return len(self._cache)

    def extend(self, layer: int, *new: torch.Tensor) -> list[torch.Tensor]:
        """All keys and values of the rows, after the new ones (rows, heads, new, size) were added."""
        end, count = self.length + new[0].shape[2], len(self.rows)
        pair = self._cache.get(layer)
        if pair is None:
            pair = self._cache[layer] = [x[:, :, :0] for x in new]
        if end > pair[0].shape[2]:
            pair = self._cache[layer] = [_room(x[:count, :, : self.length], end + GROWTH) for x in pair]
        for kept, x in zip(pair, new, strict=True):
            kept[:count, :, self.length : end] = x
        return [kept[:count, :, :end] for kept in pair]

    def drop(self, index: int) -> None:
        """Takes a row out; the last one gets its place."""
        last = self.rows.pop()
        if index < len(self.rows):
            self.rows[index] = last
            for pair in self._cache.values():
                for kept in pair:
                    kept[index, :, : self.length] = kept[len(self.rows), :, : self.length]


def _room(x: torch.Tensor, capacity: int) -> torch.Tensor:
    """A copy with room for ``capacity`` positions."""
    copy = x.new_empty(x.shape[0], x.shape[1], capacity, x.shape[3])
    copy[:, :, : x.shape[2]] = x
    return copy


def _attend(
    module, query, key, value, attention_mask, scaling=None, cohorts: Sequence[_Cohort] = (), **others
):
    """transformers' attention, cohort by cohort: each row sees its own past. Raises CorpusError."""
    if any(others.get(name) is not None for name in ("sliding_window", "softcap", "s_aux")):
        raise CorpusError(REFUSED)
    parts, first = [], 0
    for cohort in cohorts:
        rows = slice(first, first := first + len(cohort.rows))
        keys, values = cohort.extend(module.layer_idx, key[rows], value[rows])
        q = query[rows]
        if q.shape[2] == 1:  # the heads that share keys stand as positions: each key is read once
            packed = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[3])
            part = F.scaled_dot_product_attention(packed, keys, values, scale=scaling)
            parts.append(part.reshape(q.shape[0], 1, q.shape[1], -1))
        else:
            part = F.scaled_dot_product_attention(
                q, keys, values, is_causal=True, scale=scaling, enable_gqa=True
            )
            parts.append(part.transpose(1, 2))
    return torch.cat(parts), None


AttentionInterface.register(ATTENTION, _attend)


@contextlib.contextmanager
def _cohort_attention(model) -> Iterator[None]:
    """The model with ``_attend`` for its attention; put back afterwards. Raises CorpusError."""
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(ATTENTION)
    except ValueError as error:
        raise CorpusError(REFUSED) from error
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _write(model, before: list[int], chats: _Chats, count: int, slots: int, size: int) -> Iterator[int]:
    """Runs until ``count`` chats or more are finished and none is under way; yields how many are, each pass.

    Every chat that was begun is brought to its end: to stop at a number would prefer short ones.
    """
    device = model.device
    draws = np.random.default_rng(chats.draw.getrandbits(64))
    prefix = _Cohort([None])
    _forward(
        model, torch.tensor([before], device=device), torch.arange(len(before), device=device)[None], [prefix]
    )
    if prefix.layers != model.config.get_text_config().num_hidden_layers:  # some attend in a way of their own
        raise CorpusError(REFUSED)
    cohorts: list[_Cohort] = []
    while True:
        rows = [row for cohort in cohorts for row in cohort.rows]
        turns = sum(not row.prompt_len for row in rows)
        if chats.prompts + turns < count and len(rows) <= slots - size:
            if chats.begun > TRIES * (count + size):
                raise CorpusError(
                    "This target does not end the questions it writes, so it cannot write chats: train on "
                    "your own text."
                )
            cohorts.append(_Cohort([chats.begin() for _ in range(size)], prefix))
            rows += cohorts[-1].rows
        if not rows:
            return
        ids = torch.tensor([row.ids[-1:] for row in rows], device=device)
        positions = torch.tensor([[cohort.length] for cohort in cohorts for _ in cohort.rows], device=device)
        temperatures = torch.tensor([row.drawn for row in rows], device=device)
        uniforms = torch.tensor(draws.random(len(rows), np.float32), device=device)
        drawn = draw_ids(_forward(model, ids, positions, cohorts), temperatures, uniforms).tolist()
        next_id = iter(drawn)
        for cohort in cohorts:
            over = [i for i, row in enumerate(cohort.rows) if not chats.take(row, next(next_id))]
            for i in reversed(over):
                cohort.drop(i)
        cohorts = [cohort for cohort in cohorts if cohort.rows]
        yield len(chats.finished)


def _forward(model, ids: torch.Tensor, positions: torch.Tensor, cohorts: Sequence[_Cohort]) -> torch.Tensor:
    """Logits (rows, vocabulary) behind the last of ``ids`` (rows, new), which are then in the caches."""
    output = model(input_ids=ids, position_ids=positions, use_cache=False, cohorts=cohorts, logits_to_keep=1)
    for cohort in cohorts:
        cohort.length += ids.shape[1]
    return output.logits[:, -1]


def draw_ids(logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """One id a row of ``logits`` (rows, vocabulary) by inverse CDF; the likeliest at temperature 0."""
    ids = []
    for x, temperature, u in zip(logits.split(8), temperatures.split(8), uniforms.split(8), strict=True):
        x = x - x.amax(-1, keepdim=True).float()
        greedy = x.argmax(-1)
        x /= temperature.clamp_min(1e-3)[:, None]
        sums = x.exp_().cumsum(-1)
        total = sums[:, -1:]
        # Below the total even where the product rounds up to it: an id of no probability is never drawn.
        at = torch.minimum(u[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
        drawn = torch.searchsorted(sums, at, right=True)[:, 0]
        ids.append(torch.where(temperature > 0, drawn, greedy))
    return torch.cat(ids)
