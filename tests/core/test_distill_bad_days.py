"""Cases NX-10, NX-11, NX-12 and NX-25: a training whose disk, memory, numbers or settings go wrong."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.distill import checkpoint, files, needs
from core.distill import train as train_module
from core.distill.__main__ import main
from core.distill.checkpoint import TrainingError, before
from core.distill.lesson import Lessons
from core.distill.run import LAYERS, Recipe, ask, begin, distill
from core.distill.target import features
from core.distill.train import Plan, train
from tests.core.distill_toys import command, needs_muon, toy_corpus, toy_lessons, toy_target, write_training
from tests.core.models_on_disk import tokenizer
from tests.core.record.test_deletion import fill, small_disk  # noqa: F401 - a fixture

pytestmark = needs_muon
PLAN = Plan(steps=20, tokens=60, warm_up=3, save_every=5)


class Killed(Exception):
    pass


def run(folder: Path, plan: Plan = PLAN, kind: str = "medusa", kill_at: int | None = None, **more):
    target, corpus = toy_target(), toy_corpus()
    lessons = toy_lessons(target, corpus, kind, folder)
    draft, ids = begin(
        Recipe(kind, more.pop("layers", LAYERS[kind]), more.pop("head", 40)), target, corpus, plan.seed
    )

    def after_step(state) -> None:
        if len(state.losses) == kill_at:
            raise Killed

    return draft, train(draft, target, ids, lessons, plan, folder / "checkpoint.pt", after_step, **more)


def killed(folder: Path, at: int, **more) -> None:
    with pytest.raises(Killed):
        run(folder, kill_at=at, **more)


def steps(path: Path) -> int:
    return len(torch.load(path, weights_only=True)["losses"])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith("features")}


# --- NX-12: numbers that are none


@pytest.mark.parametrize("what", ["loss", "gradient", "weights"])
def test_nx_12_what_is_not_finite_stops_and_leaves_the_last_good_checkpoint(tmp_path, monkeypatch, what):
    killed(tmp_path, 6)
    before_it = contents(tmp_path)
    learn, steps_done = train_module._learn, 5

    def broken(draft, *given):
        nonlocal steps_done
        steps_done += 1
        loss, tokens = learn(draft, *given)
        if what == "weights":  # by the very step before a checkpoint: no loss has shown it yet
            if steps_done == 10:
                next(draft.parameters()).data.view(-1)[0] = torch.nan
            return loss, tokens
        if what == "gradient":
            next(draft.parameters()).grad.view(-1)[0] = torch.inf
            return loss, tokens
        return float("nan"), tokens

    monkeypatch.setattr(train_module, "_learn", broken)
    with pytest.raises(TrainingError) as caught:
        run(tmp_path)
    said = str(caught.value)
    at = {
        "loss": "step 6, whose loss is",
        "gradient": "step 6, whose gradient is",
        "weights": "step 10, whose weights are",
    }[what]
    assert at in said and "not finite" in said and "The checkpoint of step 5 is kept" in said
    assert said.endswith("give the same command with a lower --rate to go on from there.")
    assert contents(tmp_path) == before_it
    monkeypatch.undo()
    _, state = run(tmp_path, replace(PLAN, rate=0.001))  # as the sentence says
    assert len(state.losses) == 20 and state.rates == [(0, 0.01), (5, 0.001)]


def test_nx_12_the_command_with_a_rate_beyond_all_bounds_writes_no_draft(here, capsys):
    with pytest.raises(SystemExit, match=r"not finite\. .*lower --rate"):
        main(command(here, "wild", "--rate", "1e30"))
    assert not (here / "wild" / "draft.safetensors").exists() and not (here / "wild" / "config.json").exists()
    for rate in ("nan", "inf", "0", "-1"):
        with pytest.raises(SystemExit):
            main(command(here, "never", f"--rate={rate}"))
        assert "--rate is a number above 0" in capsys.readouterr().err


# --- NX-11: what may change, and what not


def test_nx_11_another_shape_or_text_is_named(tmp_path):
    killed(tmp_path, 10, kind="model", layers=1)
    before_it = contents(tmp_path)
    for change, said in (
        ({"layers": 2}, "--layers was 1 and is 2"),
        ({"head": 30}, "--head-ids was 40 and is 30"),
        ({"start": "ab12"}, "--start was not given and is ab12"),
        ({"plan": replace(PLAN, steps=30)}, "--steps was 20 and is 30"),
        ({"plan": replace(PLAN, seed=1)}, "--seed was 0 and is 1"),
        ({"plan": replace(PLAN, tokens=90)}, "--tokens was 60 and is 90"),
    ):
        with pytest.raises(TrainingError) as caught:
            run(tmp_path, **{"kind": "model", "layers": 1, **change})
        assert "is of another training (" in str(caught.value) and said in str(caught.value)
        assert "name another folder with --out" in str(caught.value)
    assert contents(tmp_path) == before_it


def test_nx_11_another_text_of_the_same_length_is_named(tmp_path):
    killed(tmp_path, 5)
    target, corpus = toy_target(), toy_corpus()
    other = replace(corpus, ids=corpus.ids[::-1].copy())
    lessons = toy_lessons(target, other, "medusa", tmp_path)
    draft, ids = begin(Recipe("medusa", 0, 40), target, corpus, 0)
    with pytest.raises(TrainingError, match=r"another training \(the text differs\)"):
        train(draft, target, ids, lessons, PLAN, tmp_path / "checkpoint.pt")


def test_nx_11_what_may_change_goes_on(tmp_path):
    killed(tmp_path, 10)
    _, state = run(tmp_path, replace(PLAN, save_every=10))
    _, unbroken = run(tmp_path / "whole")
    assert state == unbroken


def test_nx_11_the_card_says_what_was_done(tmp_path):
    target, encoder = toy_target(), tokenizer()
    recipe = Recipe("medusa", 0, 40)
    arguments = (target, encoder, toy_corpus(60), None, recipe)
    killed_at = []

    def say_and_stop(sentence, fraction):
        if sentence.startswith("Training: step 10"):
            killed_at.append(10)
            raise Killed

    with pytest.raises(Killed):
        distill(*arguments, PLAN, tmp_path, "Toys.", "Free.", say_and_stop)
    said = []
    distill(*arguments, replace(PLAN, rate=0.002), tmp_path, "Toys.", "Free.", say=said.append)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "20 steps from scratch" in card and "Muon at 0.01, from step 11 on at 0.002" in card
    assert "multiple of 17; none of them was trained on" in card
    assert said[0].startswith("Training needs about ") and " a step; steps are 20 in all." in said[0]
    apart = tmp_path / "apart"
    distill(target, encoder, toy_corpus(30), toy_corpus(5, seed=9), recipe, PLAN, apart, "Toys.", "Free.")
    card = (apart / "README.md").read_text(encoding="utf-8")
    assert "chats of a file of their own" in card and "none of them was trained on" not in card


# --- NX-25: checkpoints


def test_nx_25_two_generations_and_each_is_flushed_before_it_is_named(tmp_path, monkeypatch):
    done = []
    replace_, fsync = os.replace, os.fsync

    def noted(name, call):
        def wrapper(*given):
            where = os.readlink(f"/proc/self/fd/{given[0]}") if name == "fsync" else str(given[1])
            done.append((name, Path(where).name))
            return call(*given)

        return wrapper

    run(tmp_path, replace(PLAN, steps=5))
    path = tmp_path / "checkpoint.pt"
    content = torch.load(path, weights_only=True)
    monkeypatch.setattr(os, "replace", noted("replace", replace_))
    if sys.platform == "linux":
        monkeypatch.setattr(os, "fsync", noted("fsync", fsync))
    checkpoint.save(path, {**content, "losses": [1.0] * 10})
    assert (steps(path), steps(before(path))) == (10, 5)
    if sys.platform == "linux":
        assert done == [
            ("fsync", "checkpoint.pt.new.part"),
            ("replace", "checkpoint.pt.new"),
            ("fsync", tmp_path.name),
            ("replace", "checkpoint-before.pt"),
            ("replace", "checkpoint.pt"),
            ("fsync", tmp_path.name),
        ]


@pytest.mark.parametrize("damage", ["empty", "cut", "not finite", "another file", "gone"])
def test_nx_25_after_a_damaged_checkpoint_the_one_before_is_tried(tmp_path, damage):
    killed(tmp_path, 12)  # checkpoints of 5 and 10
    path = tmp_path / "checkpoint.pt"
    if damage == "gone":  # a power cut between two renames
        path.unlink()
    elif damage == "not finite":
        content = torch.load(path, weights_only=True)
        next(iter(content["draft"].values())).fill_(torch.nan)
        torch.save(content, path)
    else:
        whole = path.read_bytes()
        path.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "another file": b"a letter"}[damage])
    said = []
    _, state = run(tmp_path, say=said.append)
    _, unbroken = run(tmp_path / "whole")
    assert state == unbroken and (steps(path), steps(before(path))) == (20, 15)
    assert bool(said) == (damage != "gone") and all(
        "damaged: going on from the one before" in s for s in said
    )


def test_nx_25_where_both_are_damaged_a_sentence_names_them(tmp_path):
    killed(tmp_path, 12)
    for path in (tmp_path / "checkpoint.pt", before(tmp_path / "checkpoint.pt")):
        path.write_bytes(b"")
    with pytest.raises(
        TrainingError, match=r"checkpoint\.pt and .*checkpoint-before\.pt is damaged: delete it"
    ):
        run(tmp_path)


@pytest.mark.parametrize("fails_at", ["open", "write", "fsync", "replace"])
def test_nx_25_a_checkpoint_that_cannot_be_written_leaves_those_that_are_there(
    tmp_path, monkeypatch, fails_at
):
    killed(tmp_path, 11)
    before_it = contents(tmp_path)

    def full(*given, **named):
        raise OSError(28, "No space left on device")

    if fails_at == "write":
        save = torch.save
        monkeypatch.setattr(torch, "save", lambda content, file: (save({}, file), full()))
    elif fails_at == "open":
        monkeypatch.setattr(files, "open", full, raising=False)
    else:
        monkeypatch.setattr(os, fails_at, full)
    with pytest.raises(TrainingError) as caught:
        run(tmp_path)
    assert "cannot be written (no space left on device): make room" in str(caught.value)
    assert "goes on from the last checkpoint" in str(caught.value)
    monkeypatch.undo()
    assert contents(tmp_path) == before_it


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX limits")
def test_nx_25_a_limit_on_the_size_of_files_is_told_in_a_sentence(tmp_path):
    """As ``ulimit -f`` does it: torch's own writer hides the system's error."""
    killed(tmp_path, 6)
    before_it, soft = contents(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before_it["checkpoint.pt"]) // 2, soft[1]))
    try:
        with pytest.raises(TrainingError, match=r"cannot be written \(file too large\)"):
            run(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft)
    assert contents(tmp_path) == before_it


# --- NX-10: asked before


def test_nx_10_a_small_disk_is_told_before_anything_is_read(tmp_path, monkeypatch):
    target, corpus = toy_target(), toy_corpus(60)
    monkeypatch.setattr(needs.shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10**6, 10**6, 0))
    monkeypatch.setattr("core.distill.run.features", None)  # not reached
    with pytest.raises(TrainingError) as caught:
        distill(target, tokenizer(), corpus, None, Recipe("medusa", 0, 40), PLAN, tmp_path / "out", "", "")
    assert str(caught.value).startswith("Training needs ") and "0.0 MB are free there" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_nx_10_on_a_disk_that_fills_up_all_the_same_nothing_is_left(small_disk):  # noqa: F811
    target, corpus = toy_target(), toy_corpus(2000)
    fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        features(target, corpus, (0, 1, 2), small_disk)
    assert [path.name for path in small_disk.iterdir()] == ["others"]


def test_nx_10_what_is_asked_for_is_what_is_written(tmp_path):
    target, corpus = toy_target(), toy_corpus(60)
    draft, ids = begin(Recipe("eagle", 1, 40), target, corpus, 0)
    layers = (0, 1, 2)
    needed = ask(draft, ids, target, (corpus,), layers, PLAN, tmp_path)
    assert needed.step_seconds > 0 and needed.reading_seconds > 0 and needed.memory > 0
    before_step = {name: weight.clone() for name, weight in draft.state_dict().items()}
    lessons = Lessons(corpus, features(target, corpus, layers, tmp_path))
    assert all(torch.equal(weight, draft.state_dict()[name]) for name, weight in before_step.items())
    train(draft, target, ids, lessons, PLAN, tmp_path / "checkpoint.pt")
    written = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert written - 2**17 < needed.disk - needs.SPARE < 2 * written  # a third checkpoint, and the draft
    again = ask(draft, ids, target, (corpus,), layers, PLAN, tmp_path)
    assert again.disk < needed.disk and again.reading_seconds == 0  # what is there already is not asked for


def test_nx_10_too_little_memory_is_told_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(needs, "free_bytes", lambda device: 10**5)
    with pytest.raises(TrainingError, match=r"about .* of memory, and 0\.1 MB are free: .*fewer --tokens"):
        distill(
            toy_target(),
            tokenizer(),
            toy_corpus(60),
            None,
            Recipe("medusa", 0, 40),
            PLAN,
            tmp_path / "out",
            "",
            "",
        )
    assert not (tmp_path / "out").exists()


# --- The command, with a real limit


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    write_training(folder)
    return folder


@pytest.mark.proof
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on memory")
def test_memory_that_is_out_in_the_middle_ends_in_a_sentence_and_goes_on(here):
    """The command with ``ulimit -v`` closed at its eighth step."""
    starved = """
import resource, sys
from core.distill import train
learn, done = train._learn, 0
def starving(*given):
    global done
    done += 1
    if done == 10:
        import psutil
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms, resource.RLIM_INFINITY))
        import torch
        torch.zeros(1 << 33)
    return learn(*given)
train._learn = starving
from core.distill.__main__ import main
main(sys.argv[1:])
"""
    root = Path(__file__).resolve().parents[2]
    arguments = [sys.executable, "-c", starved, *command(here, "starved")]
    ended = subprocess.run(arguments, cwd=root, capture_output=True, text=True)
    assert ended.returncode == 1 and "too little memory to go on" in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr
    assert steps(here / "starved" / "work" / "checkpoint.pt") == 5
    main(command(here, "starved"))
    assert json.loads((here / "starved" / "config.json").read_text())["kind"] == "model"
