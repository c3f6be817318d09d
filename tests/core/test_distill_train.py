from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.distill.__main__ import main
from core.distill.evaluate import guesses
from core.distill.lesson import frequent_ids
from core.distill.run import LAYERS, Recipe, begin
from core.distill.train import Plan, TrainingError, _learn, train
from core.pairs.draft_file import KINDS
from tests.core.distill_toys import VOCABULARY, needs_muon, toy_corpus, toy_lessons, toy_target

PLAN = Plan(steps=20, tokens=60, warm_up=3, save_every=4)


class Killed(Exception):
    pass


def run(kind: str, folder: Path, plan: Plan = PLAN, kill_at: int | None = None):
    """The draft and state at the end of a training, or of what a killed one got to."""
    target, corpus = toy_target(), toy_corpus()
    lessons = toy_lessons(target, corpus, kind, folder)
    draft, ids = begin(Recipe(kind, LAYERS[kind], 40), target, corpus, plan.seed)

    def after_step(state) -> None:
        if len(state.losses) == kill_at:
            raise Killed

    return draft, train(draft, target, ids, lessons, plan, folder / "checkpoint.pt", after_step)


@needs_muon
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_training_ends_as_an_unbroken_one(kind, tmp_path):
    whole, unbroken = run(kind, tmp_path / "whole")
    for kill_at in (10, 15):  # between two checkpoints, and again
        with pytest.raises(Killed):
            run(kind, tmp_path / "broken", kill_at=kill_at)
    resumed, state = run(kind, tmp_path / "broken")
    assert len(state.losses) == 20 and state == unbroken
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name
    assert sum(state.losses[-5:]) < sum(state.losses[:5]) - 0.1  # and it learned


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_loss(kind, tmp_path):
    target, corpus = toy_target(), toy_corpus(5)
    lessons = toy_lessons(target, corpus, kind, tmp_path)
    draft, ids = begin(Recipe(kind, LAYERS[kind], 40), target, corpus, 0)
    chats, head = [0, 1, 2, 3, 4], target.head[ids]
    reported, tokens = _learn(draft, target, head, lessons, chats)
    written = {name: weight.grad.clone() for name, weight in draft.named_parameters()}
    draft.zero_grad()
    batch = lessons.batch(chats, target)
    p = (batch.features[:, :, -1][batch.scored] @ head.T).softmax(-1)
    losses = [
        -weight * (p * (guess @ head.T).log_softmax(-1)).sum(-1).mean()
        for guess, weight in guesses(draft, batch)
    ]
    sum(losses).backward()
    assert tokens == int(batch.scored.sum()) == int(lessons.replies.sum())
    assert reported == pytest.approx(losses[0].item(), rel=1e-4)
    assert any(gradient.abs().max() > 1e-3 for gradient in written.values())
    for name, weight in draft.named_parameters():
        torch.testing.assert_close(written[name], weight.grad, rtol=1e-3, atol=1e-5)


@needs_muon
def test_a_checkpoint_of_another_training_or_a_damaged_one_is_refused_in_words(tmp_path):
    run("medusa", tmp_path, replace(PLAN, steps=4))
    with pytest.raises(TrainingError, match="is of another training .*--out"):
        run("medusa", tmp_path)
    (tmp_path / "checkpoint.pt").write_bytes(b"no checkpoint")
    with pytest.raises(TrainingError, match="is damaged: delete it"):
        run("medusa", tmp_path)


def test_a_torch_without_muon_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    out = tmp_path / "draft"
    sentence = rf"needs torch 2\.9 or newer, and this is {re.escape(torch.__version__)}: .*pip install -U"
    with pytest.raises(SystemExit, match=sentence):
        main(["--kind", "eagle", "--synthesize", "4", "--out", str(out)])
    assert not out.exists()
    with pytest.raises(TrainingError, match=sentence):
        run("medusa", tmp_path)


def test_rates_rise_stay_and_fall():
    shares = [Plan(steps=100, warm_up=10).share(step) for step in (0, 4, 9, 30, 49, 75, 99)]
    assert shares == pytest.approx([0.1, 0.5, 1, 1, 1, 0.5, 0.02])


def test_an_epoch_takes_every_chat_once_in_batches_of_like_length(tmp_path):
    target = toy_target()
    lessons = toy_lessons(target, toy_corpus(60), "medusa", tmp_path)
    epochs = [lessons.epoch(100, (0, number)) for number in (0, 0, 1)]
    assert epochs[0] == epochs[1] != epochs[2]
    assert sorted(chat for batch in epochs[0] for chat in batch) == list(range(60))
    sizes = sorted(sum(lessons.lengths[batch]) for batch in epochs[0])
    assert 60 < sizes[1] and sizes[-1] < 180 and len(sizes) < 20  # the last of an epoch may be small
    batch = lessons.batch([3, 1], target)
    assert batch.scored.sum(1).tolist() == lessons.replies[[3, 1]].tolist()
    assert batch.scored[0].nonzero()[0].item() == 3  # the prompt's last id, which predicts the reply's first


@needs_muon
def test_a_text_without_replies_is_refused_in_words(tmp_path):
    corpus = toy_corpus(3)
    target = toy_target()
    bare = replace(corpus, prompt_len=(corpus.offsets[1:] - corpus.offsets[:-1]).astype("int32"))
    lessons = toy_lessons(target, bare, "medusa", tmp_path)
    draft, ids = begin(Recipe("medusa", 0, 40), target, corpus, 0)
    with pytest.raises(TrainingError, match="no reply to learn from"):
        train(draft, target, ids, lessons, PLAN, tmp_path / "checkpoint.pt")


def test_the_head_scores_what_replies_hold_most_often():
    corpus = toy_corpus(40)
    counts = torch.zeros(VOCABULARY)
    for chat in corpus:
        for id in chat.reply:
            counts[int(id)] += 1
    ids = frequent_ids(corpus, toy_target(), 20)
    left = [id for id in range(VOCABULARY) if id not in ids.tolist()]
    assert len(ids) == 20 and ids.tolist() == sorted(ids.tolist())
    assert counts[ids].min() >= counts[left].max()
    assert frequent_ids(corpus, toy_target(), 10**6).tolist() == list(range(VOCABULARY))
