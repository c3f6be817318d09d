"""An estimate of what rounds of a pair take on a card that is not here: launches against bytes.

A card and its host work side by side. The host needs a time for every launch and every view; the card needs
the time in which its memory gives the weights and the KV cache, and a least time for every small kernel.
Whichever of the two takes longer decides. What a round asks for is counted by the engine's own code on a
fake card (``core.bench.fake_card``); bytes follow from the models' sizes; facts of cards are
``core.bench.cards``'.

Williams et al. 2009 (doi:10.1145/1498765.1498785) call such a bound a roofline: the true figure lies below
it. ``LEFT_OUT`` says what is not in it. Knows no clock; ``core.bench.roofline_table`` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core.bench import fake_pairs, nf4_dispatch
from core.bench.cards import Card
from core.bench.fake_card import Counts, FakeCard
from core.engine.auto_k import MOST
from core.figures.costs import Costs
from core.models.key_blocks import KEY_BLOCK, PARTS
from core.models.memory import Size
from core.pairs.catalogue import Entry
from core.records import Settings

LEFT_OUT = (
    "the arithmetic itself and kernels slower than a copy; filters' traffic over the vocabulary; "
    "clocks that fall; prompts, Python's own pauses, and other work of the host or the card"
)
CONTEXT = 512  # ids whose keys and values a pass reads
WIDE_BYTES = 2  # a weight, a key or a value in 16 bits
# NF4 with double quantisation, as bitsandbytes holds it: half a byte a weight, a byte for 64 of them, and a
# float32 for 256 of those.
NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)
UNPACKING_BYTES = 2 * WIDE_BYTES  # a weight is written in 16 bits and read again


@dataclass(frozen=True)
class Host:
    """Seconds of the host, and what a card reaches of its data sheet.

    ``launch``: an operation that starts a kernel; ``view``: one that does not; ``nf4``: what bitsandbytes'
    Python takes for a product beside its launch; ``round``: what follows a round's one wait, until the next
    begins; ``kernel``: the least a small kernel takes on the card; ``copy``: the share of the memory's
    printed bandwidth that a copy reaches.
    """

    launch: float
    view: float
    nf4: float
    round: float
    kernel: float
    copy: float

    def faster(self, times: float) -> Host:
        """A host of so many times the speed, the card being the same."""
        parts = (part / times for part in (self.launch, self.view, self.nf4, self.round))
        return Host(*parts, self.kernel, self.copy)


# Timed on one core of an AMD EPYC (Zen 3) without a card: ``nf4`` (``matmul_4bit`` with an empty kernel takes
# 40 µs, an operation's dispatch 2 of them), ``view``, and the dispatch in ``launch``. Taken, not timed: 3 µs
# of the driver for a launch, ``kernel``, and ``round`` (draws ahead, the record, text). ``copy``: published
# bandwidth tests reach 0.75 (T4) to 0.91 (RTX 4090) of the data sheet.
HOST = Host(launch=5e-6, view=0.8e-6, nf4=38e-6, round=1e-3, kernel=1.5e-6, copy=0.8)


@dataclass(frozen=True)
class Asked:
    """What a part of a round asks of the host; ``products`` of its launches read a weight."""

    launches: float
    views: float
    products: int = 0

    @classmethod
    def of(cls, counts: Counts, products: int = 0) -> Asked:
        return cls(counts.launches, counts.views, products)

    def __add__(self, other: Asked) -> Asked:
        return Asked(self.launches + other.launches, self.views + other.views, self.products + other.products)

    def __sub__(self, other: Asked) -> Asked:
        return Asked(self.launches - other.launches, self.views - other.views, self.products - other.products)

    def times(self, factor: float) -> Asked:
        return Asked(factor * self.launches, factor * self.views, round(factor * self.products))


@dataclass(frozen=True)
class Work:
    """A round in parts: the target's ``passed``, a draft ``step`` with its draw, and the rest of a round
    without drafts (``plain``) and with them (``judging``)."""

    passed: Asked
    step: Asked
    plain: Asked
    judging: Asked


def count(target: dict, draft: dict, form: str, dtype: torch.dtype) -> Work:
    """What rounds of these models (of their configs) ask for, target in ``form``.

    Layers are alike, and a cache has as many parts whatever multiple of ``PARTS`` they are: so small models
    are counted, and what whole ones ask for follows. Raises RuntimeError as ``fake_pairs.a_round`` does.
    """

    def model(config: dict, form: str, times: int):
        return fake_pairs.lean(config | {"num_hidden_layers": times * PARTS}, form, dtype)

    with FakeCard() as card:
        models = {
            (name, times): model(config, kind, times)
            for name, config, kind in (("target", target, form), ("draft", draft, "none"))
            for times in (1, 2)
        }
        small = fake_pairs.drafters(models["target", 1], models["draft", 1])
        rounds = []
        for k in (0, 1, 2):
            pair = fake_pairs.pair_of(*small["model" if k else "plain"]())
            rounds.append(Asked.of(fake_pairs.a_round(card, pair, Settings(num_draft_tokens=k))))
        passes = {
            (name, times): Asked.of(fake_pairs.a_pass(card, one, 1), 4 * times * PARTS + 1)
            for (name, times), one in models.items()
        }

    def whole(name: str, config: dict) -> Asked:
        one, two = passes[name, 1], passes[name, 2]
        return one + (two - one).times((config["num_hidden_layers"] - PARTS) / PARTS)

    one_target, one_draft = passes["target", 1], passes["draft", 1]
    drawing = rounds[2] - rounds[1] - Asked(one_draft.launches, one_draft.views)
    bare = Asked(one_target.launches, one_target.views)
    return Work(
        passed=whole("target", target),
        step=whole("draft", draft) + drawing,
        plain=rounds[0] - bare,
        judging=rounds[1] - (rounds[2] - rounds[1]) - bare,
    )


@dataclass(frozen=True)
class Model:
    """Its size, its four products' shapes (out, in) in a layer, and how its weights are held."""

    size: Size
    shapes: tuple[tuple[int, int], ...]
    layers: int
    form: str
    dtype: torch.dtype

    @classmethod
    def of(cls, config: dict, size: Size, form: str, dtype: torch.dtype) -> Model:
        hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
        shapes = ((queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner))
        return cls(size, shapes, config["num_hidden_layers"], form, dtype)

    def bytes_read(self, rows: int, card: Card, context: int) -> float:
        """What a pass over so many rows moves: weights, head, keys and values."""
        kept = -(-context // KEY_BLOCK) * KEY_BLOCK * self.size.cache * WIDE_BYTES
        return (
            self.layers * sum(self._product(shape, rows, card) for shape in self.shapes)
            + kept
            + (self.size.table * WIDE_BYTES)
        )

    def unpacked(self, rows: int, card: Card) -> list[bool]:
        """Which of a layer's products unpack their weights before they multiply so many rows."""
        return [self._unpacks(shape, rows, card) for shape in self.shapes]

    def _unpacks(self, shape: tuple[int, int], rows: int, card: Card) -> bool:
        if self.form != "nf4":
            return False
        return nf4_dispatch.fused(shape, rows, self.dtype, card.capability, card.multiprocessors) is False

    def _product(self, shape: tuple[int, int], rows: int, card: Card) -> float:
        each = NF4_BYTES if self.form == "nf4" else WIDE_BYTES
        return shape[0] * shape[1] * (each + UNPACKING_BYTES * self._unpacks(shape, rows, card))


def costs(
    work: Work, target: Model, draft: Model, card: Card, host: Host = HOST, context: int = CONTEXT
) -> Costs:
    """What rounds with K = 0 to ``MOST`` are estimated to take on ``card``, as if it had been measured."""
    bandwidth = card.bandwidth * (1 if card.measured else host.copy)

    def on_host(asked: Asked, form: str) -> float:
        nf4 = asked.products - 1 if form == "nf4" and asked.products else 0  # the head stays in 16 bits
        return asked.launches * host.launch + asked.views * host.view + nf4 * host.nf4

    def on_card(asked: Asked, moved: float) -> float:
        return moved / bandwidth + (asked.launches - asked.products) * host.kernel

    verify = []
    for k in range(MOST + 1):
        asked = work.passed + (work.judging if k else work.plain)
        verify.append(
            max(on_host(asked, target.form), on_card(asked, target.bytes_read(k + 1, card, context)))
        )
    step = max(on_host(work.step, draft.form), on_card(work.step, draft.bytes_read(1, card, context)))
    return Costs(step, tuple(verify), host.round)


def models(entry: Entry, form: str, dtype: torch.dtype) -> tuple[Model, Model]:
    """Target and draft of a pair of the catalogue, the target in ``form``."""
    target, draft = entry.target_model, entry.draft_model
    return (
        Model.of(target.config, target.size, form, dtype),
        Model.of(draft.config, draft.size, "none", dtype),
    )
