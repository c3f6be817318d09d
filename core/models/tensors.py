"""A model's tensors under Hugging Face's names, read from its files one at a time.

    files = open_tensors(checkpoint, config, names)
    files.shapes["model.norm.weight"]
    files.read("model.norm.weight", torch.bfloat16, device)

Nothing of a file stays in memory but what was read and is still wanted. Knows safetensors and, of the lean
decoder's families, GGUF (unpacked as ``gguf`` does it, a few rows at a time, since a table of a large
vocabulary is gigabytes in float32). Knows nothing of what the tensors are for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

import torch
import transformers
from safetensors import safe_open

from core.models.checkpoint import Checkpoint

UNPACKED = 1 << 22  # weights of a GGUF file that are in float32 at a time


class Tensors(Protocol):
    """``shapes`` of all tensors that are there, by name."""

    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """One of them, which shares no memory with its file."""


def open_tensors(
    checkpoint: Checkpoint, config: transformers.PreTrainedConfig, names: Collection[str]
) -> Tensors:
    """Those of weights that are on this disk; ``names`` are the model's, for which a GGUF file has others.

    Raises what the readers raise where a file is damaged.
    """
    if checkpoint.gguf_file is not None:
        return _Gguf(checkpoint.folder / checkpoint.gguf_file, config, names)
    return _Safetensors([checkpoint.folder / file.name for file in checkpoint.weights])


class _Safetensors:
    def __init__(self, paths: list[Path]):
        self._files = {}
        for path in paths:
            file = safe_open(path, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)
        self.shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._files[name].get_tensor(name).to(device, dtype, copy=True)


class _Gguf:
    def __init__(self, path: Path, config: transformers.PreTrainedConfig, names: Collection[str]):
        import gguf

        reader = gguf.GGUFReader(path)
        kind = reader.get_field("general.architecture").contents()
        architectures = {name: one for one, name in gguf.MODEL_ARCH_NAMES.items()}
        words = gguf.get_tensor_name_map(architectures[kind], config.num_hidden_layers)
        stored = {tensor.name: tensor for tensor in reader.tensors}
        own = {name: words.get_name(name, (".weight", ".bias")) for name in names}
        self._there = {name: stored.pop(word) for name, word in own.items() if word in stored}
        self._there |= stored  # what nobody asks for goes by the file's own name
        self.shapes = {
            name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in self._there.items()
        }
        heads = config.num_attention_heads, config.num_key_value_heads
        self._heads = dict(zip(("q_proj", "k_proj"), heads, strict=True)) if kind == "llama" else {}

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        from gguf.quants import dequantize

        tensor, shape = self._there[name], self.shapes[name]
        whole = torch.empty(shape, dtype=dtype, device=device)
        rows = max(1, UNPACKED * shape[0] // whole.numel()) if len(shape) > 1 else shape[0]
        for start in range(0, shape[0], rows):
            part = dequantize(tensor.data[start : start + rows], tensor.tensor_type)
            whole[start : start + rows] = torch.tensor(part)
        heads = self._heads.get(name.split(".")[-2])
        return whole if heads is None else _turned_back(whole, heads)


def _turned_back(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of queries or keys in Hugging Face's order: llama.cpp has them in that of its rotary embedding
    for files of the architecture "llama" (convert_hf_to_gguf.py, ``permute``)."""
    halves = len(weight) // heads // 2
    return weight.view(heads, halves, 2, -1).transpose(1, 2).reshape(weight.shape)
