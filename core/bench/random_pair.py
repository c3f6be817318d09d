"""Pairs with random weights whose probabilities are scripted: real passes, known acceptance, no downloads.

Random weights have no acceptance of their own. So each pass runs in earnest, and then its logits are
replaced, where they are, by a row that is the same everywhere: q is spread over the lower half of the draft's
ids, p is ``acceptance`` times q there and the rest above. Then Σ min(p, q) is ``acceptance``, and so is p / q
of every draft: the real sampling and verification meet exactly that, at every position.

Serves ``core.bench.synthetic``. Knows the shapes of Qwen2.5's 7B and 0.5B; no files, no tokenizer, no text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import transformers

from core.drafters.base import Drafter
from core.drafters.model import ModelDrafter
from core.models.base import Cache, Scorer, Stop
from core.models.decoder import Decoder
from core.models.linear import Nf4Linear
from core.models.quantize import maker
from core.pairs.pair import Pair
from core.records import PairInfo

CONTEXT = 2048
# Qwen2.5-7B-Instruct and Qwen2.5-0.5B-Instruct, and the same in small: the target's rows are wider.
LARGE = (
    dict(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
    ),
    dict(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
)
SMALL = (
    dict(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
    ),
    dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=304,
        tie_word_embeddings=True,
    ),
)
FORMS = ("nf4", "none")  # of a target's layers
STEADY = 7  # the id that a steady target always thinks next
SPREAD = 0.02  # standard deviation of a weight


class _Layers(torch.nn.ModuleList):
    """Layers without numbers, each of which gets random ones on ``device`` when its turn comes."""

    device: torch.device

    def __iter__(self) -> Iterator[torch.nn.Module]:
        for layer in super().__iter__():
            yield _filled(layer, self.device)


@torch.no_grad()
def _filled(module: torch.nn.Module, device: torch.device, spread: float = SPREAD) -> torch.nn.Module:
    module.to_empty(device=device)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, spread)
        else:  # weights of norms; biases of a random model may be anything
            parameter.fill_(1)
    return module


def _without_layers(sizes: dict, device: torch.device, dtype: torch.dtype, spread: float) -> torch.nn.Module:
    """A Qwen2 of these sizes (of its config) with random weights, its layers still without numbers."""
    config = transformers.Qwen2Config(max_position_embeddings=CONTEXT, **sizes)
    make = transformers.Qwen2ForCausalLM  # imported by this look-up, which torch 2.8 cannot do under "meta"
    with torch.device("meta"):
        model = make(config).to(dtype).eval().requires_grad_(False)
    inner = model.model
    inner.rotary_emb = type(inner.rotary_emb)(config=config)
    for part in (inner.embed_tokens, inner.norm, model.lm_head):
        _filled(part, device, spread)
    if config.tie_word_embeddings:
        model.lm_head.weight = inner.embed_tokens.weight
    return model


def random_model(sizes: dict, device: torch.device, dtype: torch.dtype, spread: float) -> torch.nn.Module:
    """A Qwen2 of these sizes (of its config) with random weights of that standard deviation."""
    model = _without_layers(sizes, device, dtype, spread)
    for layer in model.model.layers:
        _filled(layer, device, spread)
    return model.to(device)  # its rotary embedding was made elsewhere


def random_decoder(
    sizes: dict, form: str, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Decoder:
    """A decoder of these sizes, layers in ``form`` (of ``FORMS``), the rest in ``dtype``, weights random.

    Layers are made one by one, so that a 7B in NF4 needs little more than the 6 GB it ends with.
    """
    model = _without_layers(sizes, device, dtype, SPREAD)
    layers = _Layers(model.model.layers)
    layers.device = device
    model.model.layers = layers
    return Decoder.from_model(model, maker(form, dtype), maker("none", dtype))


def dtype_word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def config_of(sizes: dict) -> dict[str, object]:
    """What a ``config.json`` of such a model says that counts hang on."""
    tied = sizes.get("tie_word_embeddings", False)
    head = sizes["hidden_size"] // sizes["num_attention_heads"]
    more = dict(model_type="qwen2", max_position_embeddings=CONTEXT, head_dim=head, tie_word_embeddings=tied)
    return {**sizes, **more}


def weight_bytes(decoder: Decoder) -> int:
    """Bytes of the matrices that a pass over few rows reads: those of the layers and the head."""
    products = [product for layer in decoder.layers for product in layer.products]
    return sum(map(_bytes, [*products, decoder.head]))


def _bytes(product) -> int:
    if not isinstance(product, Nf4Linear):
        return product.weight.nbytes
    state = product.state
    scales = [state.absmax, *([state.state2.absmax] if state.nested else [])]
    return product.packed.nbytes + sum(scale.nbytes for scale in scales)


def script(
    acceptance: float, target_width: int, draft_width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of p (target_width,) and q (draft_width,), float32, with Σ min(p, q) = ``acceptance``."""
    weights = torch.rand(target_width, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 4
    shared = draft_width // 2
    q, others = weights[:shared], weights[shared:]
    q, others = q / q.sum(), others / others.sum()
    p = torch.cat([acceptance * q, (1 - acceptance) * others])
    q = torch.cat([q, q.new_zeros(draft_width - shared)])
    return p.log().float().to(device), q.log().float().to(device)


class Scripted:
    """A ``Scorer`` that runs every pass of another and then gives ``row`` (vocabulary,) for each id.

    The pass's own logits take part with weight 0: one that is not a number spoils the row, and is noticed.
    """

    def __init__(self, scorer: Scorer, row: torch.Tensor):
        self.scorer = scorer
        self.device = scorer.device
        self.context_length = scorer.context_length
        self.vocabulary = scorer.vocabulary
        self.readable_ids = scorer.readable_ids
        self._row = row

    def new_cache(self) -> Cache:
        return self.scorer.new_cache()

    def prefill(self, ids: Sequence[int], cache: Cache, stop: Stop | None = None) -> None:
        self.scorer.prefill(ids, cache, stop)

    def device_logits(self, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        return torch.add(self._row, self.scorer.device_logits(ids, cache), alpha=0)

    def logits(self, ids: Sequence[int], cache: Cache) -> torch.Tensor:
        return self.device_logits(torch.tensor(list(ids), device=self.device), cache).cpu()

    def next_logits(self, ids: Sequence[int], cache: Cache) -> torch.Tensor:
        return self.logits(ids, cache)[-1]


class NoText:
    """A tokenizer of which every id reads as one letter."""

    all_special_ids: Sequence[int] = ()

    def decode(self, ids: Sequence[int], **options: object) -> str:
        return "x" * len(ids)


def scripted_pair(target: Decoder, draft: Decoder, acceptance: float, form: str) -> Pair:
    """Both behind the script, as the engine takes them; ``form`` is the target's, for the record."""
    p, q = script(acceptance, target.vocabulary, draft.vocabulary, target.device)
    drafter = ModelDrafter(Scripted(draft, q), vocabulary=target.vocabulary)
    return _pair(Scripted(target, p), drafter, form)


def steady_pair(target: Decoder, drafter: Drafter | None, form: str) -> Pair:
    """A target that always thinks ``STEADY`` next, so that lookup and recycling find what they propose."""
    row = torch.full((target.vocabulary,), -100.0, device=target.device)
    row[STEADY] = 0
    return _pair(Scripted(target, row), drafter, form)


def _pair(target: Scripted, drafter: Drafter | None, form: str) -> Pair:
    dtype = dtype_word(getattr(target.scorer, "dtype", torch.float32))  # which transformers' keeps to itself
    info = PairInfo(
        pair="synthetic",
        target="random, 7B-shaped" if target.vocabulary == LARGE[0]["vocab_size"] else "random, small",
        draft="random",
        target_fingerprint="",
        draft_fingerprint="",
        quantization="nf4" if form == "nf4" else "none",
        draft_quantization="none",
        device=target.device.type,
        drafter="plain" if drafter is None else drafter.name,
        context_length=CONTEXT,
        draft_context_length=CONTEXT,
        dtype=dtype,
        draft_dtype=dtype,
    )
    return Pair(info, NoText(), target, drafter, frozenset())
