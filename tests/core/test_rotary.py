"""Rotary embeddings by the files' own words: against transformers' formulas, and of GGUF files (NX-05)."""

from __future__ import annotations

import logging
import math

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from core.models import rotary
from core.models.by_layer import Skeleton
from core.models.checkpoint import inspect
from core.models.decoder import Decoder
from core.models.errors import LoadError
from core.models.rotary import Rotary, module_fault, of_config, table_fault
from core.models.transformers_decoder import TransformersDecoder
from core.pairs import load_model
from core.pairs.plan import plan_models
from core.pairs.spec import PairSpec
from tests.core.models_on_disk import make_model, write_gguf, write_model

LONG = 16384
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=8192)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=4096)
SHORT, FAR = [1.0 + i / 8 for i in range(8)], [2.0 + i for i in range(8)]
LONGROPE = dict(rope_type="longrope", rope_theta=1e4, short_factor=SHORT, long_factor=FAR)
LONGROPE |= dict(original_max_position_embeddings=4096)
KINDS = {
    "default": dict(rope_type="default", rope_theta=5e5),
    "linear": dict(rope_type="linear", rope_theta=1e4, factor=2.5),
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, other ramp": YARN | dict(beta_fast=16, beta_slow=2, truncate=False, attention_factor=1.5),
    "yarn, mscale": YARN | dict(mscale=1.0, mscale_all_dim=0.8),
    "longrope": LONGROPE,
    "longrope, factor": LONGROPE | dict(factor=8.0),
}


def plan_of(path):
    (plan,) = plan_models(PairSpec(name="x", target=str(path), draft=None, quantize="none", device="cpu"))
    return plan


def load(path):
    return load_model.load_model(plan_of(path), lambda *_: None)[0]


def says(**fields):
    return {f"llama.rope.{name.replace('__', '.')}": value for name, value in fields.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_formulas_are_those_of_transformers(kind):
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=16,
        max_position_embeddings=LONG,
        rope_parameters=KINDS[kind],
    )
    meant = of_config(config.to_dict())
    if kind == "default":
        frequencies, scale = config.rope_parameters["rope_theta"] ** (-torch.arange(0, 16, 2) / 16), 1.0
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[KINDS[kind]["rope_type"]](config, "cpu")
    assert torch.allclose(meant.frequencies(), frequencies.double(), rtol=1e-6, atol=0)
    assert meant.scale == pytest.approx(scale) and meant.size == 16


def test_old_words_of_a_config_mean_the_same():
    new = dict(hidden_size=64, num_attention_heads=4, max_position_embeddings=LONG, rope_parameters=LLAMA3)
    scaling = {
        ("type" if name == "rope_type" else name): v for name, v in LLAMA3.items() if name != "rope_theta"
    }
    old = dict(hidden_size=64, num_attention_heads=4, max_position_embeddings=LONG, rope_scaling=scaling)
    assert of_config(old | {"rope_theta": 5e5}) == of_config(new)
    assert of_config({**new, "rope_parameters": {"full_attention": LLAMA3}}) is None


# --- GGUF (NX-05) ------------------------------------------------------------------------------------------


def test_nx_05_the_factors_in_a_gguf_of_llama_3_count(tmp_path):
    """Logits at positions 10 and 9,000, against the same model in safetensors."""
    changes = dict(max_position_embeddings=LONG)
    factors = (5e5 ** (-torch.arange(0, 16, 2).double() / 16)) / of_config(_config(LLAMA3)).frequencies()
    assert factors.min() == 1 and factors.max() == pytest.approx(8)
    file = write_gguf(
        tmp_path / "x.gguf",
        1,
        exact=True,
        factors={"rope_freqs.weight": factors},
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        **changes,
    )
    folder = write_model(tmp_path / "x", "llama", 1, rope_parameters=LLAMA3, **changes)
    models = [load(path) for path in (file, folder)]
    assert all(isinstance(model, Decoder) and model.context_length == LONG for model in models)
    near, far = ([row[at] for row in map(_near_and_far, models)] for at in (0, 1))
    for rows in (near, far):
        assert (rows[0] - rows[1]).abs().max() < 1e-3 * rows[1].std()
    plain = write_model(tmp_path / "plain", "llama", 1, rope_parameters=KINDS["default"], **changes)
    assert (_near_and_far(load(plain))[1] - far[1]).abs().max() > 0.1 * far[1].std()  # what was seen before


def _near_and_far(model) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits at positions 10 and 9,000; what lies between is not read, for time, and has keys of 0."""
    cache = model.new_cache()
    near = model.logits(range(3, 13), cache)[-1]
    cache.reserve(9001)
    cache.length = 9000
    return near, model.logits([13], cache)[-1]


def _config(rope):
    return dict(hidden_size=64, num_attention_heads=4, max_position_embeddings=LONG, rope_parameters=rope)


GGUF = {
    "nothing": ({}, {}, dict(rope_type="default", rope_theta=1e4)),
    "linear": (
        dict(scaling__type="linear", scaling__factor=2.5),
        {},
        dict(rope_type="linear", rope_theta=1e4, factor=2.5),
    ),
    "linear by default": (
        dict(scaling__factor=4.0),
        {},
        dict(rope_type="linear", rope_theta=1e4, factor=4.0),
    ),
    "linear of old": (dict(scale_linear=4.0), {}, dict(rope_type="linear", rope_theta=1e4, factor=4.0)),
    "none, whatever its factor": (
        dict(scaling__type="none", scaling__factor=4.0),
        {},
        dict(rope_type="default", rope_theta=1e4),
    ),
    "yarn": (
        dict(scaling__type="yarn", scaling__factor=4.0, scaling__original_context_length=4096),
        {},
        YARN,
    ),
    "yarn, other ramp": (
        dict(scaling__type="yarn", scaling__factor=4.0, scaling__original_context_length=4096)
        | dict(scaling__yarn_beta_fast=16.0, scaling__yarn_beta_slow=2.0, scaling__attn_factor=0.5),
        {},
        YARN | dict(beta_fast=16, beta_slow=2, attention_factor=0.5 * (1 + 0.1 * math.log(4))),
    ),
    "longrope": (
        dict(scaling__type="longrope", scaling__original_context_length=4096, scaling__attn_factor=1.25),
        {"rope_factors_short.weight": SHORT, "rope_factors_long.weight": FAR},
        LONGROPE | dict(attention_factor=1.25),
    ),
    "factors and a factor": (
        dict(scaling__type="linear", scaling__factor=2.0),
        {"rope_freqs.weight": SHORT},
        LONGROPE
        | dict(short_factor=[2 * f for f in SHORT], attention_factor=1.0)
        | dict(original_max_position_embeddings=LONG),
    ),
    "a scale alone": (
        dict(scaling__attn_factor=1.5),
        {},
        LONGROPE
        | dict(short_factor=[1.0] * 8, attention_factor=1.5)
        | dict(original_max_position_embeddings=LONG),
    ),
}


@pytest.mark.parametrize("kind", GGUF)
def test_nx_05_every_kind_of_scaling_in_a_gguf_runs_as_it_says(kind, tmp_path):
    said, factors, rope = GGUF[kind]
    file = write_gguf(
        tmp_path / "x.gguf",
        1,
        exact=True,
        says=says(**said),
        factors=factors,
        max_position_embeddings=LONG,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    meant = of_config(_config(rope))
    model = load(file)
    if isinstance(model, Decoder):
        assert table_fault(meant, model.rotations[:, 0]) is None
        assert model.context_length == LONG
    else:
        assert kind == "longrope" and model.context_length == 4096  # held to where the factors change
        assert module_fault(meant, model.model) is None


@pytest.mark.parametrize(
    "said, factors, name",
    [
        (dict(scaling__type="dynamic"), {}, "scaling of the type 'dynamic'"),
        (dict(scaling__alpha=1000.0), {}, "llama.rope.scaling.alpha"),
        (dict(scaling__yarn_log_multiplier=0.1), {}, "llama.rope.scaling.yarn_log_multiplier"),
        (dict(scaling__yarn_ext_factor=0.5), {}, "llama.rope.scaling.yarn_ext_factor"),
        (dict(scaling__spiral=0.5), {}, "llama.rope.scaling.spiral"),
        (dict(scaling__type="longrope"), {}, "scaling of the type 'longrope' with no factors"),
        (dict(), {"rope_factors_long.weight": FAR}, "rope_factors_long.weight without rope_factors_short"),
        (dict(scaling__type="yarn"), {"rope_freqs.weight": SHORT}, "'yarn' with rope_freqs.weight"),
    ],
)
def test_nx_05_what_cannot_run_is_refused_by_name(said, factors, name, tmp_path):
    file = write_gguf(tmp_path / "x.gguf", 1, says=says(**said), factors=factors)
    with pytest.raises(LoadError, match=name) as refused:
        inspect(str(file))
    assert str(refused.value).endswith("which Redline cannot: use the same model in safetensors.")


def test_nx_05_a_file_whose_scaling_is_passed_over_is_refused(tmp_path, monkeypatch):
    """As transformers alone would run it: its modules and a decoder made of them share the mistake."""
    file = write_gguf(tmp_path / "x.gguf", 1, says=says(scaling__type="linear", scaling__factor=4.0))
    monkeypatch.setattr(rotary, "settle", lambda config, rotary: None)
    with pytest.raises(
        LoadError, match="would not be run as its file says .frequency . is off by a factor of 4"
    ):
        load(file)


@pytest.mark.parametrize("wrong", ["frequencies", "scale"])
def test_a_decoder_that_turns_otherwise_than_the_config_is_not_used(wrong, tmp_path, monkeypatch, caplog):
    """Near the beginning its scores are as good as right."""
    folder = write_model(tmp_path, "llama", 1, max_position_embeddings=LONG, rope_parameters=YARN)
    original = Skeleton.pack

    def pack(*args):
        made, scores = original(*args)
        near = torch.polar(made.rotations.abs(), made.rotations.angle())
        if wrong == "scale":
            made.rotations = near / near.abs()
        else:
            made.rotations[64:] = made.rotations[:1]
        return made, scores

    monkeypatch.setattr(Skeleton, "pack", pack)
    with caplog.at_level(logging.WARNING):
        assert isinstance(load(folder), TransformersDecoder)


def test_a_fault_is_named():
    right = Rotary(16, 1e4, 128)
    frequencies = right.frequencies()
    table = torch.polar(torch.ones(128, 8).double(), torch.arange(128)[:, None] * frequencies)
    assert table_fault(right, table) is None
    assert table_fault(Rotary(8, 1e4, 128), table) == "8 pairs are turned and not 4"
    assert "frequency 0 is off by a factor of 2" in table_fault(Rotary(16, 1e4, 128, factor=2.0), table)
    assert table_fault(Rotary(16, 1e4, 128, scale=1.5), table) == "the scale is 1 and not 1.5"
    table[-1] = table[0]
    assert table_fault(right, table) == "position 127 is turned otherwise"
    model = make_model("llama", 1)
    assert module_fault(right, model) is None
    assert module_fault(Rotary(16, 5e5, 128), model).startswith("frequency 7 is off")
    assert "no frequencies" in module_fault(Rotary(16, 1e4, 128, factor=2.0), make_model("gpt2", 1))
