"""What the cards of the embedded drafts say they are worth, measured again from the weights that ship.

On the first held-out replies of each domain, of which a draft's file holds the figure as well ("sample"),
so that like is compared with like. The draft is unpacked as a file holds it; p is the target's in float32.
"""

from __future__ import annotations

import json

import pytest
import torch

from core.distill.__main__ import HELD_OUT
from core.distill.corpus import Corpus, held_out
from core.distill.evaluate import alpha
from core.distill.kinds import feature_layers, make_draft
from core.distill.lesson import Lessons
from core.distill.run import SAMPLE, first_of_each
from core.distill.target import Features, Target, features, load_target
from core.models.embedded import DRAFTS
from core.models.sources import EMBEDDED
from core.pairs.draft_file import check_target, load_draft

SHIPPED = sorted(DRAFTS.glob("*.safetensors"))


class Behind:
    """Of hidden states behind several layers those behind some: the target reads the replies once for all."""

    def __init__(self, whole: Features, places: list[int]):
        self._whole, self._places = whole, places
        self.shape = (whole.shape[0], len(places), whole.shape[2])

    def __getitem__(self, part: slice) -> torch.Tensor:
        return self._whole[part][:, self._places]


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> tuple[Target, Corpus, list[str], Features]:
    target, tokenizer = load_target(EMBEDDED, dtype=torch.float32)
    corpus = Corpus.load(HELD_OUT)
    assert all(held_out(chat.prompt) for chat in corpus)
    domains = [chat.domain(tokenizer) for chat in corpus]
    few = first_of_each(domains, SAMPLE)
    sample = Corpus.of(corpus[chat] for chat in few)
    behind = features(target, sample, most_layers(target), tmp_path_factory.mktemp("features"))
    return target, sample, [domains[chat] for chat in few], behind


def most_layers(target: Target) -> tuple[int, ...]:
    """What an EAGLE draft looks at holds what the others do."""
    return feature_layers("eagle", target.shape.layers)


def test_sizes():
    assert {path.stem for path in SHIPPED} == {"draft-model", "draft-eagle", "draft-medusa"}
    sizes = [path.stat().st_size for path in SHIPPED]
    assert max(sizes) < 16_000_000 and sum(sizes) < 45_000_000


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_card_of_a_shipped_draft_is_true(path, judged):
    target, sample, domains, whole = judged
    shipped = load_draft(path)
    check_target(shipped.metadata, "the embedded target", target.embedding)
    layers = feature_layers(shipped.kind, target.shape.layers)
    assert shipped.feature_layers == (() if shipped.kind == "model" else layers)
    draft = make_draft(
        shipped.kind, target.shape, target.embedding, shipped.layers, target.inner, len(layers)
    )
    draft.take(shipped.tensors)
    behind = Behind(whole, [most_layers(target).index(layer) for layer in layers])
    found = alpha(draft, target, shipped.head_ids, Lessons(sample, behind), domains)
    said, of_all = (json.loads(shipped.metadata[name]) for name in ("sample", "figures"))
    assert set(found) == set(said) == set(of_all) == {"code", "prose"}
    card = (path.parent / "README.md").read_text()
    for domain, one in found.items():
        assert one.tokens == said[domain]["tokens"]
        assert one.by_depth == pytest.approx(said[domain]["by_depth"], abs=0.01)
        assert of_all[domain]["tokens"] >= 5_000
        assert f"{of_all[domain]['by_depth'][0]:.4f}" in card
