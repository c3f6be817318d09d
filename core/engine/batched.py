"""A round on the models' own device, with one wait for it: the way of a CUDA card (docs/ENGINE.md, rule 9).

The draws are made before the round and sent ahead. Drafts feed the next step as tensors; target pass,
verification and the target's own draw follow without a look at any of them; all that the record keeps comes
to the host as one tensor. The maths is that of ``core.verify.sampling``, over whole rows and for all
positions at once, in the same dtypes: one filter chain, q in float32, draws, ratios and residuals in float64.
Draws that a round turns out not to need are the next round's, so that a seed gives the reply
``core.engine.rounds`` gives, up to rounding.

Nothing here may make the host wait but the one transfer: no ``item``, no branch on a tensor, no mask that
chooses how many, no copy from memory that is not pinned. Shapes depend on K and on the length of the
text alone, as CUDA graphs will want them. Runs on CPU tensors as well, which is how it is tested.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress, pairwise

import torch
from torch.nn import functional as F

from core.drafters.auto import AutoDrafter, Both
from core.drafters.base import Drafter, Step
from core.drafters.names import TREE_DRAFTERS
from core.drafters.ngram import NgramDrafter
from core.drafters.recycling import SUCCESSORS, RecyclingDrafter, likeliest
from core.engine.device_figures import ChainRound, TreeRound, entropy, packed, unpacked
from core.engine.device_rule import Rows, distributions, judge
from core.engine.device_tree import Candidates, branch_rows, judge_tree, seen_along, seen_behind, siblings
from core.engine.reuse import Kept
from core.engine.rounds import Played, Uniform, tree_width
from core.models.base import Cache
from core.models.tree_walk import along_a_branch
from core.pairs.pair import Pair
from core.records import EXACT_VERIFIERS, Settings

CERTAIN = (NgramDrafter, RecyclingDrafter)  # draw nothing: what they propose is known before a round


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
        """Whether nothing is drawn to make the drafts; so also where there are none."""
        return self.known is not None or not self.count

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


@dataclass(frozen=True, slots=True)
class Drafts:
    """A round's drafts on the device, the places of a tree one position after the other: ``ids`` (n,), ``q``
    and ``soft`` (n, columns of the draft) as the ``Proposal`` of each has them, and which of them are
    ``usable`` (n,) bool: in a tree, which there are.

    ``taken`` () draws went into a tree's; None of a chain. ``seen`` (1 + n, vocabulary) bool are the ids
    before each row of the target, None where nothing asks for them.
    """

    ids: torch.Tensor
    q: torch.Tensor
    soft: torch.Tensor
    usable: torch.Tensor
    taken: torch.Tensor | None
    seen: torch.Tensor | None


class Batched:
    """Plays the rounds of one reply (``core.engine.rounds.Way``) on the device of the pair's models."""

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
    def suits(pair: Pair, verifier: str = "token") -> bool:
        """Whether all models are on one CUDA card and can be fed from there. Lossy rules go step by step."""
        if verifier not in EXACT_VERIFIERS:
            return False
        models, drafter = [pair.target], pair.drafter
        if isinstance(drafter, AutoDrafter):
            drafter = drafter.other
        if drafter is not None and not isinstance(drafter, CERTAIN):
            if not hasattr(drafter, "device_steps"):
                return False
            models += drafter.device_models
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
        tree = width > 1 and drafter.name in TREE_DRAFTERS
        if tree and isinstance(drafter, CERTAIN):
            positions = drafter.tree(ids, count, width, state)
            places = [id for found in positions for id in (*found, *[None] * (width - len(found)))]
            known, filled = [id or 0 for id in places], [id is not None for id in places]
            return Turn(drafter, state, len(positions), known, width if known else 1, filled, by_token=True)
        if isinstance(drafter, CERTAIN):
            known = drafter.chain(ids, count, state)
            return Turn(drafter, state, len(known), known)
        count = drafter.reach(ids, count)
        return Turn(drafter, state, count, width=width if tree and count else 1, by_token=tree)

    def launch(
        self, ids: Sequence[int], turn: Turn, caches: Kept, clock: _Clock | None = None
    ) -> torch.Tensor:
        """Starts a round on the device; its figures as one float64 tensor there
        (``core.engine.device_figures``).

        Waits for nothing, however far the device has got.
        """
        clock = clock or _Clock(self._device)
        unread = list(turn.drafter.unread(ids, turn.state)) if not turn.certain else []
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
            drafts = self._certain(known.long(), turn.width, filled)
        else:
            with turn.drafter.device_steps(ids, turn.count, turn.state, caches.cache) as step:
                drafts = self._drawn(step, unread.long(), turn, draws)
        clock.mark("drafted")
        block = torch.cat([last.long(), drafts.ids])
        if turn.width > 1:
            parents = along_a_branch(turn.count, turn.width)
            raw = self._target.device_tree_logits(block, parents, caches.cache)
        else:
            raw = self._target.device_logits(block, caches.cache)
        clock.mark("scored")
        seen = None if drafts.seen is None else drafts.seen[:, : raw.shape[-1]]
        figures = self._judge(raw, distributions(raw, self._settings, seen), drafts, draws, turn)
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

    def _certain(self, ids: torch.Tensor, width: int, filled: torch.Tensor) -> Drafts:
        """Drafts (n,) that were not drawn: q is 1 at each."""
        q = torch.zeros(len(ids), self._target.vocabulary, device=self._device)
        q.scatter_(1, ids[:, None], 1.0)
        usable = torch.ones(len(ids), dtype=torch.bool, device=self._device) if width == 1 else filled > 0
        seen = None if self._seen is None else seen_along(self._seen, ids, width)
        taken = None if width == 1 else torch.zeros((), dtype=torch.int64, device=self._device)
        return Drafts(ids, q, q, usable, taken, seen)

    def _drawn(self, step: Step, ids: torch.Tensor, turn: Turn, draws: torch.Tensor) -> Drafts:
        """Drafts by a drafter's steps, the first of which reads ``ids``.

        What follows a row that is not usable does not count and is drawn all the same.
        """
        found: list[Candidates] = []
        nodes, seen = [], [] if self._seen is None else [self._seen[None]]
        usable = taken = places = None  # of a tree
        if turn.width > 1:
            usable = torch.ones(1, dtype=torch.bool, device=self._device)
            taken = torch.zeros((), dtype=torch.int64, device=self._device)
            places = torch.arange(turn.width, device=self._device)
        for position in range(turn.count):
            logits, before = step(ids), None
            if seen:
                before = seen[-1][0]
                before = (
                    before[: logits.shape[-1]] if self._head is None else before.index_select(0, self._head)
                )
            row = distributions(logits, self._settings, before)
            if turn.width == 1:  # each position has its draw, whatever the one before was worth
                found.append(siblings(row, 1, draws[position : position + 1], False))
            else:
                usable = usable & row.usable
                at = draws.gather(0, taken + places)
                new = siblings(row, turn.width, at, self._settings.temperature == 0)
                found.append(replace(new, filled=new.filled & usable))
                taken = taken + new.drawn * usable[0]
            nodes.append(found[-1].ids)
            if self._head is not None:
                nodes[-1] = self._head.index_select(0, nodes[-1])
            if seen:
                seen.append(seen_behind(seen[-1], nodes[-1]))
            ids = nodes[-1][:1]
        return Drafts(
            torch.cat(nodes),
            torch.cat([new.q for new in found]),
            torch.cat([new.soft for new in found]),
            torch.cat([new.filled for new in found]),
            taken,
            torch.cat(seen) if seen else None,
        )

    def _wide(self, q: torch.Tensor, width: int, certain: bool) -> torch.Tensor:
        """The draft's probabilities (n, its width) over the target's ids, (n, width)."""
        if self._head is None or certain:
            return F.pad(q, (0, width - q.shape[-1]))
        return q.new_zeros(len(q), width).index_copy_(1, self._head, q)

    def _judge(
        self, raw: torch.Tensor, p: Rows, drafts: Drafts, draws: torch.Tensor, turn: Turn
    ) -> torch.Tensor:
        """Judges the drafts and packs a round's figures; ``raw`` (1 + drafts, width) are the target's
        logits."""
        q = self._wide(drafts.q, raw.shape[-1], turn.certain)
        same = drafts.soft is drafts.q or self._settings.temperature
        soft = q if same else self._wide(drafts.soft, raw.shape[-1], turn.certain)
        if turn.width > 1:
            judged = judge_tree(p, q, drafts.ids, drafts.usable, draws, drafts.taken, turn.width)
            row, h = judged.row, torch.zeros_like(judged.u)
        else:
            drafted = drafts.usable.long().cumprod(0).sum()
            rule = "token" if turn.by_token else self._settings.verifier
            judged = judge(p, q, drafts.ids, drafted, draws, rule, turn.certain)
            row, h = judged.kept[None], judged.h
        whole, before = raw.logsumexp(-1), branch_rows(raw, turn.width)[: turn.count]
        asked = before.gather(1, drafts.ids.view(turn.count, turn.width))
        p_raw = (asked - branch_rows(whole, turn.width)[: turn.count, None]).exp().flatten()
        own_logit = raw.index_select(0, row).gather(1, judged.own[:, None])[0]
        columns = {
            "id": drafts.ids,
            "draft_usable": drafts.usable,
            "target_usable": p.usable,
            "largest": p.largest,
            "q": judged.q,
            "p": judged.p,
            "u": judged.u,
            "h": h,
            "overlap": judged.overlap,
            "entropy_p": entropy(p.p),
            "entropy_q": entropy(q),
            "p_raw": p_raw,
        }
        own = [row, judged.own, judged.own_p, judged.own_q, (own_logit - whole.gather(0, row)).exp()]
        return packed(columns, p.soft, soft, own)


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
