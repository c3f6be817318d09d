"""One model of a pair, read by transformers as its plan says and tested as it stands.

A model of the Llama family runs on the lean decoder (``core.models.decoder``), any other through the modules
of transformers (``core.models.transformers_decoder``). Lean weights are packed layer by layer
(``core.models.by_layer``), and must score what transformers' modules score with the weights as they are in
the files. Pickled weights, which are code, are never read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import transformers
from safetensors import SafetensorError

from core.machine.progress import Progress
from core.models import memory, quantize, rotary
from core.models.by_layer import TABLE, Skeleton
from core.models.decoder import Decoder
from core.models.errors import LoadError, UnusableNumbers, first_line, is_out_of_memory
from core.models.rows import difference, ids_below
from core.models.tensors import open_tensors
from core.models.transformers_decoder import ROUNDING, TransformersDecoder, check_rollback
from core.pairs.plan import Plan, where_from

log = logging.getLogger(__name__)

Model = Decoder | TransformersDecoder
SIZES = "max_position_embeddings", "hidden_size", "num_attention_heads"


def load_model(plan: Plan, say: Progress) -> tuple[Model, quantize.Quantised]:
    """The model, tested, and what of it is quantised.

    In float32 where float16 was planned and does not reach: its largest number is 65,504, and the residual
    stream of some models is beyond that.

    Raises LoadError.
    """
    try:
        return _loaded(plan, say)
    except UnusableNumbers:
        if plan.dtype != "float16":
            raise
    # Only now, when the exception that held on to the model is gone.
    log.warning("%s overflows in float16, and is loaded anew in float32", plan.name)
    plan = replace(plan, dtype="float32")
    memory.release()
    memory.check([plan.need], plan.device)
    return _loaded(plan, say)


def _loaded(plan: Plan, say: Progress) -> tuple[Model, quantize.Quantised]:
    say(f"Loading {plan.name}", None)
    transformers.utils.logging.disable_progress_bar()  # progress is told through ``Progress``
    problem = None
    try:
        reason, departed = plan.not_lean, None
        if reason is None:
            lean, reason = _lean(plan, say)
            if lean is not None:
                return lean, quantize.count_lean(lean)
            _check_what_is_left(plan, reason)
            departed = reason
        log.info("%s runs through transformers' modules: %s", plan.name, reason)
        model = _read(plan)
        _check_rotary(plan, model)
        quantize.apply(model, plan.form, plan.sizes)
        decoder = TransformersDecoder(model, departed)
        say(f"Checking that {plan.name} can take drafts back", None)
        check_rollback(decoder)
        return decoder, quantize.count(model, plan.stored_form)
    except LoadError:
        raise
    except Exception as error:
        log.info("%s could not be loaded", plan.name, exc_info=True)
        problem = _sentence(plan, error)
    raise LoadError(problem)


def _lean(plan: Plan, say: Progress) -> tuple[Decoder | None, str]:
    """The model as a lean decoder; None, and why not, where it does not score as transformers' own modules do
    or its files are not what its config says."""
    dtype, device = getattr(torch, plan.dtype), _place(plan.device)
    skeleton = Skeleton(plan.config, dtype)
    tensors = open_tensors(plan.checkpoint, plan.config, skeleton.wanted)
    if not skeleton.fits(tensors, partial(_is_spare, plan)):
        return None, "its files hold other tensors than its config says"
    size = min(skeleton.wanted[TABLE][0], plan.rows)
    first, others, strange = (ids_below(size, count, count) for count in (5, 4, 6))
    made = skeleton.pack(
        tensors,
        device,
        quantize.maker(plan.form, dtype, sizes=plan.sizes),
        quantize.maker(plan.form, dtype, head=True, sizes=plan.sizes),
        quantize.cache_dtype(plan.form, plan.device, plan.sizes),
        first + others,
        partial(say, f"Loading {plan.name}"),
    )
    if made is None:
        return None, "its head is said to be its embedding, and is another"
    decoder, whole = made[0], made[1][len(first) :]

    def after(prefix: Sequence[int]) -> torch.Tensor:
        return decoder.logits([*prefix, *others], decoder.new_cache())[len(prefix) :]

    # Rounding is large in 16 bits, and after quantisation the difference is the form's own too: measured
    # against what another beginning would have made of it.
    ours = after(first)
    if not ours.amax(-1).isfinite().all():
        raise UnusableNumbers(
            f"{plan.name} gives unusable numbers in {plan.dtype}: choose another --dtype, as float32."
        )
    found, other = difference(ours, whole), difference(after(strange), whole)
    meant = _meant(plan)
    if meant is not None and (fault := rotary.table_fault(meant, decoder.rotations[:, 0])) is not None:
        log.warning("The lean decoder turns the positions of %s otherwise than meant: %s", plan.name, fault)
        return None, "its positions would be turned otherwise than its files say"
    if found <= max(ROUNDING, other / 2 if plan.form == "none" else other):
        return decoder, ""
    log.warning("The lean decoder scores %s otherwise than transformers: by %.1e", plan.name, found)
    return None, "its scores came out otherwise"


def _check_what_is_left(plan: Plan, reason: str) -> None:
    """Raises LoadError where a model that cannot be packed layer by layer cannot be read whole either."""
    if plan.checkpoint.kind == "gguf" and plan.form in quantize.BITSANDBYTES:
        raise LoadError(
            f"{plan.name} cannot be packed as {plan.form}, since {reason}: choose {plan.flag} none, or name "
            "the original model instead of the file."
        )
    memory.release()  # what was packed of it
    memory.check([plan.need_whole], plan.device)
    if plan.device == "cuda":
        memory.check([plan.passing_whole], "cpu")


def _meant(plan: Plan) -> rotary.Rotary | None:
    """The rotary embedding by the files' own words, read here once more; None where that is not known."""
    found = plan.checkpoint
    if found.kind == "gguf":
        return found.rotary
    # Sizes that a file leaves out are the family's own.
    said = {**{key: value for key, value in plan.config.to_dict().items() if key in SIZES}, **found.config}
    return rotary.of_config(said, getattr(type(plan.config), "default_theta", 10000.0))


def _check_rotary(plan: Plan, model) -> None:
    """Raises LoadError where transformers turns a GGUF file's positions otherwise than the file says: it
    knows few of the ways in which such files are written, and passes over the others without a word."""
    meant = plan.checkpoint.rotary
    if meant is not None and (fault := rotary.module_fault(meant, model)) is not None:
        raise LoadError(
            f"The rotary embedding of {plan.name} would not be run as its file says ({fault}): use the same "
            "model in safetensors."
        )


def _place(device: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")


def _read(plan: Plan):
    """The model as transformers reads it, complete and wholly on its device."""
    where = {"": _place(plan.device)}
    how = where_from(plan.checkpoint) | dict(
        dtype=getattr(torch, plan.dtype), device_map=where, output_loading_info=True
    )
    if plan.checkpoint.kind == "gguf":
        how |= dict(quantization_config=transformers.GgufConfig(dequantize=True), config=plan.config)
    else:
        how |= dict(use_safetensors=True)
        if plan.stored_form:
            how |= dict(config=plan.config)
        if (config := quantize.loading_config(plan.form, plan.dtype, plan.device)) is not None:
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


def _shortage(plan: Plan) -> str:
    """What was needed and what is free, where both can be told."""
    free = memory.free_bytes(plan.device)
    if free is None or not plan.need.bytes:
        return ""
    return f" (it needs about {memory.gigabytes(plan.need.bytes)}, and {memory.gigabytes(free)} are free)"


def _sentence(plan: Plan, error: Exception) -> str:
    """One sentence for what went wrong while loading."""
    line = first_line(error)
    if is_out_of_memory(error):
        quantise = f"quantise it ({plan.need.smaller}), " if plan.need.smaller else ""
        return (
            f"There was too little memory to load {plan.name} on {plan.device}{_shortage(plan)}: {quantise}"
            "choose a smaller model, or close what else uses the memory."
        )
    if isinstance(error, SafetensorError | OSError):
        return f"The weights of {plan.name} cannot be read ({line}): fetch them anew."
    if plan.form in quantize.BITSANDBYTES:
        return (
            f"bitsandbytes cannot run {plan.name} as {plan.form} on this machine ({line}): choose another "
            f"{plan.flag}, for instance none."
        )
    return f"{plan.name} could not be loaded ({line}): check its files, or choose another model."
