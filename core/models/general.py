"""Any pair that transformers can read, and the embedded one where more than its lean path is asked for.

In this order, so that what cannot work is refused before anything large moves: the small files of both
models, their architectures, their vocabularies id by id, the memory; then the weights are fetched and loaded,
and the models tested as they stand: whether a draft can be taken back (``core.models.transformers_decoder``),
and how far a token's score depends on its neighbours (``core.models.rows``). ``core.models.load`` sees that
nothing stays loaded where a step fails.

Nothing falls back silently: ``PairInfo`` names what runs, found by looking at the loaded models, and a note
says where that is less than was asked for. Code that comes with a model is never run, and pickled weights,
which are code, are never read.

A model of the Llama family runs on the lean decoder (``core.models.decoder``), any other through the modules
of transformers (``core.models.transformers_decoder``). Lean weights are packed from a model that transformers
has read, whose own scores the packed ones must match.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import transformers
from safetensors import SafetensorError

from core.chat import NO_TEMPLATE
from core.drafters.base import Drafting
from core.drafters.model import ModelDrafter
from core.drafters.untrained import makers
from core.models import Progress, distilled, memory, quantize, silent
from core.models.checkpoint import Checkpoint, fetch, fingerprint, inspect
from core.models.decoder import Decoder, DecoderShape, lean_reason
from core.models.embedded import DRAFTS
from core.models.errors import LoadError, first_line, is_out_of_memory
from core.models.linear import best_form
from core.models.pair import NO_DRAFT, Pair, warm_up
from core.models.rows import difference, ids_below, row_dependence
from core.models.spec import EMBEDDED, PairSpec, draft_folder, quantize_flag
from core.models.transformers_decoder import (
    ROUNDING,
    TransformersDecoder,
    check_class,
    check_rollback,
    context_length,
    whole_pass,
)
from core.models.vocabulary import compare
from core.records import PairInfo
from core.settings import SUGGESTIBLE, SettingsError, parse_settings
from core.text import end_token_ids

log = logging.getLogger(__name__)

LEAN_FORMS = {"cpu": ("none", "int8", "int4", "nf4"), "cuda": ("none", "nf4")}  # of the lean decoder
LEAST_KNOWN = 10  # a tokenizer knows at least one of so many ids that its model has; the rest is padding
QUICK = 500_000_000  # parameters below which a pass is so quick on a processor that every row count is tested


Model = Decoder | TransformersDecoder


def choose_device(asked: str) -> str:
    """ "cuda" or "cpu". Raises LoadError where a card is asked for and none can be used."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise LoadError(
            "There is no CUDA card that this torch can use: choose --device cpu, or install a torch with "
            "CUDA."
        )
    return "cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Plan:
    """How one model of a pair is to run; nothing of it is loaded yet."""

    checkpoint: Checkpoint
    config: transformers.PreTrainedConfig
    tokenizer: transformers.PreTrainedTokenizerBase
    draft: bool
    device: str
    form: str  # of ``core.models.spec.QUANTIZE``, but not "auto"
    dtype: str

    @property
    def name(self) -> str:
        return self.checkpoint.name

    @property
    def rows(self) -> int:
        """Width of the logits."""
        return self.config.get_text_config(decoder=True).vocab_size

    @property
    def flag(self) -> str:
        return quantize_flag(self.draft)

    @property
    def stored_form(self) -> str | None:
        """How the weights come quantised, where they run as they come."""
        return None if self.checkpoint.kind == "gguf" else self.checkpoint.quantized

    @property
    def not_lean(self) -> str | None:
        """Why it runs through transformers' modules, in a few words; None for the lean decoder."""
        found = self.checkpoint
        if self.stored_form:
            return "it comes already quantised"
        if self.form not in LEAN_FORMS[self.device]:
            return f"{self.form} is not among the lean forms"
        whole = memory.needed_to_load(found.config, "none", self.dtype, found.parameters, None)
        if self.form == "nf4" and (whole or 0) > (memory.free_bytes("cpu") or math.inf):
            return "there is too little memory to read it whole before it is quantised"
        return lean_reason(self.config.to_dict())

    @property
    def need(self) -> memory.Need:
        """The most memory it takes on its device."""
        found = self.checkpoint
        stored = found.weight_bytes if self.stored_form else None
        size = memory.needed_to_load(found.config, self.form, self.dtype, found.parameters, stored)
        if self.device == "cpu":
            size = max(size or 0, self.unpacking.bytes)
        smaller = None if self.form == "nf4" or found.quantized else f"{self.flag} nf4"
        return memory.Need(self.name, self.stored_form or self.form, size or 0, smaller)

    @property
    def unpacking(self) -> memory.Need:
        """Of the processor's memory: a GGUF file is unpacked there to float32, wherever it is to run."""
        found = self.checkpoint
        whole = memory.DTYPE_BYTES["float32"] * (found.parameters or 0) if found.kind == "gguf" else 0
        return memory.Need(self.name, "unpacked", whole)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load_general(spec: PairSpec, say: Progress) -> Pair:
    """The pair ``spec`` asks for, ready to run. Raises LoadError, and whatever libraries raise."""
    plans = plan_models(spec, say)
    target, draft = plans[0], plans[1] if len(plans) > 1 else None
    device = target.device
    notes = list(compare(target.tokenizer, draft.tokenizer, target.rows, draft.rows)) if draft else []
    memory.check([plan.need for plan in plans], device)
    for plan in plans:  # one after the other: nothing of the first is left there
        if device == "cuda" and plan.unpacking.bytes:
            memory.check([plan.unpacking], "cpu")
    plans = [replace(plan, checkpoint=fetch(plan.checkpoint, say)) for plan in plans]

    loaded = [_load_model(plan, say) for plan in plans]
    models = [model for model, _ in loaded]
    notes += [note for plan, (_, form) in zip(plans, loaded, strict=True) for note in _notes(plan, form)]
    if not target.tokenizer.chat_template:
        notes.insert(0, NO_TEMPLATE)
    say("Checking that rows are scored independently", None)
    is_quick = device == "cuda" or (target.checkpoint.parameters or QUICK) < QUICK
    exactness = row_dependence(models[0], thorough=is_quick).sentence
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
        end_ids=frozenset().union(*map(_end_ids, plans)),
        suggested=suggested_settings(target.checkpoint.generation_config),
        notes=tuple(notes),
        others={**makers(models[0], info, own), **trained},
    )


def is_distilled(spec: PairSpec) -> bool:
    """Whether the draft is one that was trained for the target and runs over its weights."""
    return spec.draft == EMBEDDED or draft_folder(spec.draft) is not None


def _check_distilled_draft(spec: PairSpec) -> None:
    if not is_distilled(spec):
        return
    name = "The embedded draft" if spec.draft == EMBEDDED else f"The draft {spec.draft}"
    if spec.draft == EMBEDDED and spec.target != EMBEDDED:
        raise LoadError(
            f"{name} works with the embedded target only: name another draft with --draft, "
            "or none for the target alone."
        )
    if spec.draft_quantize in quantize.BITSANDBYTES:
        raise LoadError(
            f"{name} cannot run as {spec.draft_quantize}: choose --draft-quantize int4, int8 or none."
        )


def _end_ids(plan: Plan) -> frozenset[int]:
    config = plan.checkpoint.config
    return end_token_ids(plan.tokenizer, config, config.get("text_config"), plan.checkpoint.generation_config)


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
        trained = distilled.makers(files, lender, _draft_forms(spec.draft_quantize))
        if isinstance(target, Decoder):
            distilled.keep_features(target, files.values())
    if is_distilled(spec):
        say("Packing the draft for this processor", None)
        own = trained.pop(name)()
        warm_up(target, own.drafter)
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


def _draft_forms(asked: str) -> distilled.Forms:
    if asked == "none":
        return distilled.Forms("float32", "float32")
    form = best_form("int8" if asked == "int8" else "int4")
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
    return _word(model.dtype if lean else _embedding(model).dtype)


def _notes(plan: Plan, form: quantize.Quantised) -> list[str]:
    """Sentences on how one model runs, where that is not what one might think."""
    notes = []
    if plan.checkpoint.kind == "gguf":
        runs = plan.dtype if form.form == "none" else form.form
        notes.append(
            f"The weights in {plan.name} were unpacked and run as {runs}, not as the file keeps them."
        )
    if plan.stored_form and form.form == "none":
        notes.append(
            f"{plan.name} comes quantised as {plan.stored_form}, which was unpacked: it runs as {plan.dtype}."
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


# What the small files say.


def plan_models(spec: PairSpec, say: Progress = silent) -> list[Plan]:
    """How the models of a pair would run, target first; the distilled draft is none of them.

    Only small files are fetched. Raises LoadError for what speaks against the pair already.
    """
    _check_distilled_draft(spec)
    device = choose_device(spec.device)
    plans = [_plan(spec.target, spec.quantize, False, device, spec.dtype, say)]
    if spec.draft and not is_distilled(spec):
        plans.append(_plan(spec.draft, spec.draft_quantize, True, device, spec.dtype, say))
    return plans


def _plan(source: str, asked: str, draft: bool, device: str, dtype: str, say: Progress) -> Plan:
    say(f"Looking at {source}", None)
    checkpoint = inspect(source, say)
    config = _config(checkpoint)
    bytes_16bit = None if checkpoint.parameters is None else 2 * checkpoint.parameters
    gguf = checkpoint.kind == "gguf"
    prepared = None if gguf else checkpoint.quantized
    if prepared and asked != "auto":
        raise LoadError(
            f"{checkpoint.name} comes already quantised ({prepared}): leave {quantize_flag(draft)} away, "
            "or name the original model."
        )
    if prepared:
        quantize.keep_rows_apart(config)
    return Plan(
        checkpoint,
        config,
        _tokenizer(checkpoint, config),
        draft,
        device,
        "none" if prepared else quantize.choose_form(asked, device, draft, bytes_16bit, gguf),
        memory.choose_dtype(dtype, device, bytes_16bit),
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
            f"The config of {name} cannot be used ({first_line(error)}): fetch it anew."
        ) from error
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise LoadError(
            f"{name} is of type {config.model_type}, which is no causal language model: choose one "
            "that writes text."
        )
    check_class(model_class, config)
    if type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        raise LoadError(
            f"{name} is of type {config.model_type}, which fills gaps in a text and does not go on with it: "
            "choose one that writes text."
        )
    context_length(config)
    return config


def _tokenizer(checkpoint: Checkpoint, config) -> transformers.PreTrainedTokenizerBase:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**_where(checkpoint))
    except Exception as error:  # as above
        raise LoadError(
            f"The tokenizer of {checkpoint.name} cannot be read ({first_line(error)}): put its files "
            "beside the weights."
        ) from error
    # Of some types transformers makes one without any file, which knows a few special tokens and no text.
    if len(tokenizer) * LEAST_KNOWN < config.get_text_config(decoder=True).vocab_size:
        raise LoadError(
            f"The tokenizer of {checkpoint.name} cannot be read: put its files beside the weights."
        )
    return tokenizer


# The weights.


def _load_model(plan: Plan, say: Progress) -> tuple[Model, quantize.Quantised]:
    """The model, tested, and what of it is quantised."""
    say(f"Loading {plan.name}", None)
    transformers.utils.logging.disable_progress_bar()  # progress is told through ``Progress``
    problem = None
    try:
        reason = plan.not_lean
        if reason is None:
            if (lean := _lean(plan)) is not None:
                return lean, quantize.count_lean(lean)
            reason = "its scores came out otherwise"
        log.info("%s runs through transformers' modules: %s", plan.name, reason)
        model = _read(plan)
        quantize.apply(model, plan.form)
        decoder = TransformersDecoder(model)
        say(f"Checking that {plan.name} can take drafts back", None)
        check_rollback(decoder)
        return decoder, quantize.count(model, plan.stored_form)
    except LoadError:
        raise
    except Exception as error:
        log.info("%s could not be loaded", plan.name, exc_info=True)
        problem = _sentence(plan, error)
    raise LoadError(problem)


def _lean(plan: Plan) -> Decoder | None:
    """The model as a lean decoder; None where it does not score as transformers' own modules do."""
    # NF4 is packed on its own device, layer by layer, from weights in main memory.
    model = _read(replace(plan, form="none", device="cpu" if plan.form == "nf4" else plan.device))
    size = min(model.get_input_embeddings().num_embeddings, plan.rows)
    first, others, strange = (ids_below(size, count, count) for count in (5, 4, 6))
    whole = whole_pass(model, first + others)[len(first) :]  # before its weights are taken out of it
    dtype = getattr(torch, plan.dtype)
    decoder = Decoder.from_model(
        model,
        quantize.maker(plan.form, dtype),
        quantize.maker(plan.form, dtype, head=True),
        _place(plan.device),
    )

    def after(prefix: Sequence[int]) -> torch.Tensor:
        return decoder.logits([*prefix, *others], decoder.new_cache())[len(prefix) :]

    # Rounding is large in 16 bits, and after quantisation the difference is the form's own too: measured
    # against what another beginning would have made of it.
    found, other = difference(after(first), whole), difference(after(strange), whole)
    if found <= max(ROUNDING, other / 2 if plan.form == "none" else other):
        return decoder
    log.warning("The lean decoder scores %s otherwise than transformers: by %.1e", plan.name, found)
    return None


def _place(device: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")


def _read(plan: Plan):
    """The model as transformers reads it, complete and wholly on its device."""
    where = {"": _place(plan.device)}
    how = _where(plan.checkpoint) | dict(
        dtype=getattr(torch, plan.dtype), device_map=where, output_loading_info=True
    )
    if plan.checkpoint.kind == "gguf":
        how |= dict(quantization_config=transformers.GgufConfig(dequantize=True))
    else:
        how |= dict(use_safetensors=True)
        if plan.stored_form:
            how |= dict(config=plan.config)
        if (config := quantize.loading_config(plan.form, plan.dtype)) is not None:
            how |= dict(quantization_config=config)
    model, found = transformers.AutoModelForCausalLM.from_pretrained(**how, ignore_mismatched_sizes=True)
    _check_weights(plan, type(model).__name__, found)
    return model.eval()


def _check_weights(plan: Plan, kind: str, found: Mapping) -> None:
    """Raises LoadError unless the weights are a whole ``kind``: all its tensors, of its sizes, and no others.

    ``found`` is what transformers says of them; it would make up what is missing and drop what is too much.
    """
    name, made_for = plan.name, plan.checkpoint.config.get("architectures")
    missing = sorted(found["missing_keys"])
    unused = sorted(key for key in found["unexpected_keys"] if not _is_spare(plan, key))
    wrong = sorted((key, [*has], [*needed]) for key, has, needed in found["mismatched_keys"])
    if (missing or unused) and isinstance(made_for, list) and made_for and kind not in made_for:
        what = f"{len(missing)} missing" if missing else f"{len(unused)} left over"
        raise LoadError(
            f"The weights of {name} are those of a {made_for[0]}, and its config makes a {kind} of them "
            f"({what}, the first is {(missing or unused)[0]}): choose a model that writes text, or mend its "
            "config."
        )
    if missing:
        raise LoadError(
            f"The weights of {name} are incomplete ({len(missing)} missing, the first is {missing[0]}): "
            "fetch them anew."
        )
    if unused:
        raise LoadError(
            f"The weights of {name} do not go with its config, which leaves {len(unused)} of them unused "
            f"(the first is {unused[0]}): fetch it anew."
        )
    if wrong:
        key, has, needed = wrong[0]
        raise LoadError(
            f"The weights of {name} do not go with its config, which gives {len(wrong)} of them another size "
            f"(the first is {key}, {needed} and not {has}): fetch it anew."
        )


def _is_spare(plan: Plan, key: str) -> bool:
    """Whether a tensor that the model does not use says only what its config says: positions and masks, and
    what belongs to the form of weights that come quantised.
    """
    helps = plan.stored_form and not key.endswith(("weight", ".bias"))
    return bool(helps or key.endswith(("inv_freq", "rope_freqs.weight", "masked_bias", "position_ids")))


def _sentence(plan: Plan, error: Exception) -> str:
    """One sentence for what went wrong while loading."""
    line = first_line(error)
    if is_out_of_memory(error):
        quantise = f"quantise it ({plan.need.smaller}), " if plan.need.smaller else ""
        return (
            f"There was too little memory to load {plan.name} on {plan.device}: {quantise}choose a smaller "
            "model, or close what else uses the memory."
        )
    if isinstance(error, SafetensorError | OSError):
        return f"The weights of {plan.name} cannot be read ({line}): fetch them anew."
    if plan.form in quantize.BITSANDBYTES:
        return (
            f"bitsandbytes cannot run {plan.name} as {plan.form} on this machine ({line}): choose another "
            f"{plan.flag}, for instance none."
        )
    return f"{plan.name} could not be loaded ({line}): check its files, or choose another model."
