from __future__ import annotations

import numpy as np
import pytest
import torch

from core.distill.evaluate import Alpha, alpha
from core.distill.run import LAYERS, Recipe, begin
from core.pairs.draft_file import KINDS
from tests.core.distill_toys import VOCABULARY, toy_corpus, toy_lessons, toy_target


def test_a_draft_that_is_its_target_covers_it_all(tmp_path):
    target, corpus = toy_target(), toy_corpus()
    draft, ids = begin(Recipe("model", 3), target, corpus, 0)
    state = target.model.state_dict()
    own = {name[6:]: value for name, value in state.items() if name.startswith("model.layers.")}
    draft.take({**own, "norm.weight": state["model.norm.weight"], "proj.weight": torch.eye(32)})
    lessons = toy_lessons(target, corpus, "model", tmp_path)
    found = alpha(draft, target, ids, lessons, ["prose"] * len(corpus))["prose"]
    assert found.by_depth[0] == pytest.approx(1, abs=0.005)  # hidden states are kept in bfloat16
    assert (found.tokens, found.replies) == (corpus.reply_tokens, len(corpus))
    half = alpha(draft, target, ids[::2], lessons, ["prose"] * len(corpus))["prose"]
    assert half.by_depth[0] < 0.8  # what the head leaves out, it cannot cover


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_alpha_is_the_mean_overlap_reply_by_reply(kind, tmp_path):
    target, corpus = toy_target(), toy_corpus(9)
    draft, ids = begin(Recipe(kind, LAYERS[kind], 30), target, corpus, 0)
    for weight in draft.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    lessons = toy_lessons(target, corpus, kind, tmp_path)
    domains = ["code" if n % 3 == 0 else "prose" for n in range(9)]
    found = alpha(draft, target, ids, lessons, domains)
    assert set(found) == {"code", "prose"}
    for domain in found:
        overlaps: list[np.ndarray] = []
        for chat in (n for n in range(9) if domains[n] == domain):
            batch = lessons.batch([chat], target)
            outputs = draft.outputs(batch.ids, batch.features, draft.depths)
            p = target.model(batch.ids).logits[0].softmax(-1)
            for place in range(3, batch.ids.shape[1] - 1):
                row = []
                for output in outputs:
                    logits = torch.full((VOCABULARY,), -torch.inf)
                    logits[ids] = target.head[ids] @ output.hidden[0, place - output.ahead]
                    # A head that looks further back than the text goes has seen nothing.
                    guess = logits if place >= output.ahead else torch.where(logits.isinf(), logits, 0)
                    row.append(torch.minimum(p[place], guess.softmax(-1)).sum().item())
                overlaps.append(np.array(row))
        expected = np.mean(overlaps, 0)
        assert found[domain].by_depth == pytest.approx(expected.tolist(), abs=0.003)
        assert found[domain].tokens == len(overlaps)
        low, high = found[domain].interval
        assert low < expected[0] < high


def test_alpha_in_words():
    assert str(Alpha((0.5123, 0.4), (0.5, 0.5251), 1200, 9)) == (
        "0.5123 (0.500 to 0.525) on 1,200 tokens of 9 replies"
    )
    assert str(Alpha((0.5,), None, 3, 1)) == "0.5000 on 3 tokens of 1 replies"
