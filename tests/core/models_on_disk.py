"""Tiny models on disk as real ones are: config, tokenizer, chat template and safetensors, or one GGUF file.

    folder = write_model(tmp_path / "target", "qwen3", seed=1)

Weights are random, float32 and seeded, spread widely enough for varied predictions. All share one tokenizer,
trained here, so that any two make a pair.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 300
CONTEXT = 128
WINDOW = 8  # of the families that look back over a window
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]
_TEXT = [
    "The tide comes in twice a day, and the editor reads the draft again.",
    "def f(x):\n    return x + 1\n",
]

_SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=CONTEXT,
    initializer_range=0.15,
    bos_token_id=None,
    eos_token_id=0,
    pad_token_id=None,
)
# Tied, a random model of this kind repeats its last token for ever.
_GEMMA = _SIZES | dict(
    layer_types=["sliding_attention", "full_attention"],
    sliding_window=WINDOW,
    query_pre_attn_scalar=16,
    eos_token_id=[0, 2],
    tie_word_embeddings=False,
)
FAMILIES = {
    "llama": ("LlamaConfig", _SIZES),
    "qwen2": ("Qwen2Config", _SIZES),
    "qwen3": ("Qwen3Config", _SIZES),
    "mistral": ("MistralConfig", _SIZES | dict(sliding_window=None)),
    "mistral-window": ("MistralConfig", _SIZES | dict(sliding_window=WINDOW)),
    "gemma2": ("Gemma2Config", _GEMMA),
    "gemma3": ("Gemma3TextConfig", _GEMMA),
    "gpt2": (
        "GPT2Config",
        dict(
            vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4, initializer_range=0.15
        )
        | dict(bos_token_id=None, eos_token_id=0),
    ),
    "mamba": (
        "MambaConfig",
        dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8, initializer_range=0.15)
        | dict(bos_token_id=None, eos_token_id=0, pad_token_id=0),
    ),
}


@functools.lru_cache
def tokenizer():
    """A byte-level BPE tokenizer with a chat template; its last ids are unused, as in padded vocabularies."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 8,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(_TEXT, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=SPECIAL[0], extra_special_tokens=SPECIAL[1:], chat_template=TEMPLATE
    )


def make_model(family: str, seed: int, **changes):
    """A model of ``FAMILIES`` in memory; ``changes`` are to its config."""
    config_class, sizes = FAMILIES[family]
    config = getattr(transformers, config_class)(**sizes | changes)
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@torch.no_grad()
def make_near(family: str, seed: int, other: int, share: float = 0.05, **changes):
    """A model between two seeds', mostly like ``seed``'s: as a draft it is often right, and not always."""
    near, far = make_model(family, seed, **changes), make_model(family, other, **changes)
    for mine, theirs in zip(near.parameters(), far.parameters(), strict=True):
        mine.lerp_(theirs, share)
    return near


def write_pair(folder: Path, family: str) -> tuple[str, str]:
    """Writes a target and a draft near it; gives their folders."""
    draft = _write(folder / "draft", make_near(family, 1, 2))
    return str(write_model(folder / "target", family, 1)), str(draft)


def write_model(
    folder: Path, family: str, seed: int, *, template: bool = True, generation=None, **changes
) -> Path:
    """Writes a model and the tokenizer to ``folder``; ``generation`` is for its generation_config.json."""
    return _write(folder, make_model(family, seed, **changes), template, generation)


def _write(folder: Path, model, template: bool = True, generation=None) -> Path:
    for name, value in (generation or {}).items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    if not template:
        (folder / "chat_template.jinja").unlink()
    return folder


def write_gguf(
    file: Path,
    seed: int,
    family: str = "llama",
    *,
    exact: bool = False,
    says=None,
    factors=None,
    template=TEMPLATE,
    **changes,
) -> Path:
    """Writes a Llama (query and key rows in its rotary order), Qwen2 or Qwen3 as llama.cpp does: matrices
    in Q8_0.

    ``exact``: all in float32. ``says`` are further fields of its header, ``factors`` tensors of its rotary
    embedding, by name; ``changes`` are to the model's config.
    """
    import gguf

    model = make_model(family, seed, **changes)
    config, weights = model.config, model.state_dict()
    writer = gguf.GGUFWriter(file, family)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if family == "qwen3":
        writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, config.vocab_size, template)
    for name, value in (says or {}).items():
        {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)](name, value)
    for name, values in (factors or {}).items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.num_hidden_layers)
    for name, tensor in weights.items():
        values = tensor.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
            name.split(".")[-2]
        )
        if heads and family == "llama":
            rows, columns = values.shape
            values = (
                values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
            )
        packs = values.ndim == 2 and not exact
        kind = gguf.GGMLQuantizationType.Q8_0 if packs else gguf.GGMLQuantizationType.F32
        packed = gguf.quants.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer, vocabulary: int, template: str) -> None:
    import json

    import gguf

    inner = json.loads(tokenizer().backend_tokenizer.to_str())
    tokens = {index: token for token, index in tokenizer().get_vocab().items()}
    kinds = [
        gguf.TokenType.CONTROL if index < len(SPECIAL) else gguf.TokenType.NORMAL
        for index in range(len(tokens))
    ]
    padding = range(len(tokens), vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(
        [tokens[index] for index in range(len(tokens))] + [f"[PAD{index}]" for index in padding]
    )
    writer.add_token_types(kinds + [gguf.TokenType.UNUSED for _ in padding])
    writer.add_token_merges([" ".join(pair) for pair in inner["model"]["merges"]])
    writer.add_eos_token_id(0)
    writer.add_chat_template(template)
