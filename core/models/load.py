"""From a ``PairSpec`` to a ``Pair`` that runs: the one way to get any pair, the embedded one included.

In this order, so that what cannot work is refused before anything large moves: the small files of both
models, their architectures, their vocabularies id by id, the memory; then the weights are fetched and loaded,
and the models tested as they stand (``core.models.checks``): whether a draft can be taken back,
and how far a token's score depends on its neighbours. Where a step fails nothing stays loaded.

A model of the Llama family runs on the lean decoder (``core.models.decoder``), any other through the modules
of transformers (``core.models.transformers_decoder``). Lean weights are packed from a model that transformers
has read, whose own scores the packed ones must match.

Nothing falls back silently: ``PairInfo`` names what runs, found by looking at the loaded models, and a note
says where that is less than was asked for. Code that comes with a model is never run, and pickled weights,
which are code, are never read.

Run: ``python -m core.models.load --target MODEL [--draft MODEL] ...`` loads a pair and prints what it is.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import transformers
from safetensors import SafetensorError

from core.chat import NO_TEMPLATE
from core.drafters.base import Drafter
from core.drafters.model import ModelDrafter
from core.models import Progress, memory, quantize
from core.models.checkpoint import Checkpoint, fetch, fingerprint, inspect
from core.models.checks import agreement, row_dependence
from core.models.decoder import Decoder, DecoderShape, lean_reason
from core.models.embedded import DRAFT_FILE, load_embedded
from core.models.errors import LoadError
from core.models.linear import best_form
from core.models.pair import Pair, distilled_draft, warm_up
from core.models.spec import EMBEDDED, PairSpec, SpecError, add_pair_arguments, embedded_spec, pair_spec
from core.models.transformers_decoder import (
    TransformersDecoder,
    check_class,
    check_rollback,
    context_length,
    unusable_sentence,
    whole_pass,
)
from core.models.vocabulary import compare
from core.records import PairInfo
from core.terminal import progress_printer
from core.text import end_token_ids

log = logging.getLogger(__name__)

# On a processor with bfloat16 products, models above this many bytes (in 16 bits) run in bfloat16.
# Smaller ones run in float32, whose rounding is so small that a row hardly depends on its neighbours.
LARGE = 1e9
LEAN_FORMS = {"cpu": ("none", "int8", "int4", "nf4"), "cuda": ("none", "nf4")}  # of the lean decoder
SUGGESTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


Model = Decoder | TransformersDecoder


def load_pair(spec: PairSpec, progress: Progress | None = None) -> Pair:
    """The pair ``spec`` asks for, ready to run. Raises LoadError, with nothing left loaded."""
    say = progress or (lambda sentence, fraction: None)
    try:
        return _load_pair(spec, say)
    except LoadError as error:
        sentence = str(error)
    # Only now, when the exception that held on to half a pair is gone.
    _free_memory()
    raise LoadError(sentence)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _load_pair(spec: PairSpec, say: Progress) -> Pair:
    if spec.draft == EMBEDDED and spec.target != EMBEDDED:
        raise LoadError(
            "The embedded draft works with the embedded target only: name another draft with --draft, "
            "or none for the target alone."
        )
    if spec.draft == EMBEDDED and spec.draft_quantize in quantize.BITSANDBYTES:
        raise LoadError(
            f"The embedded draft cannot run as {spec.draft_quantize}: choose --draft-quantize int4, int8 or "
            "none."
        )
    device = choose_device(spec.device)
    if _as_it_comes(spec):
        pair = load_embedded(say)
        return pair if spec.draft else _without_draft(pair)
    return _load_general(spec, device, say)


def _as_it_comes(spec: PairSpec) -> bool:
    """Whether the embedded target is asked for without wishes: it then runs on its own lean path."""
    return (
        spec.target == EMBEDDED
        and spec.quantize == spec.draft_quantize == "auto"
        and spec.device in ("auto", "cpu")
        and spec.dtype in ("auto", "float32")
        and spec.draft in (EMBEDDED, None)
    )


def _without_draft(pair: Pair) -> Pair:
    return replace(pair, drafter=None, info=replace(pair.info, **_NO_DRAFT))


_NO_DRAFT = dict(
    draft="",
    draft_fingerprint="",
    draft_quantization="none",
    draft_dtype="",
    draft_context_length=0,
    drafter="plain",
)


def choose_device(asked: str) -> str:
    """ "cuda" or "cpu". Raises LoadError where a card is asked for and none can be used."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise LoadError(
            "There is no CUDA card that this torch can use: choose --device cpu, or install a torch with "
            "CUDA."
        )
    return "cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu"


def choose_dtype(asked: str, device: str, bytes_16bit: int | None) -> torch.dtype:
    """The dtype of activations and of weights that are not quantised; ``bytes_16bit`` of all weights."""
    if asked != "auto":
        return getattr(torch, asked)
    if device == "cuda":
        return torch.bfloat16
    large = bytes_16bit is not None and bytes_16bit > LARGE
    return torch.bfloat16 if large and torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


@dataclass(frozen=True)
class Plan:
    """How one model of a pair is to run; nothing of it is loaded yet."""

    checkpoint: Checkpoint
    config: transformers.PreTrainedConfig
    tokenizer: transformers.PreTrainedTokenizerBase
    device: str
    form: str  # of ``core.models.spec.QUANTIZE``, but not "auto"
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.checkpoint.name

    @property
    def rows(self) -> int:
        """Width of the logits."""
        return self.config.get_text_config(decoder=True).vocab_size

    @property
    def need(self) -> memory.Need:
        """The most memory it takes: the project's forms are packed from weights that are whole at first."""
        forms = {self.form, "none"} if self.form in ("int8", "int4") else {self.form}
        return memory.Need(self.name, self.form, max(map(self._bytes, forms)))

    def _bytes(self, form: str) -> int:
        config, parameters = self.checkpoint.config, self.checkpoint.parameters
        return memory.needed_bytes(config, form, _word(self.dtype), parameters=parameters) or 0

    @property
    def not_lean(self) -> str | None:
        """Why it runs through transformers' modules, in a few words; None for the lean decoder."""
        if self.checkpoint.kind != "gguf" and self.checkpoint.quantized:
            return "it comes already quantised"
        if self.form not in LEAN_FORMS[self.device]:
            return f"{self.form} is not among the lean forms"
        if self.form == "nf4" and self._bytes("none") > (memory.free_bytes("cpu") or math.inf):
            return "there is too little memory to read it whole before it is quantised"
        return lean_reason(self.config.to_dict())


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _load_general(spec: PairSpec, device: str, say: Progress) -> Pair:
    target = _plan(spec.target, spec.quantize, False, device, spec.dtype, say)
    distilled = spec.draft == EMBEDDED
    draft = None
    if spec.draft and not distilled:
        draft = _plan(spec.draft, spec.draft_quantize, True, device, spec.dtype, say)
    notes = list(compare(target.tokenizer, draft.tokenizer, target.rows, draft.rows)) if draft else []
    plans = [plan for plan in (target, draft) if plan]
    memory.check([plan.need for plan in plans], device)
    plans = [replace(plan, checkpoint=fetch(plan.checkpoint, say)) for plan in plans]

    loaded = [_load_model(plan, say) for plan in plans]
    models = [model for model, _ in loaded]
    notes += [note for plan, (_, form) in zip(plans, loaded, strict=True) for note in _notes(plan, form)]
    if not target.tokenizer.chat_template:
        notes.insert(0, NO_TEMPLATE)
    say("Checking that rows are scored independently", None)
    exactness = row_dependence(models[0]).sentence
    drafter, about_draft = _draft(spec, models, plans, [form for _, form in loaded], say)
    if distilled and device == "cuda":
        notes.append("The embedded draft runs on the CPU, the target on the card.")
    say("Taking fingerprints of the weights", None)
    if draft:
        about_draft["draft_fingerprint"] = fingerprint(plans[1].checkpoint)
    return Pair(
        info=PairInfo(
            pair=spec.name,
            target=target.name,
            target_fingerprint=fingerprint(plans[0].checkpoint),
            quantization=loaded[0][1].form,
            dtype=_runs_in(models[0], loaded[0][1]),
            device=models[0].device.type,
            context_length=models[0].context_length,
            exactness_note=exactness,
            **about_draft,
        ),
        tokenizer=target.tokenizer,
        target=models[0],
        drafter=drafter,
        end_ids=frozenset().union(*map(_end_ids, plans)),
        suggested=suggested_settings(target.checkpoint.generation_config),
        notes=tuple(notes),
    )


def _end_ids(plan: Plan) -> frozenset[int]:
    config = plan.checkpoint.config
    return end_token_ids(plan.tokenizer, config, config.get("text_config"), plan.checkpoint.generation_config)


def suggested_settings(generation_config: Mapping | None) -> dict[str, float]:
    """Fields of ``Settings`` that a generation_config suggests; none where it says not to sample."""
    given = generation_config or {}
    if given.get("do_sample") is False:
        return {}
    given = {name: given.get(name) for name in SUGGESTED}
    return {name: value for name, value in given.items() if type(value) in (int, float)}


def _draft(
    spec: PairSpec,
    models: Sequence[Model],
    plans: Sequence[Plan],
    forms: Sequence[quantize.Quantised],
    say: Progress,
) -> tuple[Drafter | None, dict]:
    """The drafter and the fields of ``PairInfo`` about it (the fingerprint of a model's weights left out)."""
    if not spec.draft:
        return None, dict(_NO_DRAFT)
    target = models[0]
    if spec.draft == EMBEDDED:
        return _embedded_draft(spec, target, plans[0], say)
    draft = models[1]
    return ModelDrafter(draft, vocabulary=target.vocabulary), dict(
        draft=plans[1].name,
        draft_quantization=forms[1].form,
        draft_dtype=_runs_in(draft, forms[1]),
        draft_context_length=draft.context_length,
        drafter=ModelDrafter.name,
    )


def _embedded_draft(spec: PairSpec, target: Model, plan: Plan, say: Progress) -> tuple[Drafter, dict]:
    """The distilled draft, which reads through the embedding of the target that it was made for."""
    asked = spec.draft_quantize
    say("Packing the draft for this processor", None)
    form = {"none": "float32", "int8": best_form("int8")}.get(asked) or best_form("int4")
    head = "float32" if asked == "none" else best_form("int8")
    embedding = _embedding(target).cpu()
    shape = DecoderShape.from_config(plan.checkpoint.config)
    model, head_ids, packed_fingerprint = distilled_draft(DRAFT_FILE, shape, embedding, form, head)
    drafter = ModelDrafter(model, head_ids)
    warm_up(target, drafter)
    return drafter, dict(
        draft=f"distilled, {model.shape.layers} layers",
        draft_fingerprint=packed_fingerprint,
        draft_quantization=form if form in ("int4", "int8") else "none",
        draft_dtype="float32",
        draft_context_length=model.context_length,
        drafter=ModelDrafter.name,
    )


def _embedding(model: Model) -> torch.Tensor:
    if isinstance(model, Decoder):
        return model.embedding
    return model.model.get_input_embeddings().weight.detach()


def _runs_in(model: Model, form: quantize.Quantised) -> str:
    """The dtype a model's products are in: a lean one's quantised products take its activations."""
    lean = isinstance(model, Decoder) and form.form != "none"
    return _word(model.dtype if lean else _embedding(model).dtype)


def _notes(plan: Plan, form: quantize.Quantised) -> list[str]:
    """Sentences on how one model runs, where that is not what one might think."""
    notes = []
    if plan.checkpoint.kind == "gguf":
        runs = _word(plan.dtype) if form.form == "none" else form.form
        notes.append(
            f"The weights in {plan.name} were unpacked and run as {runs}, not as the file keeps them."
        )
    if (less := form.note(plan.form)) is not None:
        notes.append(f"{plan.name}: {less}")
    names, held = plan.config.get_text_config(decoder=True), context_length(plan.config)
    if held < (names.max_position_embeddings or 0):
        notes.append(
            f"{plan.name} is held to {held:,} of its {names.max_position_embeddings:,} tokens: beyond them "
            "it turns positions otherwise, and what was read before would no longer fit."
        )
    return notes


# What the small files say.


def _plan(source: str, asked: str, draft: bool, device: str, dtype: str, say: Progress) -> Plan:
    say(f"Looking at {source}", None)
    checkpoint = inspect(source, say)
    config = _config(checkpoint)
    bytes_16bit = None if checkpoint.parameters is None else 2 * checkpoint.parameters
    gguf = checkpoint.kind == "gguf"
    prepared = None if gguf else checkpoint.quantized
    if prepared and asked != "auto":
        raise LoadError(
            f"{checkpoint.name} comes already quantised ({prepared}): leave --quantize away, "
            "or name the original model."
        )
    return Plan(
        checkpoint,
        config,
        _tokenizer(checkpoint),
        device,
        "none" if prepared else quantize.choose_form(asked, device, draft, bytes_16bit, gguf),
        choose_dtype(dtype, device, bytes_16bit),
    )


def _where(checkpoint: Checkpoint) -> dict:
    """The arguments by which transformers finds a checkpoint: no network, no code but its own."""
    where = dict(
        pretrained_model_name_or_path=checkpoint.folder, local_files_only=True, trust_remote_code=False
    )
    return where | (dict(gguf_file=checkpoint.gguf_file) if checkpoint.gguf_file else {})


def _config(checkpoint: Checkpoint) -> transformers.PreTrainedConfig:
    """The config, of an architecture that can run here. Raises LoadError with what is in the way."""
    name = checkpoint.name
    try:
        config = transformers.AutoConfig.from_pretrained(**_where(checkpoint))
    except Exception as error:  # of many kinds: each library that checks it has its own
        raise LoadError(
            f"The config of {name} cannot be used ({_first_line(error)}): fetch it anew."
        ) from error
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise LoadError(
            f"{name} is of type {config.model_type}, which is no causal language model: choose one "
            "that writes text."
        )
    check_class(model_class, config)
    context_length(config)
    return config


def _tokenizer(checkpoint: Checkpoint) -> transformers.PreTrainedTokenizerBase:
    try:
        return transformers.AutoTokenizer.from_pretrained(**_where(checkpoint))
    except Exception as error:  # as above
        raise LoadError(
            f"The tokenizer of {checkpoint.name} cannot be read ({_first_line(error)}): put its files "
            "beside the weights."
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip().rstrip(".:")


# The weights.


def _load_model(plan: Plan, say: Progress) -> tuple[Model, quantize.Quantised]:
    """The model, tested, and what of it is quantised."""
    say(f"Loading {plan.name}", None)
    transformers.utils.logging.disable_progress_bar()  # progress is told through ``Progress``
    problem = None
    try:
        reason = plan.not_lean
        if reason is None:
            if (decoder := _lean(plan)) is not None:
                return decoder, quantize.count_lean(decoder)
            reason = "its scores came out otherwise"
        log.info("%s runs through transformers' modules: %s", plan.name, reason)
        model = _read(plan)
        quantize.apply(model, plan.form)
        decoder = TransformersDecoder(model)
        say(f"Checking that {plan.name} can take drafts back", None)
        check_rollback(decoder)
        return decoder, quantize.count(model)
    except LoadError:
        raise
    except Exception as error:
        log.info("%s could not be loaded", plan.name, exc_info=True)
        problem = _sentence(plan, error)
    raise LoadError(problem)


def _lean(plan: Plan) -> Decoder | None:
    """The model as a lean decoder; None where it does not score as transformers' own modules do."""
    bits = plan.form == "nf4"  # quantised on its own device, layer by layer, from weights in main memory
    model = _read(replace(plan, form="none", device="cpu") if bits else replace(plan, form="none"))
    uncached = whole_pass(model, min(model.get_input_embeddings().num_embeddings, plan.rows))
    if not uncached.isfinite().all():
        raise LoadError(unusable_sentence(plan.config))
    decoder = Decoder.from_model(
        model,
        quantize.maker(plan.form, plan.dtype),
        quantize.maker(plan.form, plan.dtype, head=True),
        _place(plan.device),
    )
    found = agreement(decoder, uncached)
    # The pass it is compared with was not quantised: a part of the difference is the form's own.
    if not found.holds(0.5 if plan.form == "none" else 1.0):
        log.warning("The lean decoder scores %s otherwise than transformers: %s", plan.name, found)
        return None
    return decoder


def _place(device: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")


def _read(plan: Plan):
    """The model as transformers reads it, complete and wholly on its device."""
    where = {"": _place(plan.device)}
    how = _where(plan.checkpoint) | dict(dtype=plan.dtype, device_map=where, output_loading_info=True)
    if plan.checkpoint.kind == "gguf":
        how |= dict(quantization_config=transformers.GgufConfig(dequantize=True))
    else:
        how |= dict(use_safetensors=True)
        if (config := quantize.loading_config(plan.form)) is not None:
            how |= dict(quantization_config=config)
    model, found = transformers.AutoModelForCausalLM.from_pretrained(**how)
    missing = sorted(found["missing_keys"])
    if missing:
        raise LoadError(
            f"The weights of {plan.name} are incomplete ({len(missing)} missing, the first is {missing[0]}): "
            "fetch them anew."
        )
    return model.eval()


def _sentence(plan: Plan, error: Exception) -> str:
    """One sentence for what went wrong while loading."""
    line = _first_line(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return (
            f"There was too little memory to load {plan.name} on {plan.device}: quantise it (--quantize "
            "nf4), choose a smaller model, or close what else uses the memory."
        )
    if isinstance(error, SafetensorError | OSError):
        return f"The weights of {plan.name} cannot be read ({line}): fetch them anew."
    if plan.form in quantize.BITSANDBYTES:
        return (
            f"bitsandbytes cannot run {plan.name} as {plan.form} on this machine ({line}): choose another "
            "--quantize, for instance none."
        )
    return f"{plan.name} could not be loaded ({line}): check its files, or choose another model."


def main() -> None:
    parser = argparse.ArgumentParser(description="Load a pair and print what it is.")
    add_pair_arguments(parser)
    say = progress_printer(sys.stderr)
    try:
        pair = load_pair(pair_spec(parser.parse_args(), os.environ) or embedded_spec(), say)
    except (LoadError, SpecError) as error:
        say("", None)
        sys.exit(str(error))
    say("", None)
    print(pair.info)
    print(*pair.notes, sep="\n")


if __name__ == "__main__":
    main()
