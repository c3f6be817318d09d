"""Any pair that transformers can read, and the embedded one where more than its lean path is asked for.

In this order, so that what cannot work is refused before anything large moves: the small files of both
models and their architectures (``core.pairs.plan``), their vocabularies id by id, the memory; then the
weights are fetched and loaded (``core.pairs.load_model``), and the models tested as they stand: whether a
draft can be taken back, and how far a token's score depends on its neighbours (``core.models.rows``).
``core.pairs.load`` sees that nothing stays loaded where a step fails.

Nothing falls back silently: ``PairInfo`` names what runs, found by looking at the loaded models, and a note
says where that is less than was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from core.drafters.base import Drafting
from core.drafters.model import ModelDrafter
from core.drafters.untrained import makers
from core.machine.progress import Progress
from core.models import quantize
from core.models.checkpoint import fetch, fingerprint
from core.models.decoder import Decoder, DecoderShape
from core.models.embedded import DRAFTS
from core.models.ends import end_ids
from core.models.linear.findings import Sizes
from core.models.rows import self_test
from core.models.sources import EMBEDDED
from core.models.transformers_decoder import (
    context_length,
)
from core.pairs import distilled
from core.pairs.load_model import Model, load_model
from core.pairs.pair import NO_DRAFT, Pair, warm_up
from core.pairs.plan import Plan, check_memory, dtype_word, is_distilled, plan_models
from core.pairs.spec import PairSpec, draft_folder
from core.pairs.vocabulary import compare
from core.records import PairInfo
from core.settings import SUGGESTIBLE, SettingsError, parse_settings
from core.text.template import NO_TEMPLATE


def load_general(spec: PairSpec, say: Progress) -> Pair:
    """The pair ``spec`` asks for, ready to run. Raises LoadError, and whatever libraries raise."""
    plans = plan_models(spec, say)
    target, draft = plans[0], plans[1] if len(plans) > 1 else None
    device = target.device
    notes = list(compare(target.tokenizer, draft.tokenizer, target.rows, draft.rows)) if draft else []
    check_memory(plans)
    plans = [replace(plan, checkpoint=fetch(plan.checkpoint, say)) for plan in plans]

    loaded = [load_model(plan, say) for plan in plans]
    models = [model for model, _ in loaded]
    for plan, (model, form) in zip(plans, loaded, strict=True):
        notes += _notes(plan, form, dtype_word(_embedding(model).dtype))
        if (reason := getattr(model, "departed", None)) is not None:
            notes.append(f"{plan.name} runs through transformers' own modules, which are slower: {reason}.")
    if not target.tokenizer.chat_template:
        notes.insert(0, NO_TEMPLATE)
    exactness = self_test(models[0], say).sentence
    own, trained = _ways(spec, models, plans, [form for _, form in loaded], say)
    if is_distilled(spec) and device == "cuda" and own.drafter.name == ModelDrafter.name:
        notes.append("The distilled draft runs on the CPU, the target on the card.")
    info = PairInfo(
        pair=spec.name,
        target=target.name,
        target_fingerprint=fingerprint(plans[0].checkpoint, say),
        quantization=loaded[0][1].form,
        dtype=_runs_in(models[0], loaded[0][1]),
        device=models[0].device.type,
        context_length=models[0].context_length,
        exactness_note=exactness,
        **(own.about if own else NO_DRAFT),
    )
    return Pair(
        info=info,
        tokenizer=target.tokenizer,
        target=models[0],
        drafter=own.drafter if own else None,
        end_ids=_end_ids(target),
        suggested=suggested_settings(target.checkpoint.generation_config),
        notes=tuple(notes),
        others={**makers(models[0], info, own), **trained},
    )


def _end_ids(plan: Plan) -> frozenset[int]:
    """Of a target: what a draft's files name may be an ordinary word of it."""
    found = plan.checkpoint
    configs = (found.config, found.config.get("text_config"), found.generation_config)
    return end_ids(plan.tokenizer, *configs, file=found.end_ids)


def suggested_settings(generation_config: Mapping | None) -> dict[str, float]:
    """Fields of ``Settings`` that a generation_config suggests; none where it says not to sample.

    What a person could not set either is passed over.
    """
    given = generation_config or {}
    if given.get("do_sample") is False:
        return {}
    given = {name: given.get(name) for name in SUGGESTIBLE}
    return {name: value for name, value in given.items() if _can_be_set(name, value)}


def _can_be_set(name: str, value: object) -> bool:
    try:
        parse_settings(**{name: value})
    except SettingsError:
        return False
    return type(value) in (int, float)


def _ways(
    spec: PairSpec,
    models: Sequence[Model],
    plans: Sequence[Plan],
    forms: Sequence[quantize.Quantised],
    say: Progress,
) -> tuple[Drafting | None, dict[str, Callable[[], Drafting]]]:
    """The pair's own way to draft, None without one, and what makes the others that were trained."""
    target = models[0]
    name = distilled.default_kind(target)
    files = distilled.shipped(DRAFTS, name) if spec.target == EMBEDDED else {}
    folder, trained = draft_folder(spec.draft), {}
    if files or folder:
        lender = _lender(target, plans[0])
        if folder:
            name, files[name] = distilled.chosen(folder, lender)
        trained = distilled.makers(files, lender, _draft_forms(spec.draft_quantize, plans[0].sizes, say))
        if isinstance(target, Decoder):
            distilled.keep_features(target, files.values())
    if is_distilled(spec):
        say("Packing the draft for this processor", None)
        own = trained.pop(name)()
        warm_up(target, own.drafter, say)
        return own, trained
    if not spec.draft:
        return None, trained
    draft = models[1]
    say("Taking fingerprints of the weights", None)
    about = dict(
        draft=plans[1].name,
        draft_fingerprint=fingerprint(plans[1].checkpoint, say),
        draft_quantization=forms[1].form,
        draft_dtype=_runs_in(draft, forms[1]),
        draft_context_length=draft.context_length,
        drafter=ModelDrafter.name,
    )
    trained.pop(ModelDrafter.name, None)  # of two of one kind the one that was asked for
    return Drafting(ModelDrafter(draft, vocabulary=target.vocabulary), about), trained


def _draft_forms(asked: str, sizes: Sizes, say: Progress) -> distilled.Forms:
    if asked == "none":
        return distilled.Forms("float32", "float32")
    form = quantize.kernel("int8" if asked == "int8" else "int4", sizes, say)
    return distilled.Forms(form, form)


def _lender(target: Model, plan: Plan) -> distilled.Lender:
    embedding = _embedding(target)

    def rows(ids: torch.Tensor) -> torch.Tensor:
        """Of the head, whose weights a lean decoder keeps packed unless they are the embedding's."""
        if plan.config.get_text_config(decoder=True).tie_word_embeddings:
            return embedding[ids.to(embedding.device)]
        if isinstance(target, Decoder):
            return distilled.head_rows(target, ids)
        return target.model.get_output_embeddings().weight.detach()[ids.to(embedding.device)]

    lean = isinstance(target, Decoder)
    shape = target.shape if lean else DecoderShape.from_config(plan.checkpoint.config)
    return distilled.Lender(plan.name, target, shape, embedding.cpu(), rows)


def _embedding(model: Model) -> torch.Tensor:
    if isinstance(model, Decoder):
        return model.embedding
    return model.model.get_input_embeddings().weight.detach()


def _runs_in(model: Model, form: quantize.Quantised) -> str:
    """The dtype a model's products are in: a lean one's quantised products take its activations."""
    lean = isinstance(model, Decoder) and form.form != "none"
    return dtype_word(model.dtype if lean else _embedding(model).dtype)


def _notes(plan: Plan, form: quantize.Quantised, dtype: str) -> list[str]:
    """Sentences on how one model runs, where that is not what one might think; ``dtype`` is that of its
    weights that are not quantised."""
    notes = []
    if dtype != plan.dtype == "float16":
        notes.append(f"{plan.name} computes numbers that float16 does not hold, so it runs in {dtype}.")
    if plan.checkpoint.kind == "gguf":
        runs = dtype if form.form == "none" else form.form
        notes.append(
            f"The weights in {plan.name} were unpacked and run as {runs}, not as the file keeps them."
        )
    if plan.stored_form and form.form == "none":
        notes.append(
            f"{plan.name} comes quantised as {plan.stored_form}, which was unpacked: it runs as {dtype}."
        )
    if (less := form.note(plan.form)) is not None:
        notes.append(f"{plan.name}: {less}")
    held = context_length(plan.config)
    said = getattr(plan.config.get_text_config(decoder=True), "max_position_embeddings", None) or 0
    if held < said:
        notes.append(
            f"{plan.name} is held to {held:,} of its {said:,} tokens: beyond them "
            "it turns positions otherwise, and what was read before would no longer fit."
        )
    return notes
