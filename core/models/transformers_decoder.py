"""Any causal language model of transformers as a ``Scorer`` (``core.models.base``), on a CPU or a CUDA card.

The cache keeps every key and value of every layer, also where attention looks back over a window only:
transformers applies the window in the mask and drops old keys merely to save memory, and dropped keys
could not come back when a draft is taken back. So cropping is cutting, in every layer alike. Models that
keep a running state instead (Mamba and its kin) cannot be taken back; ``check_rollback`` finds them out.

Knows one sequence at a time, no sampling, no tokenizer, and not where the model came from
(``core.pairs.load_model``). It never moves the model: a quantised one must stay where it was loaded (BQ-02).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from core.models import memory
from core.models.base import PREFILL_CHUNK, Stop, chunks
from core.models.card_attention import prefer_plain_kernels
from core.models.errors import LoadError, UnusableNumbers
from core.models.rows import difference, some_ids
from core.verify.sampling import BadLogitsError, peak

_GROWTH = 256  # positions by which a buffer grows at least
# The same passes after a crop and from a fresh cache: equal but for kernels that add in varying order.
ROUNDING = 1e-3


class _KeptLayer(DynamicLayer):
    """Keys and values of one layer, (1, heads, positions, size) each, as views of buffers that grow seldom.

    transformers' own layer copies everything at every pass.
    """

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = (key_states[:, :, :0], value_states[:, :, :0])
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if end > self._buffers[0].shape[-2]:
            wanted = max(end, self._buffers[0].shape[-2] * 5 // 4)
            self._buffers = tuple(
                _grown(kept, new, start, -(-wanted // _GROWTH) * _GROWTH)
                for kept, new in zip(self._buffers, (key_states, value_states), strict=True)
            )
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = new
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        return self.keys, self.values

    def keep(self, length: int) -> None:
        """Forgets positions from ``length`` on."""
        if self.is_initialized:
            end = min(length, self.get_seq_length())
            self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)

    def fork(self, length: int) -> _KeptLayer:
        """A copy of its own of the first ``length`` positions."""
        copy = _KeptLayer()
        if self.is_initialized:
            copy.update(self.keys[:, :, :length], self.values[:, :, :length])
        return copy

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers) if self.is_initialized else 0


def _grown(kept: torch.Tensor, new: torch.Tensor, length: int, capacity: int) -> torch.Tensor:
    buffer = new.new_empty((*new.shape[:2], capacity, new.shape[3]))
    buffer[:, :, :length] = kept[:, :, :length]
    return buffer


class TransformersCache:
    """What the model has read of one sequence: ``length`` ids count, ``nbytes`` are held now."""

    def __init__(self):
        self.layers = DynamicCache()  # without a config, which would bring layers that drop old keys
        self.layers.layer_class_to_replicate = _KeptLayer
        self.length = 0

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.layers)

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)
        for layer in self.layers.layers:
            layer.keep(self.length)

    @torch.inference_mode()
    def fork(self, length: int) -> TransformersCache:
        copy = TransformersCache()
        copy.layers.layers = [layer.fork(length) for layer in self.layers.layers]
        copy.length = min(self.length, length)
        return copy


class TransformersDecoder:
    """``model`` is a causal language model of transformers in evaluation mode, wholly on one device.

    Raises LoadError where such a model cannot take ids back (as far as its class says: ``check_rollback``
    tries it), or its config does not say how many ids it can hold; and what the model itself raises where
    it cannot read with such a cache. ``departed`` says why the model runs here where it was to run lean.
    """

    def __init__(self, model, departed: str | None = None):
        check_class(type(model), model.config)
        self.model, self.departed = model, departed
        embedding = model.get_input_embeddings().weight
        self.device = embedding.device
        if self.device.type == "cuda":
            prefer_plain_kernels()
        self.readable_ids = embedding.shape[0]
        self.context_length = context_length(model.config)
        names = inspect.signature(model.forward).parameters
        # The argument has a new name in later transformers, which warn of the old one.
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
        first = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.vocabulary = self.device_logits(first, self.new_cache()).shape[1]

    def new_cache(self) -> TransformersCache:
        return TransformersCache()

    def prefill(self, ids: Sequence[int], cache: TransformersCache, stop: Stop | None = None) -> None:
        """Appends ``ids`` chunk by chunk; ``stop`` is asked before each."""
        for chunk in chunks(ids, stop, rows=self.prompt_chunk(len(ids), cache.length)):
            self._read(self._on_device(chunk), cache, **self._last_only)

    def logits(self, ids: Sequence[int], cache: TransformersCache) -> torch.Tensor:
        """Appends ``ids`` in one pass: the logits after each, (len(ids), vocabulary) float32 on the CPU."""
        return self.device_logits(self._on_device(ids), cache).cpu()

    @torch.inference_mode()
    def device_logits(self, ids: torch.Tensor, cache: TransformersCache) -> torch.Tensor:
        """Appends ``ids`` (n,) int64 in one pass: (n, vocabulary) float32; both are on the model's device."""
        return self._read(ids, cache).float()

    def next_logits(self, ids: Sequence[int], cache: TransformersCache) -> torch.Tensor:
        """Appends ``ids`` and gives the logits after the last one: (vocabulary,) float32 on the CPU."""
        for chunk in chunks(ids, rows=self.prompt_chunk(len(ids), cache.length)):
            rows = self._read(self._on_device(chunk), cache, **self._last_only)
        return rows[-1].float().cpu()

    def prompt_chunk(self, count: int, read: int) -> int:
        """How many rows of ``count`` ids, ``read`` before them, a pass reads: on a card as its memory allows.

        Counted are activations, what a mask and attention without a fused kernel take, and logits where the
        model makes them for every row.
        """
        size = memory.size_of(self.model.config.to_dict())
        if count <= PREFILL_CHUNK or self.device.type != "cuda" or size is None:
            return PREFILL_CHUNK
        config = self.model.config.get_text_config(decoder=True)
        wide, keys = self.model.dtype.itemsize, read + count
        row = memory.row_bytes(*size.widths, "llm-int8", wide) + keys * (1 + wide)
        if config._attn_implementation == "eager":
            row += config.num_attention_heads * keys * (4 + 2 * wide)
        if not self._last_only:
            row += 2 * self.vocabulary * wide
        return memory.prompt_rows(row)

    def _on_device(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(ids), device=self.device)

    @torch.inference_mode()
    def _read(self, ids: torch.Tensor, cache: TransformersCache, **more) -> torch.Tensor:
        """Appends ``ids`` (n,) in one pass: (rows, vocabulary) in the model's own dtype and place."""
        try:
            rows = self.model(
                ids[None],
                use_cache=True,
                **{self._cache_name: cache.layers},
                **more,
            ).logits[0]
        except BaseException:
            cache.crop(cache.length)  # some layers have read the ids and others have not
            raise
        cache.length += len(ids)
        return rows


def check_class(model_class: type, config) -> None:
    """Raises LoadError for a class of transformers whose models cannot take ids back; needs no weights."""
    if config.is_encoder_decoder:
        raise LoadError(
            f"Models of type {config.model_type} have an encoder, which Redline cannot run: choose a causal "
            "language model."
        )
    if getattr(model_class, "_is_stateful", False):
        raise LoadError(_no_rollback_sentence(config))


def _no_rollback_sentence(config) -> str:
    return (
        f"Models of type {config.model_type} keep a state that cannot be taken back when a draft is "
        "rejected, so Redline cannot run them: choose a model that keeps keys and values in every layer."
    )


def context_length(config) -> int:
    """How many ids a model can hold, from its config. Raises LoadError where it does not say.

    A "longrope" model changes the rotation of all positions once a sequence grows over its first length, so
    that a score would depend on ids after it, and keys read before would no longer fit (design rule 13):
    such a model holds its first length only.
    """
    text = config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "max_seq_len", "seq_length")
    length = next((value for name in names if (value := getattr(text, name, None))), None)
    if not length:
        raise LoadError(
            f"The config of this {config.model_type} model does not say how many tokens it can hold: "
            "set max_position_embeddings in its config.json."
        )
    held = min([length, *_long_rope_starts(text)])
    if held < 1:
        raise LoadError(
            f"The config of this {config.model_type} model says that it can hold {held:,} tokens: "
            "mend max_position_embeddings in its config.json."
        )
    return held


def _long_rope_starts(config) -> Iterator[int]:
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *(value for value in ropes.values() if isinstance(value, dict))]:
        if rope.get("rope_type") == "longrope":
            start = rope.get("original_max_position_embeddings")
            yield start or getattr(config, "original_max_position_embeddings", config.max_position_embeddings)


@torch.inference_mode()
def whole_pass(model, ids: Sequence[int]) -> torch.Tensor:
    """The logits after each of ``ids`` in a pass without a cache, (len(ids), vocabulary) float32 on the CPU.

    Raises UnusableNumbers where nothing can be drawn from them.
    """
    batch = torch.tensor([list(ids)], device=model.get_input_embeddings().weight.device)
    logits = model(batch, use_cache=False).logits[0].float().cpu()
    try:
        for row in logits:
            peak(row)
    except BadLogitsError as error:
        raise UnusableNumbers(
            f"This {model.config.model_type} model gives unusable numbers ({error}) as it was loaded: "
            "choose another --dtype, for instance bfloat16, or check its files."
        ) from error
    return logits


@torch.inference_mode()
def check_rollback(decoder: TransformersDecoder) -> None:
    """Reads 5 ids and 7 more, crops to 5, reads others, and compares with a fresh cache and with a pass
    without any. The first 5 are read in a pass of their own: in 16 bits another kernel may read more at once.

    Raises LoadError where the scores differ by more than rounding, or nothing can be drawn from them.
    """
    config = decoder.model.config
    first, others, strange = some_ids(decoder, 12, 1), some_ids(decoder, 4, 2), some_ids(decoder, 5, 5)

    def after(*passes: list[int]) -> torch.Tensor:
        cache = decoder.new_cache()
        for ids in passes:
            decoder.logits(ids, cache)
        cache.crop(5)
        return decoder.logits(others, cache)

    cropped, fresh, elsewhere = after(first[:5], first[5:]), after(first[:5]), after(strange)
    uncached = whole_pass(decoder.model, first[:5] + others)[5:]
    # Rounding is large in 16 bits and after quantisation, so what counts as the same without a cache is
    # measured against what another beginning would have made of it.
    same = difference(fresh, uncached) <= max(ROUNDING, difference(elsewhere, uncached) / 2)
    if not (same and difference(cropped, fresh) <= ROUNDING):
        raise LoadError(_no_rollback_sentence(config))
