"""Training a draft on the target's own distributions, step by step, in a way that can be broken off and
resumed.

Loss: cross-entropy from the target's distribution at temperature 1 to the draft's, both over the ids the
draft's head scores, renormalised there; at the positions of replies alone. Matrices learn by Muon (Jordan et
al. 2024, here ``torch.optim.Muon``), the rest by AdamW; rates rise over the first steps and fall over the
second half. The head's rows are the target's and stay.

A checkpoint (``core.distill.checkpoint``) holds weights, both optimisers' state and the loss of every step so
far. Which chats a step takes follows from the seed and the step's number alone, so that a run that was killed
and resumed computes what an unbroken one does. A loss, gradient or weight that is not finite ends it. Knows
no files but its checkpoint.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from core.distill import checkpoint as checkpoints
from core.distill.checkpoint import Identity, TrainingError
from core.distill.evaluate import ROWS, guesses
from core.distill.kinds import Draft
from core.distill.lesson import Lessons
from core.distill.target import Target

MOMENTUM, DECAY = 0.95, 0.01  # of Muon
BETAS = (0.9, 0.95)  # of AdamW
CLIP = 1.0  # largest norm of all gradients together
LAST_RATE = 0.02  # of the rate, at the end


@dataclass(frozen=True)
class Plan:
    """``tokens`` is how many ids a step reads, about; rates are Muon's and AdamW's at their highest."""

    steps: int = 2000
    tokens: int = 1200
    rate: float = 0.01
    vector_rate: float = 0.001
    warm_up: int = 30
    seed: int = 0
    save_every: int = 100

    def share(self, step: int) -> float:
        """Of the rates, at a step (from 0)."""
        half = self.steps / 2
        falling = 1.0 if step < half else max(LAST_RATE, (self.steps - step) / (self.steps - half))
        return min(1.0, (step + 1) / self.warm_up) * falling


@dataclass
class State:
    """``losses`` of the steps done, nats a token of the first depth; ``tokens`` of replies they saw.

    ``rates`` is Muon's highest rate as asked for, and the step (from 0) from which on it was that.
    """

    losses: list[float]
    tokens: int
    rates: list[tuple[int, float]] = field(default_factory=list)


def train(
    draft: Draft,
    target: Target,
    head_ids: torch.Tensor,
    lessons: Lessons,
    plan: Plan,
    checkpoint: Path,
    after_step: Callable[[State], None] = lambda state: None,
    *,
    start: str | None = None,
    say: Callable[[str], object] = lambda sentence: None,
) -> State:
    """Trains ``draft`` in place, from ``checkpoint`` on where there is one of this very training.

    ``start`` is the fingerprint of the draft that it began with, None for fresh weights. ``after_step`` hears
    of every step, after a checkpoint is written where it is due; ``say`` what else there is to tell. Raises
    TrainingError.
    """
    optimisers = optimisers_of(draft, plan)
    state = State([], 0)
    what = identity(draft, target, head_ids, lessons, plan, start)
    _resume(checkpoint, what, draft, optimisers, state, say)
    if not state.rates or state.rates[-1][1] != plan.rate:
        state.rates.append((len(state.losses), plan.rate))
    head, saved = target.head[head_ids].contiguous(), len(state.losses)
    for chats in itertools.islice(_order(lessons, plan), len(state.losses), plan.steps):
        share = plan.share(len(state.losses))
        for optimiser, rate in zip(optimisers, (plan.rate, plan.vector_rate), strict=True):
            optimiser.param_groups[0]["lr"] = rate * share
        step = len(state.losses) + 1
        loss, tokens = _learn(draft, target, head, lessons, chats)
        norm = float(torch.nn.utils.clip_grad_norm_(draft.parameters(), CLIP))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise _not_finite("loss" if not math.isfinite(loss) else "gradient", step, checkpoint, saved)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        state.losses.append(loss)
        state.tokens += tokens
        if step % plan.save_every == 0 or step == plan.steps:
            if not checkpoints.finite(draft.state_dict()):
                raise _not_finite("weights", step, checkpoint, saved)
            _save(checkpoint, what, draft, optimisers, state)
            saved = step
        after_step(state)
    return state


def identity(
    draft: Draft, target: Target, head_ids: torch.Tensor, lessons: Lessons, plan: Plan, start: str | None
) -> Identity:
    """What may not change while a training goes on, by the name that people know it by."""
    ids = hashlib.sha256(head_ids.cpu().numpy().tobytes()).hexdigest()
    return {
        "--kind": draft.kind,
        "--layers": len(getattr(draft, "layers", ())),
        "--head-ids": len(head_ids),
        "--start": start,
        "--steps": plan.steps,
        "--tokens": plan.tokens,
        "--seed": plan.seed,
        "the warming up": plan.warm_up,
        "AdamW's rate": plan.vector_rate,
        "the target": (target.fingerprint,),  # in brackets: to be named, not shown
        "the text": (lessons.fingerprint,),
        "the choice of ids that the head scores": (ids,),
    }


def _not_finite(what: str, step: int, checkpoint: Path, saved: int) -> TrainingError:
    there = "There is no checkpoint yet"
    if saved:
        there = f"The checkpoint of step {saved} is kept in {checkpoint.parent}"
    verb = "are" if what == "weights" else "is"
    return TrainingError(
        f"Training stopped at step {step}, whose {what} {verb} not finite. {there}: give the same command "
        f"with a lower --rate to {'go on from there' if saved else 'begin anew'}."
    )


def _order(lessons: Lessons, plan: Plan) -> Iterator[list[int]]:
    """The chats of every step, without end."""
    for epoch in itertools.count():
        batches = lessons.epoch(plan.tokens, (plan.seed, epoch))
        if not batches:
            raise TrainingError("There is no reply to learn from: name text with --data or --synthesize.")
        yield from batches


def one_step(draft: Draft, target: Target, head_ids: torch.Tensor, lessons: Lessons, plan: Plan) -> None:
    """A step of ``draft`` on all ``lessons``, with optimisers of its own: to see what one takes."""
    _learn(draft, target, target.head[head_ids].contiguous(), lessons, list(range(len(lessons.lengths))))
    for optimiser in optimisers_of(draft, plan):
        optimiser.step()
        optimiser.zero_grad()


def _learn(
    draft: Draft, target: Target, head: torch.Tensor, lessons: Lessons, chats: list[int]
) -> tuple[float, int]:
    """Adds the gradients of these chats; gives the loss of the first depth and the tokens it is a mean over.

    The gradient behind the head is written out, q - p: taken a few rows at a time it stays in the
    processor's caches, which halves the time of a step.
    """
    batch = lessons.batch(chats, target)
    with target.autocast():
        made = guesses(draft, batch)
    count, total = int(batch.scored.sum()), 0.0
    with torch.no_grad():
        last = batch.features[:, :, -1][batch.scored]
        gradients = [torch.empty_like(guess) for guess, _ in made]
        for rows in torch.arange(count, device=last.device).split(ROWS):
            p = (last[rows] @ head.T).float().softmax(-1)
            for depth, ((guess, weight), gradient) in enumerate(zip(made, gradients, strict=True)):
                log_q = (guess[rows].to(head.dtype) @ head.T).float().log_softmax(-1)
                if depth == 0:
                    total -= float(torch.dot(p.flatten(), log_q.flatten()))
                difference = log_q.exp_().sub_(p).mul_(weight / count).to(head.dtype)
                gradient[rows] = (difference @ head).to(gradient.dtype)
    torch.autograd.backward([guess for guess, _ in made], gradients)
    return total / count, count


def check_torch() -> None:
    """Raises TrainingError where this torch cannot train."""
    if not hasattr(torch.optim, "Muon"):
        raise TrainingError(
            f"Training needs torch 2.9 or newer, and this is {torch.__version__}: install one with "
            "pip install -U torch."
        )


def optimisers_of(draft: Draft, plan: Plan) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon and AdamW, each with what it learns. Raises TrainingError."""
    check_torch()
    matrices = [weight for weight in draft.parameters() if weight.dim() == 2]
    vectors = [weight for weight in draft.parameters() if weight.dim() != 2]
    return (
        torch.optim.Muon(matrices, lr=plan.rate, momentum=MOMENTUM, weight_decay=DECAY),
        torch.optim.AdamW(vectors, lr=plan.vector_rate, betas=BETAS, weight_decay=0.0),
    )


def _save(path: Path, what: Identity, draft: Draft, optimisers, state: State) -> None:
    content = {
        "what": dict(what),
        "draft": draft.state_dict(),
        "losses": state.losses,
        "tokens": state.tokens,
    }
    content["rates"] = state.rates
    content["optimisers"] = [optimiser.state_dict() for optimiser in optimisers]
    checkpoints.save(path, content)


def _resume(path: Path, what: Identity, draft: Draft, optimisers, state: State, say) -> None:
    content = checkpoints.load(path, next(draft.parameters()).device, say)
    if content is None:
        return
    try:
        rates = [tuple(rate) for rate in content["rates"]]
        if others := checkpoints.differences(content["what"], what):
            raise TrainingError(
                f"The checkpoint {path} is of another training ({others}): repeat that command to finish "
                "it, or name another folder with --out."
            )
        draft.load_state_dict(content["draft"])
        for optimiser, kept in zip(optimisers, content["optimisers"], strict=True):
            optimiser.load_state_dict(kept)
        state.losses, state.tokens = content["losses"], content["tokens"]
        state.rates = rates
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainingError(
            f"The checkpoint {path} is of another version of Redline: name another folder with --out."
        ) from error
