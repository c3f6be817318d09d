"""Turns a Llama-like model's outliers away, so that its activations can be rounded to few levels.

A few features of these models are hundreds of times larger than the rest, and rounding a row to 255 steps of
its largest number leaves the others few of them. An orthogonal matrix between two products that stand behind
each other changes nothing of what they compute together, and spreads what is large over all features:
QuaRot (Ashkboos et al. 2024, arXiv:2404.00456), of which this is

- R1, the residual stream: what writes to it is multiplied by the rotation, what reads it by its inverse,
  after each norm's weights were folded into the products behind it (a norm without weights commutes with a
  rotation);
- R2, the values of each key head, turned back in the output projection.

Of QuaRot's R3, before ``down``, nothing is done: it would have to be computed as the model runs. That
product's activations go in two parts instead (``core.models.linear``), to the same effect (docs/LOG.md).

Works on tensors under Hugging Face's names, layer by layer, and knows neither products nor the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rotation:
    """``stream`` (hidden, hidden) and ``values`` (head_size, head_size) are orthogonal, float32; a row of the
    residual stream is multiplied by ``stream`` from the right. ``norm`` (hidden,) float32 is the final norm's
    weight, which the head has taken over.
    """

    stream: torch.Tensor
    values: torch.Tensor
    norm: torch.Tensor

    @classmethod
    def of(cls, head_size: int, norm: torch.Tensor) -> Rotation:
        """The same for every model of these sizes."""
        generator = torch.Generator().manual_seed(0)
        return cls(_orthogonal(len(norm), generator), _orthogonal(head_size, generator), norm.float())

    def layer(self, tensors: Mapping[str, torch.Tensor], kv_heads: int) -> dict[str, torch.Tensor]:
        """A layer's tensors, float32, that read and write a rotated stream through norms without weights."""
        turned = {name: tensor.float() for name, tensor in tensors.items()}
        for norm, products in _BEHIND.items():
            weight = turned[norm]
            for name in products:
                turned[name] = turned[name].mul(weight).mm(self.stream)
            turned[norm] = torch.ones_like(weight)
        for name in ("self_attn.v_proj.weight", "self_attn.v_proj.bias"):
            if name in turned:
                of_heads = turned[name].view(kv_heads, len(self.values), -1)
                turned[name] = self.values.T.matmul(of_heads).view_as(turned[name])
        out = turned["self_attn.o_proj.weight"]
        by_head = out.view(len(out), -1, len(self.values)).matmul(self.values)
        turned["self_attn.o_proj.weight"] = self.stream.T.mm(by_head.view_as(out))
        turned["mlp.down_proj.weight"] = self.stream.T.mm(turned["mlp.down_proj.weight"])
        return turned

    def embedding(self, embedding: torch.Tensor) -> torch.Tensor:
        """The rows that go into the rotated stream, in the embedding's dtype."""
        parts = embedding.split(4096)  # the whole in float32 would be as large as the model
        return torch.cat([part.float().mm(self.stream).to(embedding.dtype) for part in parts])

    def head(self, weight: torch.Tensor) -> torch.Tensor:
        """A head (vocabulary, hidden) for the rotated stream behind a norm without weight, float32."""
        return weight.float().mul(self.norm).mm(self.stream)

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of the stream (n, hidden) float32 as the model has them."""
        return x.mm(self.stream.T)


_BEHIND = {
    "input_layernorm.weight": tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
    "post_attention_layernorm.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
}


def _orthogonal(size: int, generator: torch.Generator) -> torch.Tensor:
    """A random orthogonal matrix whose entries are all about as large: a Hadamard matrix of the largest power
    of two in ``size``, with random signs, times a random rotation of what is left."""
    power = size & -size
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < power:
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), hadamard)
    left, upper = torch.linalg.qr(
        torch.randn(size // power, size // power, generator=generator, dtype=torch.float64)
    )
    left = left * upper.diagonal().sign()
    signs = torch.randint(0, 2, (size,), generator=generator) * 2 - 1
    return (torch.kron(left.contiguous(), hadamard / math.sqrt(power)) * signs).float().contiguous()
