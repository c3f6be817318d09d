"""The target as training sees it: its sizes, its embedding and head, and its hidden states over a corpus.

Hidden states are computed once and kept in a file, in bfloat16: (ids of the corpus, kinds, hidden), from
which the target's logits are one product away, exactly and over the whole vocabulary. Kept top-k logits
would take less room and could not say what lies outside of them; running the target each step would cost
three times the time of training (docs/LOG.md). Knows no draft.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from core.distill.corpus import Corpus
from core.distill.files import flush_folder
from core.machine.progress import Progress, silent
from core.models.decoder import DecoderShape, lean_reason
from core.models.embedded import NAME, prepare_embedded
from core.models.errors import LoadError, first_line
from core.models.hub import check_proxy
from core.models.sources import EMBEDDED
from core.pairs.draft_file import embedding_fingerprint

IDS_AT_ONCE = 4096  # of chats of like length, in a pass of the target


@dataclass
class Target:
    """``model`` is the causal language model of transformers; ``embedding`` and ``head`` are its,
    (vocabulary, hidden); ``inner`` is the width of its MLPs. ``dtype`` is what products are computed in."""

    name: str
    fingerprint: str
    model: torch.nn.Module
    shape: DecoderShape
    inner: int
    embedding: torch.Tensor
    head: torch.Tensor
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def autocast(self) -> contextlib.AbstractContextManager:
        """Products of float32 weights in ``dtype``."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)


def load_target(
    source: str, device: str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> tuple[Target, object]:
    """The target and its tokenizer: "embedded", or a folder or hub id of a model of the Llama family.

    Raises LoadError.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = prepare_embedded() if source == EMBEDDED else Path(source).expanduser()
    if not path.is_dir():
        check_proxy(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path if path.is_dir() else source)
        model = AutoModelForCausalLM.from_pretrained(path if path.is_dir() else source, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        raise LoadError(
            f"The target {source} cannot be read ({first_line(error)}): name embedded, or a model's folder."
        ) from error
    name = NAME if source == EMBEDDED else path.name
    return as_target(model.to(device).eval(), name, dtype), tokenizer


def as_target(model: torch.nn.Module, name: str, dtype: torch.dtype) -> Target:
    """A causal language model of transformers, called ``name``. Raises LoadError where no draft can copy
    it."""
    config = model.config.to_dict()
    if reason := lean_reason(config):
        raise LoadError(f"No draft can be trained for {name}: {reason}. Choose a target of the Llama family.")
    embedding = model.get_input_embeddings().weight.detach()
    return Target(
        name,
        embedding_fingerprint(embedding),
        model,
        DecoderShape.from_config(config),
        config["intermediate_size"],
        embedding.to(dtype),
        model.get_output_embeddings().weight.detach().to(dtype),
        dtype,
    )


class Features:
    """Hidden states of a corpus, (ids, kinds, hidden), on disk: what ``features`` gave."""

    def __init__(self, path: Path, kinds: int, hidden: int):
        self._values = np.memmap(path, np.int16, "r").reshape(-1, kinds, hidden)

    def __getitem__(self, part: slice) -> torch.Tensor:
        return torch.from_numpy(np.array(self._values[part])).view(torch.bfloat16)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._values.shape


def features_path(target: Target, corpus: Corpus, layers: Sequence[int], folder: Path) -> Path:
    """Where ``features`` keeps its hidden states: under a name made of target, corpus and layers."""
    digest = hashlib.sha256(f"{target.fingerprint} {tuple(layers)}".encode())
    for array in (corpus.ids, corpus.offsets):
        digest.update(np.ascontiguousarray(array, np.int64).data)
    return folder / f"features-{digest.hexdigest()[:16]}.bin"


@torch.inference_mode()
def features(
    target: Target, corpus: Corpus, layers: Sequence[int], folder: Path, progress: Progress = silent
) -> Features:
    """The target's hidden states behind ``layers`` (``core.distill.kinds.feature_layers``) at every id.

    Kept in ``folder`` at ``features_path``, and found there the next time. Raises OSError where there is no
    room for them, before the target reads anything, and leaves nothing then.
    """
    path, size = features_path(target, corpus, layers, folder), (len(corpus.ids), len(layers))
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        try:
            _reserve(part, max(1, size[0] * size[1] * target.shape.hidden * 2))
            _read(target, corpus, layers, part, progress)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        os.replace(part, path)
        flush_folder(folder)
    return Features(path, len(layers), target.shape.hidden)


def _reserve(path: Path, size: int) -> None:
    """A file of ``size`` bytes that has its room: to write into a mapped file without is a bus error."""
    with open(path, "wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except AttributeError:  # not Linux
            for _ in range(size >> 20):
                file.write(bytes(1 << 20))
            file.write(bytes(size & ((1 << 20) - 1)))


def _read(target: Target, corpus: Corpus, layers: Sequence[int], path: Path, progress: Progress) -> None:
    shape = len(corpus.ids), len(layers), target.shape.hidden
    if not len(corpus.ids):
        return
    values = np.memmap(path, np.int16, "r+", shape=shape)
    lengths, done = np.diff(corpus.offsets), 0
    for chats in _alike(lengths):
        kept = hidden_states(target, [corpus[chat].ids for chat in chats], layers)
        for row, chat in enumerate(chats):
            begin, length = corpus.offsets[chat], lengths[chat]
            values[begin : begin + length] = kept[row, :length].view(torch.int16).numpy()
        done += lengths[chats].sum()
        progress("Reading the text with the target", done / len(corpus.ids))
    values.flush()
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


@torch.inference_mode()
def hidden_states(target: Target, chats: Sequence[np.ndarray], layers: Sequence[int]) -> torch.Tensor:
    """Of the ids of some chats, (chats, the longest's ids, layers, hidden) in bfloat16, in one pass."""
    ids = np.zeros((len(chats), max(map(len, chats))), np.int64)
    for row, chat in enumerate(chats):
        ids[row, : len(chat)] = chat
    states = target.model.model(
        input_ids=torch.from_numpy(ids).to(target.device), output_hidden_states=True, use_cache=False
    ).hidden_states  # the embedding first, then each layer's, the last behind the final norm
    return torch.stack([states[layer + 1] for layer in layers], 2).bfloat16().cpu().contiguous()


def _alike(lengths: np.ndarray) -> list[np.ndarray]:
    """Chats in batches of like length, of about ``IDS_AT_ONCE`` ids."""
    batches, batch = [], []
    for chat in np.argsort(lengths, kind="stable"):
        if batch and (len(batch) + 1) * lengths[chat] > IDS_AT_ONCE:
            batches.append(np.array(batch))
            batch = []
        batch.append(chat)
    return [*batches, np.array(batch)] if batch else batches
