"""From text to a draft's folder: what ``python -m core.distill`` does once it knows what is asked for.

Work under way lies in ``work/`` of the result's folder: two checkpoints, from which the same command goes
on, and the target's hidden states, which may be deleted afterwards. Whether there is room and memory
for all of it is asked before the target reads the text (``core.distill.needs``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from core.distill import needs
from core.distill.card import metadata, write_folder
from core.distill.checkpoint import TrainingError
from core.distill.corpus import Corpus
from core.distill.evaluate import Alpha, alpha
from core.distill.kinds import Draft, feature_layers, make_draft
from core.distill.lesson import Lessons, frequent_ids
from core.distill.target import Target, features, features_path, hidden_states
from core.distill.train import Plan, State, one_step, train
from core.machine.progress import Progress, silent
from core.pairs.draft_file import check_target, load_draft, load_metadata, pack, unpack

SAMPLE = 3  # held-out replies of each domain that a test measures again
WATCHED = 30  # of each domain, while training
LAYERS = {"model": 3, "eagle": 1, "medusa": 0}
HEAD_IDS = 16_384
CHECKPOINT = "checkpoint.pt"


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
    say: Callable[[str], object] = lambda sentence: None,
) -> tuple[State, dict[str, Alpha]]:
    """Trains, packs, measures and writes ``folder``; gives the losses and alpha by domain.

    ``held_out`` is measured on, in the place of what ``corpus`` holds out by its own rule. ``say`` is told
    what is to stay on the screen: what the training needs, and of damaged checkpoints. Raises TrainingError,
    LoadError, OSError.
    """
    train_on, kept = corpus.split()
    if not len(train_on):
        raise TrainingError("There is no text to learn from: name some with --data or --synthesize.")
    judged = kept if held_out is None else held_out
    work, layers = folder / "work", feature_layers(recipe.kind, target.shape.layers)
    draft, head_ids = begin(recipe, target, train_on, plan.seed)
    needed = ask(draft, head_ids, target, (train_on, judged), layers, plan, work, progress)
    say(f"Training needs {needed}; steps are {plan.steps:,} in all.")
    learned = Lessons(train_on, features(target, train_on, layers, work, progress))
    held = Lessons(judged, features(target, judged, layers, work, progress)) if len(judged) else None
    domains = [chat.domain(tokenizer) for chat in judged]

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

    start = None if recipe.start is None else load_metadata(recipe.start)["fingerprint"]
    state = train(draft, target, head_ids, learned, plan, work / CHECKPOINT, after_step, start=start, say=say)
    progress("Measuring", None)
    tensors = draft.tensors()
    # As it will run: what packing costs is in the figures.
    draft.take(unpack(pack(tensors)))
    found = alpha(draft, target, head_ids, held, domains) if held is not None else {}
    few = first_of_each(domains, SAMPLE)
    sample = alpha(draft, target, head_ids, *_chosen(held, domains, few)) if held is not None else {}
    said = f"{origin} {_how(train_on, recipe, plan, state)}"
    about = metadata(
        draft, target, said, licence, found, sample, by_rule=all(chat.held_out for chat in judged)
    )
    write_folder(folder, tensors, head_ids, about)
    return state, found


def ask(
    draft: Draft,
    head_ids: torch.Tensor,
    target: Target,
    corpora: Sequence[Corpus],
    layers: Sequence[int],
    plan: Plan,
    work: Path,
    progress: Progress = silent,
) -> needs.Needs:
    """What training on these corpora will need, from counts and from one measured step.

    Raises TrainingError where the disk or the memory has not so much.
    """
    missing = sum(
        len(corpus.ids)
        for corpus in corpora
        if len(corpus) and not features_path(target, corpus, layers, work).exists()
    )
    disk = needs.bytes_of_features(target, len(layers), missing) + needs.bytes_on_disk(
        draft, work / CHECKPOINT
    )
    needs.check_disk(work, disk)
    memory = needs.bytes_in_memory(draft, target, len(head_ids), len(layers), plan.tokens)
    needs.check_memory(target.device.type, memory)
    progress("Measuring a step", None)
    sample = _about(corpora[0], plan.tokens)
    read: list[torch.Tensor] = []

    def pass_of_target() -> int:
        for chat in sample:
            read.append(hidden_states(target, [chat.ids], layers)[0])
        return len(sample.ids)

    an_id, step = needs.measured(
        draft,
        pass_of_target,
        lambda other: one_step(other, target, head_ids, Lessons(sample, torch.cat(read)), plan),
    )
    return needs.Needs(disk, memory, an_id * missing, step)


def _about(corpus: Corpus, tokens: int) -> Corpus:
    """Chats with a reply, of about so many ids together."""
    chosen, ids = [], 0
    for chat in corpus:
        if ids >= tokens:
            break
        if len(chat.reply) and len(chat.ids) > 1:
            chosen.append(chat)
            ids += len(chat.ids)
    if not chosen:
        raise TrainingError("There is no reply to learn from: name text with --data or --synthesize.")
    return Corpus.of(chosen)


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
    (_, first), *later = state.rates
    rates = "".join(
        [f"Muon at {first:g}", *(f", from step {step + 1:,} on at {rate:g}" for step, rate in later)]
    )
    return (
        f"{len(corpus):,} chats, {corpus.reply_tokens:,} tokens of replies; {len(state.losses):,} steps "
        f"{began}, {state.tokens:,} reply tokens seen, {rates}, AdamW at {plan.vector_rate:g}, seed "
        f"{plan.seed}."
    )
