"""Pairs of the catalogue on a fake card, and what a round of each asks of a card and its host.

    python -m core.bench.fake_pairs                      # the table, as text
    python -m core.bench.fake_pairs --write              # puts it into docs/PERFORMANCE.md

Models have the real shapes and no numbers (``core.bench.fake_card``); rounds are the engine's own. What comes
to the host is scripted: every row of logits thinks one id all but certain, so that drafts stand, repeats of
the text are found, and every round is like the one before. Counts are of such a round: they do not depend on
what models think, but for a tree of which a branch stands (its rows are brought together) and for drafts that
find nothing to propose.

EAGLE and Medusa heads are trained for a target and none is in the catalogue: they get the shapes that
``python -m core.distill`` would give them.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from core.bench.fake_card import CUDA, Counts, FakeCard
from core.bench.random_pair import NoText
from core.drafters.auto import AutoDrafter
from core.drafters.base import Drafter
from core.drafters.eagle import EagleDrafter
from core.drafters.early_exit import EarlyExitDrafter
from core.drafters.medusa import MedusaDrafter
from core.drafters.model import ModelDrafter
from core.drafters.ngram import NgramDrafter
from core.drafters.recycling import RecyclingDrafter
from core.engine import device_figures
from core.engine.loop import Engine
from core.models.asked import settled_form
from core.models.decoder import Decoder, DecoderShape
from core.models.linear.products import DenseLinear
from core.models.quantize import maker
from core.models.transformers_decoder import TransformersDecoder
from core.pairs.catalogue import CATALOGUE, Entry
from core.pairs.pair import Pair
from core.records import PairInfo, Settings
from core.text.terminal import put_out, use_utf8

ID = 7  # what every model here thinks comes next
SURE = 20  # its logit, all others being 0: drawn all but always, and something is left for a tree's siblings
PROMPT = [*range(40), *[ID] * 20]
HEAD = 32_000  # ids that a trained draft scores
MEDUSA_HEADS = 5
ROPE = dict(rms_norm_eps=1e-6, rope_theta=1e6)  # what a catalogue's config leaves out; no count hangs on it


# --- Models ------------------------------------------------------------------------------------------------


def lean(config: Mapping, form: str = "none", dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """A model of the catalogue on the lean decoder, products in ``form``, the rest in ``dtype``."""
    shape = DecoderShape.from_config({**config, **ROPE})
    tensors = {
        f"model.layers.{index}.{name}": _empty(*size, dtype=dtype)
        for index in range(shape.layers)
        for name, size in _layer_sizes(config["model_type"], shape, config["intermediate_size"])
    }
    tensors["model.norm.weight"] = _empty(shape.hidden, dtype=dtype)
    embedding = _empty(config["vocab_size"], shape.hidden, dtype=dtype)
    head = embedding if config["tie_word_embeddings"] else torch.empty_like(embedding)
    made = maker(form, dtype, head=True)(head)
    return Decoder.from_tensors(shape, tensors, maker(form, dtype), embedding, made)


def _layer_sizes(kind: str, shape: DecoderShape, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names, as Hugging Face has them, and sizes of a layer's tensors."""
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    yield from ((f"{name}_layernorm.weight", (hidden,)) for name in ("input", "post_attention"))
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        yield f"self_attn.{name}_proj.weight", (rows, hidden)
        if kind == "qwen2":
            yield f"self_attn.{name}_proj.bias", (rows,)
        if kind == "qwen3" and name != "v":
            yield f"self_attn.{name}_norm.weight", (shape.head_size,)
    yield "self_attn.o_proj.weight", (hidden, queries)
    yield from ((f"mlp.{name}_proj.weight", (inner, hidden)) for name in ("gate", "up"))
    yield "mlp.down_proj.weight", (hidden, inner)


def _empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=CUDA)


def through_transformers(
    config: Mapping, form: str = "none", dtype: torch.dtype = torch.bfloat16
) -> TransformersDecoder:
    """The same through transformers' modules, as a model runs that the lean decoder does not take.

    ``form`` is "none" or "llm-int8".
    """
    import transformers

    made = transformers.AutoConfig.for_model(**config, **ROPE)
    with torch.device(CUDA):
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=dtype).eval().requires_grad_(False)
    if form == "llm-int8":
        for name, module in list(model.model.named_modules()):
            if type(module) is torch.nn.Linear:
                model.model.set_submodule(name, _Int8(module))
    return TransformersDecoder(model)


class _Int8(torch.nn.Module):
    """What ``bitsandbytes.nn.Linear8bitLt`` does in a pass, whose parameters no fake tensor can be."""

    def __init__(self, linear: torch.nn.Linear):
        from bitsandbytes import MatmulLtState

        super().__init__()
        self.bias = linear.bias
        self.state = MatmulLtState()
        self.state.has_fp16_weights, self.state.threshold = False, 0.0
        self.state.CB = torch.empty_like(linear.weight, dtype=torch.int8)
        self.state.SCB = torch.empty_like(linear.weight[:, 0], dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from bitsandbytes import matmul

        return matmul(x, self.state.CB, bias=self.bias, state=self.state)


# --- Drafters and pairs ------------------------------------------------------------------------------------


def _eagle(target: Decoder, layers: Sequence[int]) -> EagleDrafter:
    shape, hidden = target.shape, target.shape.hidden
    sizes = dict(_layer_sizes("llama", shape, target.layers[0].down.shape[1]))
    tensors = {f"layers.0.{name}": _empty(*size, dtype=torch.float32) for name, size in sizes.items()}
    matrices = {"features": len(layers), "token": 1, "state": 1, "proj": 1}
    tensors |= {f"{n}.weight": _empty(hidden, k * hidden, dtype=torch.float32) for n, k in matrices.items()}
    tensors["norm.weight"] = _empty(hidden, dtype=torch.float32)
    return EagleDrafter(tensors=tensors, **_on_target(target, layers))


def _medusa(target: Decoder, layers: Sequence[int]) -> MedusaDrafter:
    hidden, tensors = target.shape.hidden, {}
    for index in range(MEDUSA_HEADS):
        for name, size in (("block.weight", 2), ("block.bias", 1), ("proj.weight", 2)):
            tensors[f"heads.{index}.{name}"] = _empty(*[hidden] * size, dtype=torch.float32)
    return MedusaDrafter(tensors=tensors, **_on_target(target, layers))


def _on_target(target: Decoder, layers: Sequence[int]) -> dict[str, object]:
    """As ``core.pairs.distilled`` makes them on a card."""
    make = lambda weight: DenseLinear(weight.to(target.dtype))  # noqa: E731
    rows = _empty(HEAD, target.shape.hidden, dtype=target.dtype)
    return dict(
        target=target,
        feature_layers=layers,
        head_ids=torch.arange(HEAD),
        rows=rows,
        make=make,
        make_head=make,
    )


def drafters(target, draft=None) -> dict[str, Callable[[], tuple[object, Drafter | None]]]:
    """What makes each way to draft, by name: ``target`` as that way needs it, and the drafter."""
    length = target.context_length
    found: dict[str, Callable] = {"plain": lambda: (target, None)}
    if draft is not None:
        found["model"] = lambda: (target, ModelDrafter(draft, vocabulary=target.vocabulary))
    if isinstance(target, Decoder):
        last = target.shape.layers - 1

        def featured(make: Callable, layers: Sequence[int]) -> tuple[Decoder, Drafter]:
            keeping = copy.copy(target)
            keeping.feature_layers = tuple(sorted({*layers}))
            return keeping, make(keeping, keeping.feature_layers)

        found["eagle"] = lambda: featured(_eagle, (last // 3, 2 * last // 3, last))
        found["medusa"] = lambda: featured(_medusa, (last,))
        found["early-exit"] = lambda: (target, EarlyExitDrafter(target))
    found["ngram"] = lambda: (target, NgramDrafter(length))
    found["recycling"] = lambda: (target, RecyclingDrafter(length))
    found["auto"] = lambda: (target, AutoDrafter(RecyclingDrafter(length), length))
    return found


def pair_of(target, drafter: Drafter | None) -> Pair:
    info = PairInfo(
        pair="fake",
        target="fake",
        draft="fake",
        target_fingerprint="",
        draft_fingerprint="",
        quantization="none",
        draft_quantization="none",
        device="cuda",
        drafter="plain" if drafter is None else drafter.name,
        context_length=target.context_length,
        draft_context_length=0 if drafter is None else drafter.context_length,
        dtype="bfloat16",
        draft_dtype="bfloat16",
    )
    return Pair(info, NoText(), target, drafter, frozenset())


# --- Rounds ------------------------------------------------------------------------------------------------


@dataclass
class Script:
    """What the host gets to see: rows of logits that are sure of ``ID``, and rounds of ``k`` drafts, each the
    first of ``width`` candidates, of which all stand."""

    k: int = 0
    width: int = 1

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.float64 and tensor.dim() == 1:
            return device_figures.all_kept(len(tensor), ID, self.k, self.width)
        made = torch.zeros(tensor.shape, dtype=tensor.dtype)
        if tensor.is_floating_point() and tensor.dim() and tensor.shape[-1] > ID:
            made[..., ID] = SURE
        return made


def a_round(card: FakeCard, pair: Pair, settings: Settings) -> Counts:
    """What a round asks for, from its beginning to what is kept of it, once rounds have become alike."""
    settings = dataclasses.replace(settings, max_new_tokens=8 * (settings.num_draft_tokens + 1))
    card.answer = Script(settings.num_draft_tokens if pair.drafter else 0, settings.tree_width)
    generation = Engine(pair, cache_bytes=0).generate(PROMPT, settings)
    with contextlib.closing(generation):
        before = next(generation, None)
        with card.counting() as counts:
            round_ = next(generation, None)
    if before is None or round_ is None:
        raise RuntimeError(generation.reply.error)
    wanted = settings.num_draft_tokens if pair.drafter else 0
    if round_.num_draft_tokens != wanted or {token.id for token in round_.tokens if token.emitted} != {ID}:
        raise RuntimeError(f"The round was another than the script's: {round_}")
    return counts


def a_pass(card: FakeCard, model, rows: int) -> Counts:
    """What a pass over so many rows asks for, logits in float32 included."""
    with torch.inference_mode():
        cache, ids = model.new_cache(), torch.zeros(rows, dtype=torch.int64, device=CUDA)
        model.prefill(PROMPT, cache)
        with card.counting() as counts:
            model.device_logits(ids, cache)
    return counts


# --- The table ---------------------------------------------------------------------------------------------

PAIRS = ("qwen2.5-7b", "smollm2-1.7b")
K = 4
TREES = ("eagle", "medusa", "recycling")  # drafters that make them
WIDTH = 2
HEADER = ("", "launches", "views", "uploads", "downloads", "waits")
DOCUMENT = Path(__file__).parents[2] / "docs" / "PERFORMANCE.md"
BEGIN, END = "<!-- python -m core.bench.fake_pairs --write -->", "<!-- end of core.bench.fake_pairs -->"


def title(name: str) -> str:
    """Of a pair's table: its models as they run on a card."""
    entry = CATALOGUE[name]
    form = _form(entry)
    return f"{entry.title}, target {'unquantised' if form == 'none' else 'in ' + form.upper()}"


def _form(entry: Entry) -> str:
    return settled_form("auto", "cuda", False, 2 * entry.target_parameters)


def rows(
    card: FakeCard, name: str, layers: Sequence[int] = (), only: Sequence[str] = ()
) -> dict[str, Counts]:
    """What is counted of a pair of the catalogue, by row of its table; ``layers`` are how many its models
    have in place of their own, ``only`` names drafters."""
    entry = CATALOGUE[name]
    configs = [entry.target_model.config, entry.draft_model.config]
    if layers:
        configs = [
            config | dict(num_hidden_layers=count) for config, count in zip(configs, layers, strict=True)
        ]
    target, draft = lean(configs[0], _form(entry)), lean(configs[1])
    found = {"target's pass": a_pass(card, target, 1), "draft's pass": a_pass(card, draft, 1)}
    for drafter, make in drafters(target, draft).items():
        if only and drafter not in only:
            continue
        pair = pair_of(*make())
        for width in (1, WIDTH) if drafter in TREES else (1,):
            settings = Settings(num_draft_tokens=K if pair.drafter else 0, tree_width=width)
            label = drafter if width == 1 else f"{drafter}, tree of {width}"
            found[label] = a_round(card, pair, settings)
    return found


def table(found: Mapping[str, Counts]) -> str:
    lines = [HEADER, ["---"] * len(HEADER)]
    lines += [(label, *(f"{figure:,}" for figure in counts.figures)) for label, counts in found.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def read_table(text: str, name: str) -> dict[str, tuple[int, ...]]:
    """The figures of a pair's table in a document."""
    section = text[text.index(BEGIN) : text.index(END)]
    section = section[section.index(title(name)) :].split("\n\n")[1]
    found = {}
    for line in section.splitlines()[2:]:
        label, *figures = (cell.strip() for cell in line.strip("|").split("|"))
        found[label] = tuple(int(figure.replace(",", "")) for figure in figures)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    use_utf8()
    parser = argparse.ArgumentParser(
        prog="python -m core.bench.fake_pairs", description="Count what a round asks of a card, without one."
    )
    parser.add_argument("--write", action="store_true", help="put the tables into docs/PERFORMANCE.md")
    given = parser.parse_args(arguments)
    parts = []
    with FakeCard() as card:
        for name in PAIRS:
            parts.append(f"{title(name)}:\n\n{table(rows(card, name))}\n")
            put_out(parts[-1])
    if given.write:
        text = DOCUMENT.read_text(encoding="utf-8")
        start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
        DOCUMENT.write_text(text[:start] + "\n\n" + "\n".join(parts) + "\n" + text[end:], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
