"""What is trained computes what is run: against the decoder, and against drafting one token after another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from core.distill.kinds import Draft, feature_layers, make_draft, normed
from core.models.decoder import Decoder, DecoderShape
from core.models.linear.forms import maker
from core.pairs.draft_file import KINDS
from tests.core.tiny import tiny_llama

LENGTH = 11


def target():
    model = tiny_llama(3, layers=3)
    return DecoderShape.from_config(model.config.to_dict()), model


def a_draft(kind: str, layers: int = 1) -> Draft:
    shape, model = target()
    torch.manual_seed(5)
    embedding = model.get_input_embeddings().weight.detach()
    draft = make_draft(kind, shape, embedding, layers, model.config.intermediate_size, 3)
    draft.begin(model.state_dict())
    for weight in draft.parameters():  # nothing at a start that hides a part
        torch.nn.init.normal_(weight, std=0.3)
    return draft.eval()


def inputs(chats: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 61, (chats, LENGTH), generator=draw)
    return ids, torch.randn(chats, LENGTH, 3, 32, generator=draw)


@torch.no_grad()
def test_a_model_is_the_decoder_that_will_run_it():
    draft, (ids, features) = a_draft("model", 2), inputs()
    tensors, make = draft.tensors(), maker("float32")
    project, head = make(tensors["proj.weight"]), make(draft.embedding)
    decoder = Decoder.from_tensors(
        replace(draft.shape, layers=2), tensors, make, draft.embedding, lambda x: head(project(x)), ""
    )
    expected = decoder.logits(ids[0].tolist(), decoder.new_cache())
    (output,) = draft.outputs(ids, features)
    assert output.ahead == 0
    torch.testing.assert_close(output.hidden[0] @ draft.embedding.T, expected, rtol=1e-3, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2])
def test_each_depth_of_eagle_is_what_drafting_that_far_gives(layers):
    draft, (ids, features) = a_draft("eagle", layers), inputs()
    outputs = draft.outputs(ids, features, 4)
    assert [output.ahead for output in outputs] == [0] * 4
    for depth, output in enumerate(outputs):
        for last in range(4, LENGTH):
            expected = drafted(draft, draft.tensors(), ids[0, : last + 1], features[0, : last - depth])
            torch.testing.assert_close(output.hidden[0, last], expected, rtol=1e-3, atol=1e-4)


def drafted(draft, tensors, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """The guess behind the last id where features are known of the leading positions alone.

    As ``core.pairs.draft_file`` has it, with the decoder's layers, one position after another.
    """
    shape, eps = draft.shape, draft.shape.rms_eps
    states = [torch.zeros(32), *(normed(features, eps).flatten(1) @ tensors["features.weight"].T)]
    while True:
        given = torch.stack(states)[: len(ids)]
        x = draft.embedding[ids[: len(given)]] @ tensors["token.weight"].T
        x = x + normed(given, eps) @ tensors["state.weight"].T
        # A decoder whose embedding is the inputs, and whose norm does nothing but normalise.
        layers = replace(shape, layers=len(draft.layers))
        plain = {**tensors, "norm.weight": torch.ones(32)}
        decoder = Decoder.from_tensors(layers, plain, maker("float32"), x, lambda hidden: hidden, "")
        cache = decoder.new_cache()
        normal = decoder.forward(list(range(len(x))), cache)
        if len(given) == len(ids):
            return (normal[-1] * tensors["norm.weight"]) @ tensors["proj.weight"].T
        # Only its direction counts: what is fed back is normalised first.
        states.append(normal[-1])


@torch.no_grad()
def test_a_medusa_head_looks_at_one_position_alone():
    draft, (ids, features) = a_draft("medusa"), inputs()
    outputs, tensors = draft.outputs(ids, features), draft.tensors()
    assert [output.ahead for output in outputs] == [1, 2, 3, 4]
    h = normed(features[0, 6, -1], draft.shape.rms_eps)
    for number, output in enumerate(outputs):
        block, bias, proj = (
            tensors[f"heads.{number}.{name}"] for name in ("block.weight", "block.bias", "proj.weight")
        )
        expected = proj @ (h + torch.nn.functional.silu(block @ h + bias))
        torch.testing.assert_close(output.hidden[0, 6], expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_weights_come_back_and_padding_changes_nothing(kind):
    draft, (ids, features) = a_draft(kind), inputs(2)
    other = a_draft(kind)
    for weight in other.parameters():
        torch.nn.init.zeros_(weight)
    other.take(draft.tensors())
    for one, same in zip(draft.outputs(ids, features), other.outputs(ids, features), strict=True):
        torch.testing.assert_close(one.hidden, same.hidden, rtol=1e-5, atol=1e-6)
    short = draft.outputs(ids[:1, :6], features[:1, :6])
    for one, cut in zip(draft.outputs(ids, features), short, strict=True):
        torch.testing.assert_close(one.hidden[:1, :6], cut.hidden, rtol=1e-4, atol=1e-5)


def test_where_a_kind_looks():
    assert feature_layers("eagle", 30) == (9, 19, 29)
    assert feature_layers("eagle", 1) == (0,)
    assert feature_layers("model", 30) == feature_layers("medusa", 30) == (29,)


def test_a_model_begins_with_the_targets_layers():
    shape, model = target()
    draft = make_draft("model", shape, model.get_input_embeddings().weight.detach(), 3, 64, 1)
    draft.begin(model.state_dict())
    own = model.model.layers[1].mlp.up_proj.weight
    assert torch.equal(draft.layers[1].mlp.up_proj.weight, own)
    assert not torch.equal(draft.layers[2].mlp.up_proj.weight, model.model.layers[2].mlp.up_proj.weight)
