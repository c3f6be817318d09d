"""The drafts that can be trained, as torch modules: what each computes while it learns.

A kind takes the ids of whole chats and the target's hidden states and gives outputs that are scored against
the target's own head rows. ``core.pairs.draft_file`` has the same forward passes in words, for whoever runs
a draft, and parameters have the names of that file. Knows no text, no optimiser and no file.

- ``ModelDraft``: a decoder of its own over the target's embedding.
- ``EagleDraft``: one decoder layer over the target's features and the embeddings of the ids that followed.
  It is trained on its own outputs too, a few steps deep, as it is used, and over hidden states of several
  layers (EAGLE-3, Li et al. 2025, arXiv:2503.01840, section 3.1, there "training-time test").
- ``MedusaDraft``: heads on the target's last hidden state, each for a position further ahead (Cai et al.
  2024, arXiv:2401.10774).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from core.models.decoder import DecoderShape

MEDUSA_HEADS = 4
SELF_FED = 3  # steps of EAGLE in training: K = 3 is what runs
# What a step or head further ahead counts for: it matters only where those before it were accepted.
FURTHER = 0.8
FRESH_NORM = 0.3  # of a fresh final norm: a copied one begins confidently wrong (docs/LOG.md)


@dataclass(frozen=True)
class Output:
    """``hidden`` (chats, positions, hidden) at position t is a guess of the id at t + 1 + ``ahead``, whose
    logits are its products with the head's rows; ``weight`` is its share of the loss."""

    hidden: torch.Tensor
    ahead: int
    weight: float


def feature_layers(kind: str, layers: int) -> tuple[int, ...]:
    """The layers of a target of so many whose outputs a kind learns from, numbered from 0; the last always,
    whose output is taken after the final norm and says what the target's logits are."""
    if kind != "eagle":
        return (layers - 1,)
    return tuple(dict.fromkeys((max(0, layers // 3 - 1), max(0, 2 * layers // 3 - 1), layers - 1)))


def normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension, in x's dtype."""
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype)


class _Rotary:
    """Rotary embedding as Hugging Face's Llama has it, of heads (chats, heads, positions, size)."""

    def __init__(self, shape: DecoderShape, positions: int, device: torch.device):
        halves = torch.arange(0, shape.head_size, 2, device=device).double() / shape.head_size
        angles = torch.arange(positions, device=device)[:, None] * shape.rope_theta**-halves
        self._cos = torch.cat([angles.cos(), angles.cos()], -1).float()
        self._sin = torch.cat([angles.sin(), angles.sin()], -1).float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.float().chunk(2, -1)
        return (x.float() * self._cos + torch.cat([-second, first], -1) * self._sin).to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, shape: DecoderShape):
        super().__init__()
        self.shape = shape
        wide, narrow = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden, wide, bias=False)
        self.k_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, rotary: _Rotary, seen: list[tuple[torch.Tensor, torch.Tensor]]):
        """Step n, the n-th call with the list ``seen``, sees step 0 up to n positions back and, at those
        between, the step whose turn it was there: what a draft of n steps has read when it is used."""
        chats, positions, _ = x.shape
        heads, kv, size = self.shape.heads, self.shape.kv_heads, self.shape.head_size

        def split(y: torch.Tensor, count: int) -> torch.Tensor:
            return y.view(chats, positions, count, size).transpose(1, 2)

        q = rotary(split(self.q_proj(x), heads))
        k = rotary(split(self.k_proj(x), kv)).repeat_interleave(heads // kv, 1)
        v = split(self.v_proj(x), kv).repeat_interleave(heads // kv, 1)
        seen.append((k, v))
        step = len(seen) - 1
        if step == 0:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = _over_steps(q, seen, step)
        return self.o_proj(y.transpose(1, 2).reshape(chats, positions, heads * size))


def _over_steps(
    q: torch.Tensor, seen: Sequence[tuple[torch.Tensor, torch.Tensor]], step: int
) -> torch.Tensor:
    """Attention (chats, heads, positions, size) of step ``step`` over the steps before it and itself."""
    places = torch.arange(q.shape[2], device=q.device)
    scale, (first, values) = 1 / math.sqrt(q.shape[-1]), seen[0]
    scores = (q @ first.transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(places > places[:, None] - step, -math.inf)
    own = []
    for n, (k, v) in enumerate(seen[1:], 1):
        back = step - n  # positions between this step's key and the query
        if back:
            k, v = (F.pad(y, (0, 0, back, 0))[:, :, :-back] for y in (k, v))
        own.append(((q * k).sum(-1, keepdim=True).float() * scale, v))
    weights = torch.cat([scores, *(score for score, _ in own)], -1).softmax(-1).to(values.dtype)
    y = weights[..., : len(places)] @ values
    for n, (_, v) in enumerate(own):
        y = y + weights[..., len(places) + n, None] * v
    return y


class _Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Norm(nn.Module):
    def __init__(self, hidden: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normed(x, self._eps) * self.weight.to(x.dtype)


class _Layer(nn.Module):
    """A decoder layer under Hugging Face's names."""

    def __init__(self, shape: DecoderShape, inner: int):
        super().__init__()
        self.input_layernorm = _Norm(shape.hidden, shape.rms_eps)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = _Norm(shape.hidden, shape.rms_eps)
        self.mlp = _Mlp(shape.hidden, inner)

    def forward(self, x: torch.Tensor, rotary: _Rotary, seen: list) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, seen)
        return x + self.mlp(self.post_attention_layernorm(x))


class Draft(nn.Module):
    """What the kinds share. ``embedding`` is the target's, (vocabulary, hidden), and is not trained.

    ``depths`` is how many outputs a kind has at most: how far ahead it is trained to draft.
    """

    kind: str
    depths = 1

    def __init__(self, shape: DecoderShape, embedding: torch.Tensor):
        super().__init__()
        self.shape = shape
        self.register_buffer("embedding", embedding, persistent=False)

    def outputs(self, ids: torch.Tensor, features: torch.Tensor, depth: int | None = None) -> list[Output]:
        """Of ``ids`` (chats, positions) and ``features`` (chats, positions, kinds, hidden), which may be
        padded behind; ``depth`` of EAGLE's steps in place of those of training."""
        raise NotImplementedError

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights as ``core.pairs.draft_file`` defines them, float32 on the CPU."""
        return {name: value.detach().float().cpu().clone() for name, value in self.state_dict().items()}

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Sets the weights from what ``tensors`` gave. Raises RuntimeError where names or sizes differ."""
        self.load_state_dict(dict(tensors))

    def begin(self, target: Mapping[str, torch.Tensor]) -> None:
        """Sets the first weights; ``target`` are those of the target, by Hugging Face's names."""
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.5 / math.sqrt(weight.shape[1]))


class ModelDraft(Draft):
    kind = "model"

    def __init__(self, shape: DecoderShape, embedding: torch.Tensor, layers: int, inner: int):
        super().__init__(shape, embedding)
        self.layers = nn.ModuleList(_Layer(shape, inner) for _ in range(layers))
        self.norm = _Norm(shape.hidden, shape.rms_eps)
        self.proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def begin(self, target: Mapping[str, torch.Tensor]) -> None:
        """All layers but the last are the target's first ones."""
        super().begin(target)
        nn.init.eye_(self.proj.weight)
        for index, layer in enumerate(self.layers[:-1]):
            start = f"model.layers.{index}."
            own = {name[len(start) :]: x for name, x in target.items() if name.startswith(start)}
            layer.load_state_dict({name: own[name] for name in layer.state_dict()})
        for matrix in (self.layers[-1].self_attn.o_proj, self.layers[-1].mlp.down_proj):
            nn.init.normal_(matrix.weight, std=0.1 / math.sqrt(matrix.weight.shape[1]))
        self.norm.weight.data.copy_(target["model.norm.weight"].float() * FRESH_NORM)

    def outputs(self, ids: torch.Tensor, features: torch.Tensor, depth: int | None = None) -> list[Output]:
        x = F.embedding(ids, self.embedding)
        rotary = _Rotary(self.shape, ids.shape[1], ids.device)
        for layer in self.layers:
            x = layer(x, rotary, [])
        return [Output(self.proj(self.norm(x)), 0, 1.0)]


class EagleDraft(Draft):
    kind = "eagle"
    depths = 4

    def __init__(self, shape: DecoderShape, embedding: torch.Tensor, layers: int, inner: int, kinds: int):
        super().__init__(shape, embedding)
        hidden = shape.hidden
        self._spread = float(embedding.float().std())
        self.features = nn.Linear(kinds * hidden, hidden, bias=False)
        self.token = nn.Linear(hidden, hidden, bias=False)
        self.state = nn.Linear(hidden, hidden, bias=False)
        self.layers = nn.ModuleList(_Layer(shape, inner) for _ in range(layers))
        self.norm = _Norm(hidden, shape.rms_eps)
        self.proj = nn.Linear(hidden, hidden, bias=False)

    def begin(self, target: Mapping[str, torch.Tensor]) -> None:
        """Fresh, with layers that add little at first."""
        super().begin(target)
        nn.init.normal_(self.proj.weight, std=0.02)
        for layer in self.layers:
            for matrix in (layer.self_attn.o_proj, layer.mlp.down_proj):
                nn.init.normal_(matrix.weight, std=0.15 / math.sqrt(matrix.weight.shape[1]))

    def outputs(self, ids: torch.Tensor, features: torch.Tensor, depth: int | None = None) -> list[Output]:
        token = self.token(F.embedding(ids, self.embedding) / self._spread)
        eps = self.shape.rms_eps
        rotary = _Rotary(self.shape, ids.shape[1], ids.device)
        seen: list[list] = [[] for _ in self.layers]
        x, outputs = self.features(normed(features, eps).flatten(2)), []
        for step in range(SELF_FED if depth is None else depth):
            before = F.pad(x, (0, 0, 1, 0))[:, :-1]  # of the position before; zeros at the first
            x = token + self.state(normed(before, eps))
            for layer, cached in zip(self.layers, seen, strict=True):
                x = layer(x, rotary, cached)
            outputs.append(Output(self.proj(self.norm(x)), 0, FURTHER**step))
        return outputs

    # What is trained takes the embedding divided by its spread, so that both inputs are of one size.
    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = super().tensors()
        tensors["token.weight"] /= self._spread
        return tensors

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().take({**tensors, "token.weight": tensors["token.weight"] * self._spread})


class _MedusaHead(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.block = nn.Linear(hidden, hidden)
        self.proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x + F.silu(self.block(x)))


class MedusaDraft(Draft):
    kind = "medusa"
    depths = MEDUSA_HEADS

    def __init__(self, shape: DecoderShape, embedding: torch.Tensor):
        super().__init__(shape, embedding)
        self.heads = nn.ModuleList(_MedusaHead(shape.hidden) for _ in range(MEDUSA_HEADS))

    def begin(self, target: Mapping[str, torch.Tensor]) -> None:
        """Each head begins linear, with small logits."""
        for head in self.heads:
            nn.init.zeros_(head.block.weight)
            nn.init.zeros_(head.block.bias)
            nn.init.normal_(head.proj.weight, std=0.02)

    def outputs(self, ids: torch.Tensor, features: torch.Tensor, depth: int | None = None) -> list[Output]:
        last = normed(features[:, :, -1], self.shape.rms_eps)
        return [Output(head(last), ahead, FURTHER ** (ahead - 1)) for ahead, head in enumerate(self.heads, 1)]


def make_draft(
    kind: str, shape: DecoderShape, embedding: torch.Tensor, layers: int, inner: int, kinds: int
) -> Draft:
    """An untrained draft of ``kind`` with ``layers`` layers of MLP size ``inner`` and ``kinds`` features."""
    if kind == "model":
        return ModelDraft(shape, embedding, layers, inner)
    if kind == "eagle":
        return EagleDraft(shape, embedding, layers, inner, kinds)
    return MedusaDraft(shape, embedding)
