"""A round on the models' own device, with one wait for it: the way of a CUDA card (docs/ENGINE.md, rule 9).

The draws are made before the round and sent ahead. Drafts feed the next step as tensors; target pass,
verification and the target's own draw follow without a look at any of them; all that the record keeps comes
to the host as one tensor. The maths is that of ``core.sampling``, over whole rows and for all positions at
once, in the same dtypes: one filter chain, q in float32, draws, ratios and residuals in float64. Draws that
a round turns out not to need are the next round's, so that a seed gives the reply ``core.rounds`` gives, up
to rounding.

Nothing here may make the host wait but the one transfer: no ``item``, no branch on a tensor, no mask that
chooses how many, no copy from memory that is not pinned. Shapes depend on K and on the length of the
text alone, as CUDA graphs will want them. Runs on CPU tensors as well, which is how it is tested.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from core.drafters.auto import AutoDrafter, Both
from core.drafters.base import Drafter
from core.drafters.model import ModelDrafter
from core.drafters.ngram import NgramDrafter
from core.drafters.recycling import SUCCESSORS, RecyclingDrafter, likeliest
from core.models.base import Cache
from core.models.pair import Pair
from core.records import EXACT_VERIFIERS, Fate, Settings
from core.reuse import Kept
from core.rounds import Played, Uniform, Verdict, chain, outcome_figures
from core.sampling import TOP, BadLogitsError, Outcome

# Columns of the table that comes to the host, one row a position; then ids and values of the top of p and q.
_COLUMNS = (
    *("id", "draft_usable", "target_usable", "largest", "q", "p", "u", "h", "overlap"),
    *("entropy_p", "entropy_q", "p_raw"),
)
_OWN = ("kept", "id", "p", "q", "p_raw")  # and of what follows the table
CERTAIN = (NgramDrafter, RecyclingDrafter)  # draw nothing: what they propose is known before a round
_TINY = torch.finfo(torch.float32).tiny


class Lookahead:
    """Draws that can be seen before it is known how many of them a round uses."""

    def __init__(self, uniform: Uniform):
        self._uniform = uniform
        self._ahead: list[float] = []

    def peek(self, count: int) -> list[float]:
        """The next ``count`` draws, which stay the next."""
        while len(self._ahead) < count:
            self._ahead.append(self._uniform())
        return self._ahead[:count]

    def use(self, count: int) -> None:
        """Counts the next ``count`` as used."""
        del self._ahead[:count]


@dataclass(frozen=True, slots=True)
class Rows:
    """What rows of logits stand for: ``p`` and ``soft`` (n, width) float32 as ``core.sampling.distributions``
    has them, zeros where nothing can be drawn, which ``usable`` (n,) tells; ``largest`` (n,) logits."""

    p: torch.Tensor
    soft: torch.Tensor
    usable: torch.Tensor
    largest: torch.Tensor


def distributions(logits: torch.Tensor, settings: Settings, seen: torch.Tensor | None = None) -> Rows:
    """The filter chain of ``core.sampling.distributions`` on rows of logits (n, width).

    ``seen`` (n, width) bool marks the ids before each row, for the repetition penalty.
    """
    logits = logits.float()
    if seen is not None and settings.repetition_penalty != 1:
        penalty = settings.repetition_penalty
        logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    largest = logits.amax(-1, keepdim=True)
    usable = largest.isfinite()
    if settings.temperature == 0 or settings.top_k == 1:
        p = torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    else:
        p = _sampled((logits - largest) / settings.temperature, settings)
    soft = p if settings.temperature else (logits - largest).softmax(-1)
    unusable = ~usable
    p = p.masked_fill(unusable, 0.0)
    soft = soft.masked_fill(unusable, 0.0) if settings.temperature == 0 else p
    return Rows(p, soft, usable[:, 0], largest[:, 0])


def _sampled(scaled: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Top-k, top-p and min-p on rows of logits after temperature (n, width): probabilities (n, width).

    Of equal ids, of which not all are kept, the lowest are, as in ``core.sampling.distribution``: ``topk``
    alone may choose any, and ``sort`` is asked to be stable.
    """
    width = scaled.shape[-1]
    columns = None  # of the entries in ``p`` where they are not all, in order
    if 0 < settings.top_k < width:
        columns = _largest(scaled, settings.top_k)
        scaled = scaled.gather(-1, columns)
    p = scaled.softmax(-1)
    if settings.top_p < 1:
        p, order = p.sort(dim=-1, descending=True, stable=True)
        columns = order if columns is None else columns.gather(-1, order)
        dropped = p.cumsum(-1) - p >= settings.top_p
        dropped[:, :1] = False
        p = _normalised(p.masked_fill(dropped, 0.0))
    if settings.min_p > 0:
        p = _normalised(p.masked_fill(p < settings.min_p * p.amax(-1, keepdim=True), 0.0))
    if columns is None:
        return p
    return p.new_zeros(*p.shape[:-1], width).scatter_(-1, columns, p)


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Where the ``count`` largest of each row of ``values`` (n, width) are, ascending; of equal ones the
    lowest: (n, count) int64."""
    least = values.topk(count).values[:, -1:]
    above, equal = values > least, values == least
    kept = above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
    # Each that is kept goes to its place among them, all others behind, where they are cut off.
    place = torch.where(kept, kept.cumsum(-1) - 1, count)
    columns = torch.arange(values.shape[-1], device=values.device).expand_as(place)
    return place.new_zeros(len(values), count + 1).scatter_(-1, place, columns)[:, :count]


def _normalised(p: torch.Tensor) -> torch.Tensor:
    return p / p.sum(-1, keepdim=True)


def draw(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """``core.sampling.draw`` for rows of weights (n, width) at u (n,) float64: indices (n,).

    A parallel sum of rounded numbers need not rise with every term, nor stand still where a weight is 0: so
    the sum is looked at only where there is weight, and is everywhere below its largest value once.
    """
    weights = weights.double()
    cumulative = weights.cumsum(-1).masked_fill_(weights <= 0, -1.0)
    total = cumulative.amax(-1)
    below = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    return (cumulative > below[:, None]).to(torch.uint8).argmax(-1)  # the first of them


@dataclass(frozen=True, slots=True)
class Judged:
    """Of K drafts ``kept`` () stand; ``p``, ``q``, ``u``, ``h`` and ``overlap`` (K,) float64 are of each.

    ``own`` (1,) is the target's id behind those kept, ``own_p`` and ``own_q`` (1,) its probabilities.
    """

    kept: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor
    u: torch.Tensor
    h: torch.Tensor
    overlap: torch.Tensor
    own: torch.Tensor
    own_p: torch.Tensor
    own_q: torch.Tensor


def judge(
    p: Rows,
    q: torch.Tensor,
    drafts: torch.Tensor,
    drafted: torch.Tensor,
    draws: torch.Tensor,
    verifier: str,
    certain: bool = False,
) -> Judged:
    """Verifies a block, token by token or as a whole, and draws the target's own token.

    ``p`` are K + 1 rows, ``q`` (K, width) float32 those the ``drafts`` (K,) were drawn from; of the drafts
    the first ``drafted`` () count. ``draws`` float64 are the round's, 2K + 1, the first of which went into
    the drafts that count, or K + 1 where drafts are ``certain`` and took none. Judged are drafts before the
    first row of p that is not usable.
    """
    k = len(drafts)
    places = torch.arange(k, device=drafts.device)
    judged = torch.minimum(drafted, p.usable[:k].long().cumprod(0).sum())
    inside = places < judged
    p_x = p.p[:k].gather(1, drafts[:, None])[:, 0].double()
    q_x = q.gather(1, drafts[:, None])[:, 0].double()
    taken = torch.zeros_like(drafted) if certain else drafted
    u = draws.gather(0, taken + places)
    one = draws.new_ones(1)
    if verifier == "block":
        weights, h = _block(p.p[:k], q, p_x, q_x, inside, judged)
        kept = F.pad((places + 1) * (inside & (u < h)), (1, 0)).amax()
        weight, used = torch.cat([one, weights]).gather(0, kept[None]), taken + judged
    else:
        h = torch.zeros_like(u)
        kept = (inside & (u * q_x < p_x)).long().cumprod(0).sum()
        weight, used = one, taken + torch.minimum(kept + 1, drafted)
    rejected = kept < judged
    row_p = p.p.index_select(0, kept[None]).double()
    row_q = F.pad(q, (0, 0, 0, 1)).index_select(0, kept[None]).double() * rejected
    left = (row_p * torch.where(rejected, weight, one) - row_q).clamp_min_(0)
    own = draw(torch.where(left.sum() > 0, left, row_p), draws.gather(0, used[None]))
    return Judged(
        kept=kept,
        p=p_x,
        q=q_x,
        u=u,
        h=h,
        overlap=torch.minimum(p.p[:k], q).sum(-1, dtype=torch.float64).clamp_max(1),
        own=own,
        own_p=row_p.gather(1, own[:, None])[0],
        own_q=row_q.gather(1, own[:, None])[0],
    )


def _block(
    p: torch.Tensor,
    q: torch.Tensor,
    p_x: torch.Tensor,
    q_x: torch.Tensor,
    inside: torch.Tensor,
    judged: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """w_1..w_K and h_1..h_K (K,) float64 of docs/ENGINE.md, rule 16; of use only ``inside`` the block.

    w_i = min(1, w_{i-1} r_i) unrolls to the least product of r over the places from any j up to i, the empty
    one included: in logarithms, the sum up to i less the largest sum before it, 0 at least.
    """
    sums = (p_x / q_x).masked_fill(~inside, 1.0).log().cumsum(0)
    weights = (sums - sums.cummax(0).values.clamp_min(0)).exp() if len(sums) else sums
    left = (weights[:-1, None] * p[1:].double() - q[1:].double()).clamp_min_(0).sum(-1)
    whole = left + 1 - weights[:-1]
    h = F.pad((left / whole).masked_fill(whole <= 0, 1.0), (0, min(1, len(sums))))
    last = torch.arange(len(sums), device=sums.device) == judged - 1
    return weights, torch.where(last, weights, h)


@dataclass(frozen=True, slots=True)
class Turn:
    """``count`` drafts by ``drafter``, whose own ``state`` is given; ``known`` are their ids where they are
    certain, and so known before anything runs."""

    drafter: Drafter | None
    state: Cache | None
    count: int
    known: list[int] | None = None

    @property
    def certain(self) -> bool:
        return self.known is not None


class Batched:
    """Plays the rounds of one reply (``core.rounds.Way``) on the device of the pair's models."""

    def __init__(self, pair: Pair, settings: Settings, uniform: Uniform):
        self._target = pair.target
        self._drafter = pair.drafter
        self._settings = settings
        self._draws = Lookahead(uniform)
        self._device = torch.device(pair.target.device)
        models = pair.drafter.other if isinstance(pair.drafter, AutoDrafter) else pair.drafter
        head = getattr(models, "head_ids", None)
        self._head = None if head is None else head.to(self._device)
        self._learner = models if isinstance(models, RecyclingDrafter) else None
        self._seen: torch.Tensor | None = None  # (vocabulary,) bool: ids before the round
        self._marked = 0  # leading ids of the sequence that ``_seen`` knows
        if settings.repetition_penalty != 1:
            self._seen = torch.zeros(pair.target.vocabulary, dtype=torch.bool, device=self._device)

    @staticmethod
    def suits(pair: Pair, verifier: str = "token", tree_width: int = 1) -> bool:
        """Whether all models are on one CUDA card and can be fed from there, with a draft that is a model, or
        known before a round, or either. Lossy rules and trees go step by step."""
        if verifier not in EXACT_VERIFIERS:
            return False
        models, drafter = [pair.target], pair.drafter
        if isinstance(drafter, AutoDrafter):
            drafter = drafter.other
        if isinstance(drafter, RecyclingDrafter) and tree_width > 1:
            return False
        if isinstance(drafter, ModelDrafter):
            models.append(drafter.model)
        elif drafter is not None and not isinstance(drafter, CERTAIN):
            return False
        devices = {getattr(model, "device", None) for model in models}
        (device, *others) = devices
        able = all(hasattr(model, "device_logits") for model in models)
        return able and not others and device is not None and torch.device(device).type == "cuda"

    def play(self, ids: Sequence[int], count: int, caches: Kept) -> Played:
        clock, turn = _Clock(self._device), self.turn(ids, count, caches)
        numbers = self.launch(ids, turn, caches, clock).tolist()  # the one wait
        learnt, numbers = self._unpacked(numbers, turn)
        round_ = _Round.unpacked(numbers, turn.count, self._settings.verifier == "block", turn.certain)
        self._draws.use(round_.used)
        if learnt and count:
            block = [ids[-1], *(row["id"] for row in round_.table[: turn.count])]
            state = caches.state(self._drafter)
            self._learner.learn(block, learnt, state.state if isinstance(state, Both) else state)
        return Played(
            chain((row["id"], row["q"]) for row in round_.table[: round_.drafted]),
            round_.verdicts(),
            *clock.seconds("drafted", "scored"),
        )

    def turn(self, ids: Sequence[int], count: int, caches: Kept) -> Turn:
        """Who drafts in this round, and what is known of the drafts before it."""
        if not count:
            return Turn(None, None, 0)
        drafter, state = self._drafter, caches.state(self._drafter)
        if isinstance(drafter, AutoDrafter):
            drafter, state, count = drafter.turn(ids, count, state)
        if isinstance(drafter, CERTAIN):
            known = drafter.chain(ids, count, state)
            return Turn(drafter, state, len(known), known)
        return Turn(drafter, state, count)

    def launch(
        self, ids: Sequence[int], turn: Turn, caches: Kept, clock: _Clock | None = None
    ) -> torch.Tensor:
        """Starts a round on the device; its figures as one float64 tensor there, as ``_Round`` unpacks them.

        Waits for nothing, however far the device has got.
        """
        clock = clock or _Clock(self._device)
        unread = list(ids[turn.state.length :]) if turn.count and not turn.certain else []
        unmarked = list(ids[self._marked :]) if self._seen is not None else []
        known = turn.known or []
        ahead = self._draws.peek(turn.count + (0 if turn.certain else turn.count) + 1)
        sent = self._send([*unread, *unmarked, *known, ids[-1], *ahead])
        unread, unmarked, known, last, draws = sent.split(
            [len(unread), len(unmarked), len(known), 1, len(ahead)]
        )
        if self._seen is not None:
            self._seen.index_fill_(0, unmarked.long(), True)
            self._marked = len(ids)
        if turn.certain:
            drafts, qs, seen = self._certain(known.long())
        else:
            drafts, qs, seen = self._draft(unread.long(), turn, draws)
        clock.mark("drafted")
        raw = self._target.device_logits(torch.cat([last.long(), drafts]), caches.cache)
        clock.mark("scored")
        if seen is not None:
            seen = seen[:, : raw.shape[-1]]
        p = distributions(raw, self._settings, seen)
        figures = self._judge(raw, p, drafts, qs, draws, turn.certain)
        if self._learner is None:
            return figures
        return torch.cat([likeliest(raw).double().flatten(), figures])

    def _unpacked(self, numbers: list[float], turn: Turn) -> tuple[list[list[int]], list[float]]:
        """What ``likeliest`` gave for each row, nothing where nobody learns, and the other figures."""
        if self._learner is None:
            return [], numbers
        rows, width = turn.count + 1, min(SUCCESSORS, self._target.vocabulary)
        likely = [[int(id) for id in numbers[row * width :][:width]] for row in range(rows)]
        return likely, numbers[rows * width :]

    def _send(self, numbers: list[float]) -> torch.Tensor:
        """``numbers`` (ids are exact) as float64 on the device, without waiting until they are there."""
        pinned = self._device.type == "cuda"
        return torch.tensor(numbers, dtype=torch.float64, pin_memory=pinned).to(
            self._device, non_blocking=True
        )

    def _certain(self, drafts: torch.Tensor) -> tuple[torch.Tensor, list[Rows], torch.Tensor | None]:
        """As ``_draft``, of drafts (count,) that were not drawn: q is 1 at each."""
        q = torch.zeros(len(drafts), self._target.vocabulary, device=self._device)
        q.scatter_(1, drafts[:, None], 1.0)
        usable = torch.ones(len(drafts), dtype=torch.bool, device=self._device)
        before = [] if self._seen is None else [self._seen]
        for index in range(len(drafts) if before else 0):
            before.append(before[-1].index_fill(0, drafts[index : index + 1], True))
        rows = [Rows(q, q, usable, usable.float())] if len(drafts) else []
        return drafts, rows, torch.stack(before) if before else None

    def _draft(
        self, ids: torch.Tensor, turn: Turn, draws: torch.Tensor
    ) -> tuple[torch.Tensor, list[Rows], torch.Tensor | None]:
        """``count`` drafts (count,), the rows each was drawn from (1, width), and the ids seen before each
        position of the block (count + 1, vocabulary), None where nothing asks for them.

        What follows a row that is not usable does not count and is drawn all the same.
        """
        drafts, rows = [ids.new_empty(0)], []
        before = [] if self._seen is None else [self._seen]
        for step in range(turn.count):
            drafter, head = turn.drafter, self._head
            readable = ids.masked_fill(ids >= drafter.model.readable_ids, 0)
            logits = drafter.model.device_logits(readable, turn.state)[-1:, : drafter.width]
            seen = None
            if before:
                seen = before[-1][: logits.shape[-1]] if head is None else before[-1].index_select(0, head)
            rows.append(distributions(logits, self._settings, seen))
            ids = draw(rows[-1].p, draws[step : step + 1])
            if head is not None:
                ids = head.index_select(0, ids)
            drafts.append(ids)
            if before:
                before.append(before[-1].index_fill(0, ids, True))
        return torch.cat(drafts), rows, torch.stack(before) if before else None

    def _wide(self, q: torch.Tensor, width: int, certain: bool) -> torch.Tensor:
        """The draft's probabilities (n, its width) over the target's ids, (n, width)."""
        if self._head is None or certain:
            return F.pad(q, (0, width - q.shape[-1]))
        return q.new_zeros(len(q), width).index_copy_(1, self._head, q)

    def _judge(
        self,
        raw: torch.Tensor,
        p: Rows,
        drafts: torch.Tensor,
        rows: list[Rows],
        draws: torch.Tensor,
        certain: bool,
    ) -> torch.Tensor:
        """Judges the block and packs its figures; ``raw`` (K + 1, width) are the target's logits."""
        k, width = len(drafts), raw.shape[-1]
        if rows:
            q = self._wide(torch.cat([row.p for row in rows]), width, certain)
            same = self._settings.temperature or certain
            soft = q if same else self._wide(torch.cat([row.soft for row in rows]), width, certain)
            usable = torch.cat([row.usable for row in rows])
        else:
            q = soft = raw.new_empty(0, width)
            usable = p.usable[:0]
        drafted = usable.long().cumprod(0).sum()
        judged = judge(p, q, drafts, drafted, draws, self._settings.verifier, certain)
        whole = raw.logsumexp(-1)
        own_row = judged.kept[None]
        own_logit = raw.index_select(0, own_row).gather(1, judged.own[:, None])[0]
        columns = {
            "id": drafts,
            "draft_usable": usable,
            "target_usable": p.usable,
            "largest": p.largest,
            "q": judged.q,
            "p": judged.p,
            "u": judged.u,
            "h": judged.h,
            "overlap": judged.overlap,
            "entropy_p": _entropy(p.p),
            "entropy_q": _entropy(q),
            "p_raw": (raw[:k].gather(1, drafts[:, None])[:, 0] - whole[:k]).exp(),
        }
        table = torch.stack(
            [F.pad(columns[name].double(), (0, k + 1 - len(columns[name]))) for name in _COLUMNS]
        )
        tops = [part for rows in (p.soft, F.pad(soft, (0, 0, 0, 1))) for part in _top(rows)]
        own = [own_row, judged.own, judged.own_p, judged.own_q, (own_logit - whole.gather(0, own_row)).exp()]
        return torch.cat([part.double().flatten() for part in (table.T, *tops, *own)])


def _entropy(p: torch.Tensor) -> torch.Tensor:
    """Shannon entropies in nats of rows (n, width): (n,) float64."""
    return -(p * p.clamp_min(_TINY).log()).sum(-1, dtype=torch.float64).clamp_max(0)


def _top(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and values of the most likely entries of each row, (n, TOP) or fewer."""
    values, ids = rows.topk(min(TOP, rows.shape[-1]))
    return ids, values


@dataclass(frozen=True, slots=True)
class _Round:
    """A round's figures on the host: ``table`` has a row for each position of the block, by column.

    Of the drafts ``drafted`` count, ``judged`` were held against the target and ``kept`` stand.
    """

    table: list[dict[str, object]]
    own: dict[str, float]
    drafted: int
    judged: int
    kept: int
    block: bool
    certain: bool

    @classmethod
    def unpacked(cls, numbers: list[float], count: int, block: bool, certain: bool) -> _Round:
        rows, columns = count + 1, len(_COLUMNS)
        end, start = len(numbers) - len(_OWN), rows * columns
        table = [dict(zip(_COLUMNS, numbers[row * columns :][:columns], strict=True)) for row in range(rows)]
        top = (end - start) // (4 * rows)

        def pairs(part: int, row: int) -> tuple[tuple[int, float], ...]:
            ids, values = (numbers[start + (rows * (part + n) + row) * top :][:top] for n in range(2))
            return tuple((int(i), value) for i, value in zip(ids, values, strict=True) if value > 0)

        for index, row in enumerate(table):
            row |= {"id": int(row["id"]), "top_p": pairs(0, index), "top_q": pairs(2, index)}
        drafted = _leading(row["draft_usable"] for row in table[:count])
        judged = min(drafted, _leading(row["target_usable"] for row in table[:count]))
        own = dict(zip(_OWN, numbers[end:], strict=True))
        return cls(table, own, drafted, judged, int(own["kept"]), block, certain)

    @property
    def used(self) -> int:
        """How many of the round's draws it took: one a draft that was drawn, one a test, one for the target's
        own token."""
        tested = self.judged if self.block else min(self.kept + 1, self.drafted)
        return (0 if self.certain else self.drafted) + tested + 1

    def verdicts(self) -> Iterator[Verdict]:
        """As ``core.rounds.Played`` has them."""
        kept, own = self.kept, self.own
        for position in range(min(kept + 1, self.judged)):
            row = self.table[position]
            fate = Fate.ACCEPTED if position < kept else Fate.REJECTED
            h = row["h"] if self.block else None
            outcome = Outcome(row["id"], fate, position, row["p"], row["q"], row["u"], row["overlap"], h)
            yield self._verdict(outcome, row["p_raw"])
        if kept < self.judged:
            fate, q = Fate.RESAMPLED, own["q"]
        elif self.table[kept]["target_usable"]:
            fate, q = Fate.BONUS if kept else Fate.PLAIN, None
        else:
            raise BadLogitsError(f"the largest logit is {self.table[kept]['largest']}")
        yield self._verdict(Outcome(int(own["id"]), fate, kept, own["p"], q), own["p_raw"])

    def _verdict(self, outcome: Outcome, p_raw: float) -> Verdict:
        names = ["entropy_p", "top_p"] if outcome.q is None else ["entropy_p", "top_p", "entropy_q", "top_q"]
        row = self.table[outcome.position]
        return Verdict(
            outcome, outcome_figures(outcome) | {name: row[name] for name in names} | {"p_raw": p_raw}
        )


def all_kept(length: int, id: int, count: int) -> torch.Tensor:
    """Figures (length,) of a round with ``count`` drafts of ``id`` that all stand, as ``Batched.launch`` has
    them: for rounds without numbers (``core.fake_card``)."""
    numbers, rows, columns = torch.ones(length, dtype=torch.float64), count + 1, len(_COLUMNS)
    start = length - len(_OWN) - rows * (columns + 4 * TOP)  # before it what a drafter learns from
    numbers[:start] = numbers[start : start + rows * columns : columns] = id
    numbers[-len(_OWN)] = count
    numbers[1 - len(_OWN)] = id
    return numbers


def _leading(usable: Iterable[float]) -> int:
    """How many come before the first that is not."""
    return sum(1 for _ in itertools.takewhile(bool, usable))


class _Clock:
    """When a device got to the places of a round that were marked, known once the round has ended there."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._marks = {"start": self._now()}

    def _now(self) -> float | torch.cuda.Event:
        if self._stream is None:
            return time.perf_counter()
        return self._stream.record_event(torch.cuda.Event(enable_timing=True))

    def mark(self, name: str) -> None:
        self._marks[name] = self._now()

    def seconds(self, *names: str) -> list[float]:
        """From each mark to the next, in the order of ``names``, from the start on."""
        marks = [self._marks[name] for name in ("start", *names)]
        if self._stream is not None:
            return [one.elapsed_time(other) / 1e3 for one, other in itertools.pairwise(marks)]
        return [other - one for one, other in itertools.pairwise(marks)]
