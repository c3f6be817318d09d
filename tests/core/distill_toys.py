"""A tiny target and chats for it, ready to train on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from core.distill.corpus import Chat, Corpus
from core.distill.kinds import feature_layers
from core.distill.lesson import Lessons
from core.distill.target import Target, as_target, features
from tests.core.models_on_disk import VOCABULARY as WRITTEN
from tests.core.models_on_disk import write_model
from tests.core.tiny import tiny_llama

VOCABULARY = 61
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="training needs torch 2.9 or newer")


def toy_target(seed: int = 1, layers: int = 3) -> Target:
    return as_target(tiny_llama(seed, vocabulary=VOCABULARY, layers=layers), f"toy {seed}", torch.float32)


def toy_corpus(chats: int = 24, seed: int = 0) -> Corpus:
    """Chats of 4 ids of prompt and 3 to 30 of reply."""
    draw = np.random.default_rng(seed)
    return Corpus.of(
        Chat(draw.integers(0, VOCABULARY, 4 + length), 4, 1.0) for length in draw.integers(3, 31, chats)
    )


def toy_lessons(target: Target, corpus: Corpus, kind: str, folder: Path) -> Lessons:
    return Lessons(corpus, features(target, corpus, feature_layers(kind, target.shape.layers), folder))


def write_training(folder: Path) -> None:
    """A target and chats of its vocabulary, as ``python -m core.distill`` takes them (see ``command``)."""
    write_model(folder / "target", "llama", seed=1)
    draw = np.random.default_rng(0)
    Corpus.of(
        Chat(draw.integers(3, WRITTEN, 6 + length), 6, 1.0) for length in draw.integers(4, 40, 120)
    ).save(folder / "chats.npz")


def command(here: Path, out: str, *more: str, kind: str = "model") -> list[str]:
    """The arguments of a short training on what ``write_training`` wrote."""
    text = ["--target", str(here / "target"), "--data", str(here / "chats.npz"), "--out", str(here / out)]
    return ["--kind", kind, *text, "--steps", "20", "--save-every", "5", "--tokens", "100", *more]
