"""What the cards of the embedded drafts say they are worth, measured again from the weights that ship.

On the first held-out replies of each domain, of which a draft's file holds the figure as well ("sample"),
so that like is compared with like. The draft is unpacked as a file holds it; p is the target's in float32.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from core.distill.__main__ import HELD_OUT
from core.distill.corpus import Corpus, held_out
from core.distill.evaluate import alpha
from core.distill.kinds import feature_layers, make_draft
from core.distill.lesson import Lessons
from core.distill.run import SAMPLE, first_of_each
from core.distill.target import Target, features, load_target
from core.models.draft_file import check_target, load_draft
from core.models.embedded import DRAFTS
from core.models.spec import EMBEDDED

SHIPPED = sorted(DRAFTS.glob("*.safetensors"))


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> tuple[Target, Corpus, list[str], Path]:
    target, tokenizer = load_target(EMBEDDED, dtype=torch.float32)
    corpus = Corpus.load(HELD_OUT)
    assert all(held_out(chat.prompt) for chat in corpus)
    domains = [chat.domain(tokenizer) for chat in corpus]
    few = first_of_each(domains, SAMPLE)
    sample = Corpus.of(corpus[chat] for chat in few)
    return target, sample, [domains[chat] for chat in few], tmp_path_factory.mktemp("features")


def test_sizes():
    assert {path.stem for path in SHIPPED} == {"draft-model", "draft-eagle", "draft-medusa"}
    sizes = [path.stat().st_size for path in SHIPPED]
    assert max(sizes) < 16_000_000 and sum(sizes) < 45_000_000


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_card_of_a_shipped_draft_is_true(path, judged):
    target, sample, domains, folder = judged
    shipped = load_draft(path)
    check_target(shipped.metadata, "the embedded target", target.embedding)
    layers = feature_layers(shipped.kind, target.shape.layers)
    assert shipped.feature_layers == (() if shipped.kind == "model" else layers)
    draft = make_draft(
        shipped.kind, target.shape, target.embedding, shipped.layers, target.inner, len(layers)
    )
    draft.take(shipped.tensors)
    lessons = Lessons(sample, features(target, sample, layers, folder))
    found = alpha(draft, target, shipped.head_ids, lessons, domains)
    said, whole = (json.loads(shipped.metadata[name]) for name in ("sample", "figures"))
    assert set(found) == set(said) == set(whole) == {"code", "prose"}
    card = (path.parent / "README.md").read_text()
    for domain, one in found.items():
        assert one.tokens == said[domain]["tokens"]
        assert one.by_depth == pytest.approx(said[domain]["by_depth"], abs=0.01)
        assert whole[domain]["tokens"] >= 5_000
        assert f"{whole[domain]['by_depth'][0]:.4f}" in card
