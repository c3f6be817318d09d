"""How the models of a pair would run, decided from their small files: before anything large moves.

Refuses what speaks against a pair already: an architecture that cannot run here, a tokenizer that cannot be
read, a quantisation that does not go with the weights. Code that comes with a model is never run. Reads no
weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers

from core.machine.progress import Progress, silent
from core.models import card, memory, quantize, rotary
from core.models.asked import quantize_flag
from core.models.checkpoint import Checkpoint, inspect
from core.models.decoder import lean_reason
from core.models.errors import LoadError, first_line, is_out_of_memory, too_little_memory
from core.models.linear.findings import Sizes
from core.models.sizes import sizes_of
from core.models.sources import EMBEDDED
from core.models.transformers_decoder import check_class, context_length
from core.pairs.spec import PairSpec, draft_folder

LEAN_FORMS = {  # of the lean decoder
    "cpu": ("none", "int8", "int4", "nf4", "llm-int8"),
    "cuda": ("none", "nf4", "llm-int8"),
}
LEAST_KNOWN = 10  # a tokenizer knows at least one of so many ids that its model has; the rest is padding


def choose_device(asked: str) -> str:
    """ "cuda" or "cpu". Raises LoadError where a card is asked for and none can be used, and
    where there is one that this torch has no kernels for: nothing falls back silently."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise LoadError(
            "There is no CUDA card that this torch can use: choose --device cpu, or install a torch with "
            "CUDA."
        )
    if asked == "cpu" or not torch.cuda.is_available():
        return "cpu"
    if (problem := card.unknown()) is not None:
        raise LoadError(problem)
    return "cuda"


@dataclass(frozen=True)
class Plan:
    """How one model of a pair is to run; nothing of it is loaded yet."""

    checkpoint: Checkpoint
    config: transformers.PreTrainedConfig
    tokenizer: transformers.PreTrainedTokenizerBase
    draft: bool
    device: str
    form: str  # of ``core.models.asked.QUANTIZE``, but not "auto"
    dtype: str

    @property
    def name(self) -> str:
        return self.checkpoint.name

    @property
    def rows(self) -> int:
        """Width of the logits."""
        return self.config.get_text_config(decoder=True).vocab_size

    @property
    def sizes(self) -> Sizes:
        """Of its products, for the evidence on which kernels run."""
        return sizes_of(self.config)

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
        if self.stored_form:
            return "it comes already quantised"
        if self.form not in LEAN_FORMS[self.device]:
            return f"{self.form} is not among the lean forms"
        return lean_reason(self.config.to_dict())

    @property
    def need(self) -> memory.Need:
        """The most memory it takes on its device."""
        return self._need(lean=self.not_lean is None)

    @property
    def need_whole(self) -> memory.Need:
        """The same where transformers reads it after all, since its files are not as its config says."""
        return self._need(lean=False)

    def _need(self, lean: bool) -> memory.Need:
        found = self.checkpoint
        stored = found.weight_bytes if self.stored_form else None
        size = memory.needed_to_load(
            found.config, self.form, self.dtype, self.device, found.parameters, stored, lean
        )
        if self.device == "cpu" and not lean:
            size = max(size or 0, self._unpacked)
        smaller = f"{self.flag} nf4" if self._can_be_smaller else None
        return memory.Need(self.name, self.stored_form or self.form, size or 0, smaller)

    @property
    def passing(self) -> memory.Need:
        """Of the processor's memory, while a model is read that is to run on a card: a part of it at a time,
        or all that transformers unpacks there to float32."""
        if self.not_lean is not None:
            return self.passing_whole
        size = memory.size_of(self.checkpoint.config)
        return memory.Need(self.name, "while it is read", 0 if size is None else size.read(self.dtype))

    @property
    def passing_whole(self) -> memory.Need:
        """The same of a model that transformers reads."""
        return memory.Need(self.name, "while it is read", self._unpacked)

    @property
    def _unpacked(self) -> int:
        """Bytes of a GGUF file as transformers reads it, whatever its form."""
        found = self.checkpoint
        return memory.DTYPE_BYTES["float32"] * (found.parameters or 0) if found.kind == "gguf" else 0

    @property
    def _can_be_smaller(self) -> bool:
        """Whether NF4 is to be had and would help."""
        if self.form == "nf4" or self.stored_form:
            return False
        return self.checkpoint.kind != "gguf" or lean_reason(self.config.to_dict()) is None


def dtype_word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
    whole = gguf and lean_reason(config.to_dict()) is not None
    prepared = None if gguf else checkpoint.quantized
    if prepared and asked != "auto":
        raise LoadError(
            f"{checkpoint.name} comes already quantised ({prepared}): leave {quantize_flag(draft)} away, "
            "or name the original model."
        )
    if prepared:
        quantize.keep_rows_apart(config)
    sizes = sizes_of(config)
    form = "none" if prepared else quantize.choose_form(asked, device, draft, bytes_16bit, whole, sizes, say)
    return Plan(
        checkpoint,
        config,
        _tokenizer(checkpoint, config),
        draft,
        device,
        form,
        memory.choose_dtype(dtype, device, bytes_16bit),
    )


def check_memory(plans: Sequence[Plan]) -> None:
    """Raises LoadError where there is too little memory for the models of a pair."""
    device = plans[0].device
    memory.check([plan.need for plan in plans], device)
    for plan in plans:  # one after the other: nothing of the first is left there
        if device == "cuda" and plan.passing.bytes:
            memory.check([plan.passing], "cpu")


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


def where_from(checkpoint: Checkpoint) -> dict:
    """The arguments by which transformers finds a checkpoint: no network, no code but its own."""
    where = dict(
        pretrained_model_name_or_path=checkpoint.folder, local_files_only=True, trust_remote_code=False
    )
    return where | (dict(gguf_file=checkpoint.gguf_file) if checkpoint.gguf_file else {})


def _config(checkpoint: Checkpoint) -> transformers.PreTrainedConfig:
    """The config, of an architecture that can run here. Raises LoadError with what is in the way."""
    name = checkpoint.name
    try:
        config = transformers.AutoConfig.from_pretrained(**where_from(checkpoint))
    except Exception as error:  # of many kinds: each library that checks it has its own
        if is_out_of_memory(error):
            raise too_little_memory(f"read the config of {name}") from error
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
    if checkpoint.rotary is not None and getattr(config, "rope_parameters", None):
        rotary.settle(config, checkpoint.rotary)
    context_length(config)
    return config


def _tokenizer(checkpoint: Checkpoint, config) -> transformers.PreTrainedTokenizerBase:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where_from(checkpoint))
    except Exception as error:  # as above
        if is_out_of_memory(error):
            raise too_little_memory(f"read the tokenizer of {checkpoint.name}") from error
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
