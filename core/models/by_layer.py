"""A lean decoder packed from a model's files layer by layer, and what transformers' own modules score.

The modules are made without weights. In one pass over a few ids each of them is given its own just before
it runs and gives them up right after, packed: so no more of the model is ever whole than its largest part, a
layer or a table of the vocabulary. What the pass gives is what the packed model must score too
(``core.pairs.load_model``). Knows the modules of the lean decoder's families.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import transformers
from torch import nn

from core.models.decoder import Decoder, DecoderShape, Layer, Make, pack_layer
from core.models.tensors import Tensors
from core.models.transformers_decoder import whole_pass

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Skeleton:
    """A model of transformers without weights; ``core.models.decoder.lean_reason`` of its config is None."""

    def __init__(self, config: transformers.PreTrainedConfig, dtype: torch.dtype):
        with torch.device("meta"):
            self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        self.config, self.dtype = config, dtype
        self.wanted = {name: tuple(value.shape) for name, value in self.model.state_dict().items()}
        self.tied = bool(config.tie_word_embeddings)

    def fits(self, tensors: Tensors, spare: Callable[[str], bool]) -> bool:
        """Whether these are all its tensors, in its sizes, and no others but ``spare`` ones."""
        there = dict(tensors.shapes)
        if self.tied and HEAD not in there:
            there[HEAD] = there.get(TABLE)
        more = [name for name in there if name not in self.wanted]
        return all(map(spare, more)) and all(there.get(name) == size for name, size in self.wanted.items())

    @torch.no_grad()
    def pack(
        self,
        tensors: Tensors,
        device: torch.device,
        make: Make,
        make_head: Make,
        cache_dtype: torch.dtype | None,
        ids: Sequence[int],
        done: Callable[[float], None],
    ) -> tuple[Decoder, torch.Tensor] | None:
        """The decoder on ``device``, and the logits after each of ``ids``, (len(ids), vocabulary) float32 on
        the CPU; None where a head that is said to be the embedding is another.

        ``done`` is told how far it is, from 0 to 1. Raises LoadError where the logits are no numbers to draw
        from.
        """
        read = lambda name: tensors.read(name, self.dtype, device)  # noqa: E731
        embedding = read(TABLE)
        if self.tied and HEAD in tensors.shapes and not torch.equal(read(HEAD), embedding):
            return None
        shape, inner = DecoderShape.from_config(self.config.to_dict()), self.model.model
        activations = torch.float32 if device.type == "cpu" else self.dtype
        layers: list[Layer] = []

        def packed(own: dict[str, torch.Tensor]) -> None:
            layers.append(pack_layer(shape, own, make, activations))
            done(len(layers) / shape.layers)

        _give(inner.embed_tokens, dict(weight=embedding))
        _give(inner.norm, dict(weight=read("model.norm.weight")))
        inner.rotary_emb = type(inner.rotary_emb)(self.config).to(device)
        for index, module in enumerate(inner.layers):
            _lend(module, f"model.layers.{index}.", read, packed)
        heads: list = []
        _lend(
            self.model.lm_head,
            "lm_head.",
            (lambda name: embedding) if self.tied else read,
            lambda own: heads.append(make_head(own["weight"])),
        )
        logits = whole_pass(self.model, ids)
        rows = self.wanted[HEAD][0]
        return Decoder.around(self.model, embedding, layers, heads[0], rows, cache_dtype), logits


def _give(module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    module.load_state_dict(tensors, assign=True)


def _lend(
    module: nn.Module,
    prefix: str,
    read: Callable[[str], torch.Tensor],
    use: Callable[[dict[str, torch.Tensor]], None],
) -> None:
    """Gives a module its tensors just before it runs, ``use``s them right after, and takes them away."""
    empty = module.state_dict()

    def before(*_) -> None:
        _give(module, {name: read(prefix + name) for name in empty})

    def after(*_) -> None:
        own = {name: value.detach() for name, value in module.state_dict().items()}
        _give(module, empty)
        for hook in hooks:  # they hold what was packed, and the files, until the next search for garbage
            hook.remove()
        use(own)

    hooks = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
