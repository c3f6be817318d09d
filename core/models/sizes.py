"""The sizes of a model's products, in which evidence on their forms is taken (``core.models.linear``).

They are those of a model of the Llama family, told from its config before anything is loaded; products of
another kind are near enough to tell kernels apart.
"""

from __future__ import annotations

import math

from core.models.linear.findings import Sizes

EMBEDDED = Sizes(((960, 576), (576, 576), (3072, 576), (576, 1536)), 30, (49152, 576), (9, 3, 64))
# Of what int4's kernel takes multiples; a matrix that it does not take is made int8 when it is packed.
OUT, IN = 16, 32


def sizes_of(config) -> Sizes:
    """Of the model of a transformers ``config``; of the embedded one where that says too little, or the model
    is smaller: there calls take as long as products, and times say little of either."""
    found = counted(config)
    return EMBEDDED if found is None or _weights(found) < _weights(EMBEDDED) else found


def counted(config) -> Sizes | None:
    """The sizes themselves; None where the config says too little."""
    config = config.get_text_config(decoder=True)

    def told(name: str, otherwise: int | None = None) -> int:
        value = getattr(config, name, None)
        if value is None and otherwise is not None:
            return otherwise
        if type(value) is not int or value < 1:
            raise ValueError(name)
        return value

    try:
        hidden, heads = told("hidden_size"), told("num_attention_heads")
        count, vocabulary = told("num_hidden_layers"), told("vocab_size")
        kv_heads, size = told("num_key_value_heads", heads), told("head_dim", max(1, hidden // heads))
        inner = told("intermediate_size", 4 * hidden)  # as in GPT-2
    except ValueError:
        return None
    queries, keys = heads * size, kv_heads * size
    layers = (queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner)
    *layers, head = ((_up(out, OUT), _up(inside, IN)) for out, inside in (*layers, (vocabulary, hidden)))
    return Sizes(tuple(layers), count, head, (heads, kv_heads, size))


def _weights(sizes: Sizes) -> int:
    return sizes.count * sum(map(math.prod, sizes.layers)) + math.prod(sizes.head)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
