"""From text to a draft's folder: what ``python -m core.distill`` does once it knows what is asked for.

Work under way lies in ``work/`` of the result's folder: the checkpoint, from which the same command goes
on, and the target's hidden states, which may be deleted afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from core.distill.card import metadata, write_folder
from core.distill.corpus import Corpus
from core.distill.evaluate import Alpha, alpha
from core.distill.kinds import Draft, feature_layers, make_draft
from core.distill.lesson import Lessons, frequent_ids
from core.distill.target import Target, features
from core.distill.train import Plan, State, TrainingError, train
from core.models import Progress, silent
from core.models.draft_file import check_target, load_draft, pack, unpack

SAMPLE = 3  # held-out replies of each domain that a test measures again
WATCHED = 30  # of each domain, while training
LAYERS = {"model": 3, "eagle": 1, "medusa": 0}
HEAD_IDS = 16_384


@dataclass(frozen=True)
class Recipe:
    """``start`` is a draft to begin with in place of fresh weights; ``check_every`` steps alpha is
    measured."""

    kind: str
    layers: int
    head_ids: int = HEAD_IDS
    start: Path | None = None
    check_every: int = 250


def distill(
    target: Target,
    tokenizer,
    corpus: Corpus,
    held_out: Corpus | None,
    recipe: Recipe,
    plan: Plan,
    folder: Path,
    origin: str,
    licence: str,
    progress: Progress = silent,
) -> tuple[State, dict[str, Alpha]]:
    """Trains, packs, measures and writes ``folder``; gives the losses and alpha by domain.

    ``held_out`` is measured on, beside what ``corpus`` holds out by its own rule. Raises TrainingError,
    LoadError.
    """
    train_on, kept = corpus.split()
    if not len(train_on):
        raise TrainingError("There is no text to learn from: name some with --data or --synthesize.")
    judged = kept if held_out is None else held_out
    work, layers = folder / "work", feature_layers(recipe.kind, target.shape.layers)
    learned = Lessons(train_on, features(target, train_on, layers, work, progress))
    held = Lessons(judged, features(target, judged, layers, work, progress)) if len(judged) else None
    domains = [chat.domain(tokenizer) for chat in judged]
    draft, head_ids = begin(recipe, target, train_on, plan.seed)

    watched = first_of_each(domains, WATCHED)
    shown = ""

    def after_step(state: State) -> None:
        nonlocal shown
        done = len(state.losses)
        if held is not None and (done % recipe.check_every == 0 or done == plan.steps):
            few = alpha(draft, target, head_ids, *_chosen(held, domains, watched))
            shown = "".join(f", α {domain} {one.by_depth[0]:.3f}" for domain, one in few.items())
            line = {domain: one.by_depth for domain, one in few.items()}
            with open(work / "curve.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": done, "tokens": state.tokens, "alpha": line}) + "\n")
        if done % 10 == 0 or done == plan.steps:
            loss = sum(state.losses[-10:]) / len(state.losses[-10:])
            progress(f"Training: step {done} of {plan.steps}, loss {loss:.3f}{shown}", done / plan.steps)

    state = train(draft, target, head_ids, learned, plan, work / "checkpoint.pt", after_step)
    progress("Measuring", None)
    tensors = draft.tensors()
    # As it will run: what packing costs is in the figures.
    draft.take(unpack(pack(tensors)))
    found = alpha(draft, target, head_ids, held, domains) if held is not None else {}
    few = first_of_each(domains, SAMPLE)
    sample = alpha(draft, target, head_ids, *_chosen(held, domains, few)) if held is not None else {}
    about = metadata(draft, target, f"{origin} {_how(train_on, recipe, plan, state)}", licence, found, sample)
    write_folder(folder, tensors, head_ids, about)
    return state, found


def begin(recipe: Recipe, target: Target, corpus: Corpus, seed: int) -> tuple[Draft, torch.Tensor]:
    """The draft before its first step, and the ids its head scores."""
    torch.manual_seed(seed)
    kinds = len(feature_layers(recipe.kind, target.shape.layers))
    draft = make_draft(recipe.kind, target.shape, target.embedding, recipe.layers, target.inner, kinds)
    if recipe.start is None:
        draft.begin(target.model.state_dict())
        return draft.to(target.device), frequent_ids(corpus, target, recipe.head_ids)
    start = load_draft(recipe.start)
    check_target(start.metadata, target.name, target.embedding)
    try:
        draft.take(start.tensors)
    except (RuntimeError, KeyError) as error:
        raise TrainingError(
            f"The draft {recipe.start} is of kind {start.kind} with {start.layers} layers: ask for those to "
            "go on with it."
        ) from error
    return draft.to(target.device), start.head_ids


def first_of_each(domains: Sequence[str], count: int) -> list[int]:
    """The first ``count`` chats of each domain."""
    return [n for n, domain in enumerate(domains) if list(domains[:n]).count(domain) < count]


def _chosen(lessons: Lessons, domains: Sequence[str], chats: Sequence[int]) -> tuple[Lessons, list[str]]:
    return lessons.only(chats), [domains[chat] for chat in chats]


def _how(corpus: Corpus, recipe: Recipe, plan: Plan, state: State) -> str:
    began = "from a draft made before" if recipe.start else "from scratch"
    return (
        f"{len(corpus):,} chats, {corpus.reply_tokens:,} tokens of replies; {plan.steps:,} steps {began}, "
        f"{state.tokens:,} reply tokens seen, Muon at {plan.rate:g} and AdamW at {plan.vector_rate:g}, seed "
        f"{plan.seed}."
    )
