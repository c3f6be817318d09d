"""A draft and a target that share a tokenizer, ready to run.

Knows how to put together the embedded pair from files that are already there;
``core.models.embedded`` fetches and converts them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from core.auto_k import Costs
from core.drafters.base import Drafter
from core.drafters.model import ModelDrafter
from core.models import Progress
from core.models.base import Scorer
from core.models.checks import row_dependence
from core.models.decoder import Decoder, DecoderShape
from core.models.draft_file import HEAD, draft_metadata, load_draft
from core.models.linear import FORMS, best_form
from core.records import PairInfo, Settings
from core.text import end_token_ids


@dataclass
class Pair:
    """``end_ids`` end a reply; ``drafter`` is None where the target writes alone.

    ``suggested`` holds fields of ``Settings`` that the target's ``generation_config`` names: shown as a
    suggestion, never applied unasked. ``notes`` are sentences to show with the pair. ``costs`` are what its
    passes take on this machine (``core.calibration``): with them K can be chosen automatically, which begins
    by expecting ``acceptance``.
    """

    info: PairInfo
    tokenizer: object
    target: Scorer
    drafter: Drafter | None
    end_ids: frozenset[int]
    suggested: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    costs: Costs | None = None
    acceptance: float = 0.5


def build_embedded_pair(
    folder: Path, draft_file: Path, target_fingerprint: str, progress: Progress | None = None
) -> Pair:
    """The embedded pair from a converted Hugging Face folder and a packed draft.

    Where the processor can, layers run in 4 bits (the target's on the levels of the file they came
    from) and heads in int8 (``core.models.linear``).
    """
    say = progress or (lambda sentence, fraction: None)
    say("Reading the target's weights", None)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    shape = DecoderShape.from_config(config)
    embedding = tensors["model.embed_tokens.weight"]
    say("Packing the weights for this processor", None)
    form, head_form = best_form("int4"), best_form("int8")
    target = Decoder.from_tensors(shape, tensors, FORMS[form], embedding, FORMS[head_form](embedding))
    draft, head_ids, draft_fingerprint = distilled_draft(draft_file, shape, embedding, form, head_form)
    say("Checking that rows are scored independently", None)
    note = row_dependence(target).sentence
    drafter = ModelDrafter(draft, head_ids)
    say("Warming up", None)
    warm_up(target, drafter)
    say("Reading the tokenizer", None)
    # Not AutoTokenizer, which gives the same here but imports model code for a second first.
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    generation = json.loads((folder / "generation_config.json").read_text())
    return Pair(
        info=PairInfo(
            pair="embedded",
            target="SmolLM2-135M-Instruct",
            draft=f"distilled, {draft.shape.layers} layers",
            target_fingerprint=target_fingerprint,
            draft_fingerprint=draft_fingerprint,
            quantization=form,
            draft_quantization=form,
            device="cpu",
            drafter=ModelDrafter.name,
            context_length=shape.context_length,
            draft_context_length=draft.shape.context_length,
            exactness_note=note,
        ),
        tokenizer=tokenizer,
        target=target,
        drafter=drafter,
        end_ids=end_token_ids(tokenizer, config, generation),
    )


@torch.inference_mode()
def warm_up(target: Scorer, drafter: ModelDrafter) -> None:
    """One short pass of each kind: kernels set themselves up at first use, which a first reply would feel."""
    ids = list(range(64))
    cache, state = target.new_cache(), drafter.new_state()
    target.prefill(ids, cache)
    drafter.prefill(ids, state)
    for rows in range(1, Settings().num_draft_tokens + 2):
        target.logits(ids[:rows], cache)
    drafter.model.next_logits(ids[:1], state)
    drafter.model.next_logits(ids[:2], state)


def distilled_draft(
    file: Path, target: DecoderShape, embedding: torch.Tensor, form: str, head_form: str
) -> tuple[Decoder, torch.Tensor, str]:
    """The packed draft as a decoder over the target's embedding, its head's ids and its fingerprint.

    ``target`` is the shape of the model it was made for, ``embedding`` that model's, (vocabulary, hidden).
    """
    packed = load_draft(file)
    tensors = {
        name: value[0] * value[1][:, None] if isinstance(value, tuple) else value
        for name, value in packed.items()
    }
    layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))
    head_ids = tensors[HEAD].long().sort().values
    project = FORMS[head_form](tensors["proj.weight"])
    score = FORMS[head_form](embedding[head_ids])
    shape = replace(target, layers=layers)
    decoder = Decoder.from_tensors(
        shape, tensors, FORMS[form], embedding, lambda hidden: score(project(hidden)), "", len(head_ids)
    )
    return decoder, head_ids, draft_metadata(file)["fingerprint"]
