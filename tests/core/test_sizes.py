"""The sizes of models' products."""

from __future__ import annotations

import json

from core.models.linear.findings import Sizes
from core.models.sizes import EMBEDDED


def test_the_sizes_are_those_of_the_embedded_target(embedded_folder):
    config = json.loads((embedded_folder / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_size = hidden // config["num_attention_heads"]
    qkv = hidden + 2 * config["num_key_value_heads"] * head_size
    layers = ((qkv, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner))
    assert EMBEDDED == Sizes(layers, config["num_hidden_layers"], (config["vocab_size"], hidden))
