"""The command from text to a folder: killed for real and resumed, what it writes, what it refuses."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from core.distill import __main__ as distill_main
from core.distill import checkpoint
from core.distill.__main__ import main
from core.distill.checkpoint import TrainingError
from core.models.errors import LoadError
from core.pairs.draft_file import check_target, embedding_fingerprint, load_draft
from tests.core.distill_toys import command, needs_muon, write_training
from tests.core.models_on_disk import VOCABULARY, write_model

pytestmark = needs_muon
ROOT = Path(__file__).resolve().parents[2]
# Dies without a word at the ninth step, three steps behind its last checkpoint.
KILLED = """
import os, signal, sys
from core.distill import train
learn, done = train._learn, 0
def dying(*given):
    global done
    done += 1
    return learn(*given) if done < 9 else os.kill(os.getpid(), signal.SIGKILL)
train._learn = dying
from core.distill.__main__ import main
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("distill")
    write_training(folder)
    write_model(folder / "other", "llama", seed=2)
    return folder


def losses(folder: Path) -> list[float]:
    return torch.load(folder / "work" / "checkpoint.pt", weights_only=True)["losses"]


def test_a_killed_command_goes_on_to_the_end_of_an_unbroken_one(here, capsys):
    main(command(here, "whole"))
    assert "alpha on held-out" in capsys.readouterr().out
    arguments = [sys.executable, "-c", KILLED, *command(here, "broken")]
    killed = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(losses(here / "broken")) == 5 and not (here / "broken" / "config.json").exists()
    main(command(here, "broken"))
    assert len(losses(here / "whole")) == 20
    assert losses(here / "broken") == pytest.approx(losses(here / "whole"), rel=1e-5)


@pytest.mark.parametrize("kind", ["model", "eagle", "medusa"])
def test_the_folder_of_each_kind(here, kind, capsys):
    main(command(here, kind, kind=kind))
    folder = here / kind
    draft = load_draft(folder)
    assert draft.kind == kind and draft.layers == {"model": 3, "eagle": 1, "medusa": 0}[kind]
    assert draft.feature_layers == {"model": (), "eagle": (0, 1), "medusa": (1,)}[kind]
    assert draft.head_ids.tolist() == list(range(VOCABULARY))
    config = json.loads((folder / "config.json").read_text())
    figures = config.pop("figures")
    assert config["fingerprint"] == draft.metadata["fingerprint"] and config["target"] == "target"
    (said,) = figures.values()  # the toy's replies hold no code fence
    assert 0 < said["by_depth"][0] < 1 and said["tokens"] > 20
    card = (folder / "README.md").read_text()
    for fact in (f"{said['by_depth'][0]:.4f}", "chats.npz", config["target_fingerprint"], "multiple of 17"):
        assert fact in card
    curve = (folder / "work" / "curve.jsonl").read_text().splitlines()
    assert json.loads(curve[-1])["step"] == 20


def test_a_draft_can_be_gone_on_with_and_is_refused_by_another_target(here, capsys):
    main(command(here, "first"))
    main(command(here, "second", "--start", str(here / "first")))
    assert losses(here / "second")[0] < losses(here / "first")[0]
    draft = load_draft(here / "second")
    check_target(draft.metadata, "target", embedding(here / "target"))
    with pytest.raises(LoadError, match="made for target .* not for other"):
        check_target(draft.metadata, "other", embedding(here / "other"))
    with pytest.raises(SystemExit, match="was made for target"):
        main([*command(here, "third", "--start", str(here / "first")), "--target", str(here / "other")])
    with pytest.raises(SystemExit, match="is of kind model with 3 layers"):
        main(command(here, "fourth", "--start", str(here / "first"), kind="eagle"))


def embedding(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    weight = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight
    assert len(embedding_fingerprint(weight)) == 64
    return weight


def test_what_is_refused_in_words(here, tmp_path, capsys, monkeypatch):
    missing = ["--kind", "model", "--out", str(tmp_path / "out"), "--data", str(tmp_path / "no.npz")]
    with pytest.raises(SystemExit, match="There is no corpus"):
        main([*missing, "--target", str(here / "target")])
    with pytest.raises(SystemExit, match="cannot be read .* name embedded, or a model's folder"):
        main([*missing, "--target", str(tmp_path)])
    for wrong, sentence in (
        (["--kind", "model", "--out", "x"], "name text with --data or --from-history"),
        (command(here, "x", "--steps", "0"), "begin at 1"),
        (command(here, "x", "--layers", "0"), "--layers begins at 1"),
    ):
        with pytest.raises(SystemExit):
            main(wrong)
        assert sentence in capsys.readouterr().err
    (tmp_path / "file").write_text("in the way")
    for out in (tmp_path / "file", tmp_path / "file" / "in it"):
        with pytest.raises(SystemExit, match="file.* cannot be made or written into"):
            main(["--kind", "model", "--out", str(out), "--synthesize", "4"])
    monkeypatch.setenv("REDLINE_DB", str(tmp_path / "none.db"))
    target = str(here / "target")
    with pytest.raises(SystemExit, match="none.db"):
        main(["--kind", "model", "--out", str(tmp_path / "out"), "--from-history", "--target", target])
    assert not (tmp_path / "out").exists()


def test_text_of_several_kinds(here, tmp_path, capsys):
    chats = [{"prompt": f"What is {n}?", "response": f"The editor reads {n} again."} for n in range(30)]
    lines = [json.dumps(chat) for chat in chats]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    (tmp_path / "notes.txt").write_text("The tide comes in twice a day. " * 60)
    text = ["--data", str(tmp_path / "chats.jsonl"), str(tmp_path / "notes.txt")]
    out, target = tmp_path / "out", str(here / "target")
    main(["--kind", "medusa", "--target", target, "--out", str(out), *text, "--steps", "3"])
    assert "chats.jsonl, notes.txt" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "(no space left on device): make room there. "),
        (
            errno.EACCES,
            "(permission denied): give yourself the right to, or name another folder with --out. ",
        ),
        (errno.EROFS, "(read-only file system): give yourself the right to, or name another "),
        (errno.EFBIG, "(file too large): raise the limit on the size of a file (ulimit -f), or "),
        (errno.EIO, "(input/output error): see to its disk, or name another folder with --out. "),
        (errno.ENAMETOOLONG, "(file name too long): name a folder with a shorter name with --out. "),
        (errno.EMFILE, "(too many open files): put that right, or name another folder with --out. "),
        (errno.EDQUOT, "(disk quota exceeded): make room there. "),
    ],
    ids=["full", "rights", "read-only", "limit", "broken", "long", "others", "quota"],
)
def test_what_the_system_says_of_a_file_decides_what_to_do(here, monkeypatch, number, remedy):
    """Not every error of a file is a full disk. The same remedy is named for a checkpoint."""
    said = OSError(number, os.strerror(number), str(here / "features.bin"))

    def failing(*_) -> None:
        raise said

    monkeypatch.setattr(distill_main, "_run", failing)
    with pytest.raises(SystemExit) as ended:
        main(command(here, "out"))
    sentence = f"{here / 'features.bin'} cannot be read or written {remedy}"
    assert str(ended.value).startswith(sentence) and str(ended.value).endswith("from the last checkpoint.")
    monkeypatch.setattr(checkpoint, "write_whole", failing)
    with pytest.raises(TrainingError) as ended:
        checkpoint.save(here / "checkpoint.pt", {})
    assert f"cannot be written {remedy}" in str(ended.value)
