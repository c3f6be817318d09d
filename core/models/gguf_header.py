"""What a GGUF file says of itself: architecture, sizes, context, quantisation, rotary scaling and ends.

Of tensors only the factors of the rotary embedding are read, which are no weights.

Knows nothing of how the file is loaded: transformers does that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from core.models import rotary
from core.models.ends import gguf_ends
from core.models.errors import LoadError, is_out_of_memory, too_little_memory


@dataclass(frozen=True)
class Header:
    """``config`` speaks as a ``config.json`` does; ``quantized`` is llama.cpp's name of the file type
    ("Q4_1").

    ``parameters`` counts the numbers in all tensors. ``rotary`` is None where the file says nothing of one.
    ``end_ids`` are those at which llama.cpp would end a reply.
    """

    config: dict[str, object]
    quantized: str
    parameters: int
    licence: str | None
    rotary: rotary.Rotary | None = None
    end_ids: frozenset[int] = frozenset()


def read_header(path: Path) -> Header:
    """Raises LoadError where the file is damaged, is no model, is one part of several, or holds an
    architecture that the installed transformers cannot read from GGUF. Takes seconds for a large vocabulary.
    """
    try:
        return _header(path)
    except LoadError:
        raise
    except Exception as error:
        raise _sentence(path, error) from error


def _sentence(path: Path, error: Exception) -> LoadError:
    if is_out_of_memory(error):
        return too_little_memory(f"read {path.name}")
    if isinstance(error, OSError):
        return LoadError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}.")
    # The reader trusts the file: a damaged one fails anywhere in it.
    return LoadError(f"{path.name} is no GGUF file or was not fetched whole: fetch it again.")


def _header(path: Path) -> Header:
    from gguf import GGUFReader, LlamaFileType
    from transformers.integrations import GGUF_CONFIG_MAPPING

    reader = GGUFReader(path)
    said = {
        name: field.contents()
        for name, field in reader.fields.items()
        if field.types and len(field.data) == 1
    }
    tokens = reader.get_field("tokenizer.ggml.tokens")
    architecture = said["general.architecture"]
    parameters = sum(math.prod(int(size) for size in tensor.shape) for tensor in reader.tensors)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    if said.get("split.count", 1) > 1:
        raise LoadError(
            f"{path.name} is part of {said['split.count']} files: join them first (llama-gguf-split --merge)."
        )
    if said.get("general.type", "model") != "model" or not parameters:
        raise LoadError(f"{path.name} holds no whole model ({said.get('general.type', 'no tensors')}).")
    # GGUF writes qwen2moe where transformers says qwen2_moe.
    known = {name.replace("_", "").replace("-", ""): name for name in GGUF_CONFIG_MAPPING}
    kind = known.get(architecture.replace("_", "").replace("-", ""))
    if kind in (None, "general"):
        raise LoadError(
            f"{path.name} holds a {architecture!r} model, which transformers cannot read from GGUF: use the "
            "same model in safetensors."
        )
    config = {"model_type": kind, "tie_word_embeddings": tied}
    for name, meant in GGUF_CONFIG_MAPPING[kind].items():
        value = said.get(f"{architecture}.{name}")
        if meant and meant != -1 and value is not None:
            config[meant] = value
    if tokens is not None:
        config.setdefault("vocab_size", len(tokens.data))
    file_type = said.get("general.file_type")
    try:
        quantized = LlamaFileType(file_type).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:  # none stated, or one that came later: the widest used type says most
        quantized = max((tensor.n_elements, tensor.tensor_type.name) for tensor in reader.tensors)[1]
    words = [] if tokens is None else [_text(tokens.parts[index]) for index in tokens.data]
    return Header(
        config,
        quantized,
        parameters,
        said.get("general.license"),
        _rotary(path, reader, said, config),
        gguf_ends(said, words),
    )


def _text(part) -> str:
    return part.tobytes().decode("utf-8", "replace")


def _rotary(path: Path, reader, said: dict, config: dict) -> rotary.Rotary | None:
    """Raises LoadError, by name, for one that cannot run here."""
    names = (rotary.FACTORS, rotary.LONG, rotary.SHORT)
    factors = {tensor.name: tensor.data.tolist() for tensor in reader.tensors if tensor.name in names}
    architecture = said["general.architecture"]
    if not factors and not any(name.startswith(f"{architecture}.rope.") for name in said):
        return None
    try:
        return rotary.of_gguf(said, architecture, factors, config)
    except rotary.UnknownRotary as error:
        raise LoadError(
            f"{path.name} turns positions by {error}, which Redline cannot: use the same model in "
            "safetensors."
        ) from error
