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

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, pairwise

import torch
from torch.nn import functional as F

from core.device_figures import COLUMNS, ChainRound, TreeRound, unpacked
from core.device_rule import Rows, distributions, draw, judge
from core.device_tree import branch_rows, judge_tree, seen_along
from core.drafters.auto import AutoDrafter, Both
from core.drafters.base import Drafter
from core.drafters.model import ModelDrafter
from core.drafters.names import TREE_DRAFTERS
from core.drafters.ngram import NgramDrafter
from core.drafters.recycling import SUCCESSORS, RecyclingDrafter, likeliest
from core.models.base import Cache
from core.models.pair import Pair
from core.models.rows import along_a_branch
from core.records import EXACT_VERIFIERS, Settings
from core.reuse import Kept
from core.rounds import Played, Uniform, tree_width
from core.sampling import TOP

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
class Turn:
    """``count`` positions to draft for by ``drafter``, whose own ``state`` is given; ``known`` are the ids of
    the drafts where they are certain, and so known before anything runs.

    ``width`` is how many places for candidates a position has; of a tree that is known ``filled`` says which
    there are. ``by_token`` where the drafts are judged token by token whatever exact rule is set.
    """

    drafter: Drafter | None
    state: Cache | None
    count: int
    known: list[int] | None = None
    width: int = 1
    filled: list[bool] | None = None
    by_token: bool = False

    @property
    def certain(self) -> bool:
        return self.known is not None

    @property
    def drafts(self) -> int:
        """How many places there are for drafts."""
        return self.count * self.width

    @property
    def most_draws(self) -> int:
        """How many draws the round may take: one a draft that is drawn, one a test, one for the target's own
        token. On one way through a tree all candidates of a position are tried once at most."""
        tests = self.count + self.width - 1 if self.count else 0
        return (0 if self.certain else self.drafts) + tests + 1


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
        round_ = self._round(numbers, turn)
        self._draws.use(round_.used)
        if learnt and count:
            state = caches.state(self._drafter)
            its = state.state if isinstance(state, Both) else state
            block = [ids[-1], *(row["id"] for row in round_.table[: turn.drafts])]
            there = [True, *(turn.filled or [True] * turn.drafts)]
            self._learner.learn(list(compress(block, there)), list(compress(learnt, there)), its)
        return Played(round_.drafts, round_.verdicts(), *clock.seconds("drafted", "scored"), rows=round_.rows)

    def turn(self, ids: Sequence[int], count: int, caches: Kept) -> Turn:
        """Who drafts in this round, and what is known of the drafts before it."""
        if not count:
            return Turn(None, None, 0)
        drafter, state = self._drafter, caches.state(self._drafter)
        width = tree_width(self._settings, self._target, count, caches.cache)
        if isinstance(drafter, AutoDrafter):
            drafter, state, count = drafter.turn(ids, count, state)
        if width > 1 and drafter.name in TREE_DRAFTERS:
            positions = drafter.tree(ids, count, width, state)
            width = max(map(len, positions), default=1)
            places = [(*found, *[None] * (width - len(found))) for found in positions]
            known = [id for found in places for id in found]
            filled = [id is not None for id in known]
            return Turn(
                drafter, state, len(positions), [id or 0 for id in known], width, filled, by_token=True
            )
        if isinstance(drafter, CERTAIN):
            known = drafter.chain(ids, count, state)
            return Turn(drafter, state, len(known), known)
        return Turn(drafter, state, count)

    def launch(
        self, ids: Sequence[int], turn: Turn, caches: Kept, clock: _Clock | None = None
    ) -> torch.Tensor:
        """Starts a round on the device; its figures as one float64 tensor there (``core.device_figures``).

        Waits for nothing, however far the device has got.
        """
        clock = clock or _Clock(self._device)
        unread = list(ids[turn.state.length :]) if turn.count and not turn.certain else []
        unmarked = list(ids[self._marked :]) if self._seen is not None else []
        known = turn.known or []
        filled = turn.filled or []
        ahead = self._draws.peek(turn.most_draws)
        parts = unread, unmarked, known, filled, [ids[-1]], ahead
        sent = self._send([number for part in parts for number in part])
        unread, unmarked, known, filled, last, draws = sent.split([len(part) for part in parts])
        if self._seen is not None:
            self._seen.index_fill_(0, unmarked.long(), True)
            self._marked = len(ids)
        if turn.certain:
            drafts, qs, seen = self._certain(known.long(), turn.width, filled)
        else:
            drafts, qs, seen = self._draft(unread.long(), turn, draws)
        clock.mark("drafted")
        block = torch.cat([last.long(), drafts])
        if turn.width > 1:
            parents = along_a_branch(turn.count, turn.width)
            raw = self._target.device_tree_logits(block, parents, caches.cache)
        else:
            raw = self._target.device_logits(block, caches.cache)
        clock.mark("scored")
        if seen is not None:
            seen = seen[:, : raw.shape[-1]]
        p = distributions(raw, self._settings, seen)
        figures = self._judge(raw, p, drafts, qs, draws, turn)
        if self._learner is None:
            return figures
        return torch.cat([likeliest(raw).double().flatten(), figures])

    def _unpacked(self, numbers: list[float], turn: Turn) -> tuple[list[list[int]], list[float]]:
        """What ``likeliest`` gave for each row, nothing where nobody learns, and the other figures."""
        if self._learner is None:
            return [], numbers
        rows, width = turn.drafts + 1, min(SUCCESSORS, self._target.vocabulary)
        likely = [[int(id) for id in numbers[row * width :][:width]] for row in range(rows)]
        return likely, numbers[rows * width :]

    def _send(self, numbers: list[float]) -> torch.Tensor:
        """``numbers`` (ids are exact) as float64 on the device, without waiting until they are there."""
        pinned = self._device.type == "cuda"
        return torch.tensor(numbers, dtype=torch.float64, pin_memory=pinned).to(
            self._device, non_blocking=True
        )

    def _round(self, numbers: list[float], turn: Turn) -> ChainRound | TreeRound:
        """A round's figures on the host."""
        if turn.width > 1:
            drawn = "none" if turn.certain else "first" if self._settings.temperature == 0 else "all"
            return TreeRound(*unpacked(numbers, turn.drafts + 1), turn.width, drawn)
        block = self._settings.verifier == "block" and not turn.by_token
        return ChainRound.unpacked(numbers, turn.count, block, turn.certain)

    def _certain(
        self, drafts: torch.Tensor, width: int, filled: torch.Tensor
    ) -> tuple[torch.Tensor, list[Rows], torch.Tensor | None]:
        """As ``_draft``, of drafts (count,) that were not drawn: q is 1 at each."""
        q = torch.zeros(len(drafts), self._target.vocabulary, device=self._device)
        q.scatter_(1, drafts[:, None], 1.0)
        usable = torch.ones(len(drafts), dtype=torch.bool, device=self._device) if width == 1 else filled > 0
        rows = [Rows(q, q, usable, usable.float())] if len(drafts) else []
        return drafts, rows, None if self._seen is None else seen_along(self._seen, drafts, width)

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
        turn: Turn,
    ) -> torch.Tensor:
        """Judges the block and packs its figures; ``raw`` (K + 1, width) are the target's logits."""
        k, width, certain = len(drafts), raw.shape[-1], turn.certain
        if rows:
            q = self._wide(torch.cat([row.p for row in rows]), width, certain)
            same = self._settings.temperature or certain
            soft = q if same else self._wide(torch.cat([row.soft for row in rows]), width, certain)
            usable = torch.cat([row.usable for row in rows])
        else:
            q = soft = raw.new_empty(0, width)
            usable = p.usable[:0]
        if turn.width > 1:
            taken = torch.zeros((), dtype=torch.int64, device=raw.device)
            judged = judge_tree(p, q, drafts, usable, draws, taken, turn.width)
            own_row, h = judged.row, torch.zeros_like(judged.u)
        else:
            drafted = usable.long().cumprod(0).sum()
            rule = "token" if turn.by_token else self._settings.verifier
            judged = judge(p, q, drafts, drafted, draws, rule, certain)
            own_row, h = judged.kept[None], judged.h
        whole, before = raw.logsumexp(-1), branch_rows(raw, turn.width)[: turn.count]
        asked = before.gather(1, drafts.view(turn.count, turn.width))
        p_raw = (asked - branch_rows(whole, turn.width)[: turn.count, None]).exp().flatten()
        own_logit = raw.index_select(0, own_row).gather(1, judged.own[:, None])[0]
        columns = {
            "id": drafts,
            "draft_usable": usable,
            "target_usable": p.usable,
            "largest": p.largest,
            "q": judged.q,
            "p": judged.p,
            "u": judged.u,
            "h": h,
            "overlap": judged.overlap,
            "entropy_p": _entropy(p.p),
            "entropy_q": _entropy(q),
            "p_raw": p_raw,
        }
        table = torch.stack(
            [F.pad(columns[name].double(), (0, k + 1 - len(columns[name]))) for name in COLUMNS]
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
            return [one.elapsed_time(other) / 1e3 for one, other in pairwise(marks)]
        return [other - one for one, other in pairwise(marks)]
