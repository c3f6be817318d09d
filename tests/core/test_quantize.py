"""Forms of weights: what is chosen, what is really quantised, and that it is still the same model."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from core.models import asked, quantize
from core.models.decoder import Decoder
from core.models.errors import LoadError
from core.models.linear.forms import maker
from core.models.quantize import Quantised, choose_form
from tests.core.models_on_disk import make_model

GB = 1_000_000_000
IDS = torch.tensor([[7, 40, 200, 3, 90, 12]])


@pytest.fixture
def with_kernels(monkeypatch):
    monkeypatch.setattr(quantize, "best_form", lambda form, *_: form)


def probabilities(model) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits[0].float().softmax(-1)


@pytest.mark.parametrize("asked", ["none", "int8", "int4", "nf4", "llm-int8"])
def test_on_a_cpu_what_is_asked_for_is_chosen(asked, with_kernels):
    assert choose_form(asked, "cpu", False, GB) == asked


@pytest.mark.parametrize(
    "asked, size, draft, chosen",
    [
        ("int8", GB, False, "llm-int8"),
        ("none", GB, False, "none"),
        ("auto", 14 * GB, False, "nf4"),
        ("auto", 2 * GB, False, "none"),
        ("auto", None, False, "nf4"),
        ("auto", 14 * GB, True, "none"),
    ],
)
def test_on_a_card(asked, size, draft, chosen):
    assert choose_form(asked, "cuda", draft, size) == chosen


def test_auto_never_promises_what_cannot_be_had(monkeypatch):
    assert choose_form("auto", "cuda", False, 14 * GB, whole=True) == "none"
    monkeypatch.setattr(asked, "has_bitsandbytes", lambda: False)
    assert choose_form("auto", "cuda", False, 14 * GB) == "none"
    monkeypatch.setattr(quantize, "best_form", lambda form, *_: "float32")
    assert choose_form("auto", "cpu", False, GB) == "none"
    monkeypatch.setattr(quantize, "best_form", lambda form, *_: form)
    assert choose_form("auto", "cpu", False, GB) == "int8"


def test_refusals(monkeypatch):
    with pytest.raises(LoadError, match="choose --quantize nf4"):
        choose_form("int4", "cuda", False, GB)
    with pytest.raises(LoadError, match="choose --draft-quantize nf4"):
        choose_form("int4", "cuda", True, GB)
    with pytest.raises(LoadError, match="cannot be loaded as nf4: choose --quantize none or int8"):
        choose_form("nf4", "cpu", False, GB, whole=True)
    with pytest.raises(LoadError, match="cannot be loaded as llm-int8: choose --quantize none,"):
        choose_form("int8", "cuda", False, GB, whole=True)
    monkeypatch.setattr(quantize, "best_form", lambda form, *_: "bfloat16")
    with pytest.raises(LoadError, match="no fast int4 products"):
        choose_form("int4", "cpu", False, GB)
    monkeypatch.setattr(quantize, "has_bitsandbytes", lambda: False)
    with pytest.raises(LoadError, match="pip install bitsandbytes"):
        choose_form("llm-int8", "cpu", False, GB)


needs_kernels = pytest.mark.usefixtures("has_packed")


@needs_kernels
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gemma2"])
@pytest.mark.parametrize("form, tolerance", [("int8", 0.01), ("int4", 0.2)])
def test_the_projects_forms_stand_in_for_linear_layers(family, form, tolerance):
    """Biases (qwen2), transposed matrices (gpt2) and tied heads (gpt2, gemma2) included."""
    model = make_model(family, 1)
    before = probabilities(model)
    embedding = model.get_input_embeddings().weight.clone()
    assert quantize.count(model) == Quantised("none", 0.0)
    quantize.apply(model, form)
    assert quantize.count(model) == Quantised(form, 1.0)
    assert 0 < (probabilities(model) - before).abs().max() < tolerance
    assert model.get_output_embeddings().form == "int8"
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    assert not any(type(module) is nn.Linear for module in model.modules())


@needs_kernels
def test_sizes_the_int4_kernel_cannot_take_become_int8():
    model = make_model("llama", 1, intermediate_size=100)
    before = probabilities(model)
    quantize.apply(model, "int4")
    layer = model.model.layers[0]
    assert (layer.self_attn.q_proj.form, layer.mlp.up_proj.form) == ("int4", "int8")
    assert (probabilities(model) - before).abs().max() < 0.2


@needs_kernels
@pytest.mark.parametrize(
    "form, inner, quantised",
    [
        ("none", 128, Quantised("none", 0.0)),
        ("int8", 128, Quantised("int8", 1.0)),
        ("int4", 128, Quantised("int4", 1.0)),
        ("int4", 136, Quantised("int4", 58 / 75)),  # the last product becomes int8
        ("nf4", 128, Quantised("nf4", 1.0)),
        ("nf4", 80, Quantised("nf4", 22 / 27)),  # and here it stays dense
    ],
)
def test_the_products_of_a_lean_decoder(form, inner, quantised):
    if form == "nf4":
        pytest.importorskip("bitsandbytes")
    model = make_model("qwen2", 1, intermediate_size=inner, tie_word_embeddings=True)
    before = probabilities(model)
    heads = [quantize.maker(form, torch.float32, head) for head in (False, True)]
    decoder = Decoder.from_model(model, *heads)
    found = quantize.count_lean(decoder)
    assert found.form == quantised.form and found.share == pytest.approx(quantised.share)
    assert decoder.head.form == ("int8" if form in ("int8", "int4") else "none")
    difference = (decoder.logits(IDS[0], decoder.new_cache()).softmax(-1) - before).abs().max()
    assert difference < {"none": 1e-5, "int8": 0.01}.get(form, 0.2)


@needs_kernels
def test_a_product_gives_the_dtype_it_was_given():
    packed = maker(quantize.kernel("int8"))(torch.randn(32, 64))
    product = quantize.PackedLinear(packed, torch.ones(32, dtype=torch.bfloat16))
    x = torch.randn(1, 3, 64)
    assert product(x).shape == (1, 3, 32) and product(x).dtype == torch.float32
    assert product(x.bfloat16()).dtype == torch.bfloat16


def test_bitsandbytes_is_asked_for_what_the_rules_need():
    nf4 = quantize.loading_config("nf4", "float32")
    assert (nf4.bnb_4bit_quant_type, nf4.bnb_4bit_use_double_quant) == ("nf4", True)
    int8 = quantize.loading_config("llm-int8", "float16")
    assert int8.load_in_8bit and int8.llm_int8_threshold == 0.0
    for form in ("none", "int8"):
        assert quantize.loading_config(form, "float32") is None


@pytest.mark.parametrize("dtype, products", [("float32", torch.bfloat16), ("float16", torch.float16)])
def test_products_of_nf4_are_of_the_type_asked_for(dtype, products):
    """A T4 has no bfloat16 of its own (docs/SPACE.md)."""
    assert quantize.loading_config("nf4", dtype).bnb_4bit_compute_dtype == products


def test_what_could_not_be_quantised_is_said():
    """BQ-01: weights that are no linear layers, as those of some experts."""
    model = make_model("llama", 1)
    quantize.apply(model, "none")
    assert quantize.count(model).note("none") is None
    assert quantize.count(model).note("nf4") == (
        "Nothing in this model could be quantised as nf4, so it runs unquantised."
    )
    assert Quantised("nf4", 1.0).note("nf4") is None
    assert Quantised("nf4", 0.4).note("nf4") == "Only 40% of this model's weights could be quantised as nf4."


def test_a_layer_of_bitsandbytes_counts_only_when_its_weights_are_quantised():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = make_model("llama", 1)
    model.model.layers[0].mlp.up_proj = bitsandbytes.nn.Linear4bit(64, 128, bias=False, quant_type="nf4")
    assert quantize.count(model).form == "none"


@needs_kernels
def test_a_form_that_became_another_is_said():
    """The larger half of the weights has rows that the int4 kernel cannot take."""
    model = make_model("llama", 1, intermediate_size=100)
    quantize.apply(model, "int4")
    found = quantize.count(model)
    assert found.form == "int8" and found.share < 1
    assert found.note("int4") == (
        "Most of this model's weights could not be quantised as int4, and run as int8."
    )
    assert Quantised("llm.int8", 1.0).note("llm-int8") is None
    mixed = make_model("llama", 1, intermediate_size=40)
    quantize.apply(mixed, "int4")
    assert "could be quantised as int4" in quantize.count(mixed).note("int4")


def test_packed_weights_of_forms_unknown_here_go_by_the_name_they_came_with():
    model = make_model("gpt2", 1)  # whose masks are no weights
    assert quantize.count(model, "awq") == Quantised("none", 0.0)
    model.transformer.h[0].register_buffer("qweight", torch.zeros(4, 4, dtype=torch.int32))
    assert quantize.count(model, "awq") == Quantised("awq", 1.0)
    assert quantize.count(model).form == "none"


def test_only_the_missing_kernel_of_the_hub_goes_unsaid(caplog):
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    log.warning(
        "Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "No module named 'kernels'"
    )
    log.warning("something else")
    assert caplog.messages == ["something else"]
