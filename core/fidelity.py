"""How far the form a target runs in takes it from the model as it came, and what drafts are worth to it.

On held-out chats of the embedded target (``data/heldout.npz``) the probabilities after each id of a reply
are held against those of the same weights in float32: KL divergence in nats, from the float model to the
form; overlap, Σ min of the two; and how often both think the same id likeliest. Of a draft, as it runs on
that target, α = mean Σ min(p, q) at temperature 1 over the same positions, of replies with code and without.

Which forms there are and which is fastest is ``core.models.linear``'s matter. Knows the embedded target
alone, and asks nothing of speed.

Run: ``python -m core.fidelity [--chats 10] [--forms int4,int8-fbgemm,...] [--drafts eagle,model,medusa]``;
without ``--forms`` the one that runs here. A form may name the head's behind a slash.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from safetensors.torch import load_file

from core.distill.__main__ import HELD_OUT
from core.distill.corpus import FENCE, Chat, Corpus
from core.drafters.base import Drafter
from core.machine.home import home
from core.models import sizes
from core.models.base import Scorer
from core.models.embedded import DRAFTS, NAME, prepare_embedded
from core.models.errors import LoadError
from core.models.kv_cache import DecoderShape
from core.models.linear import evidence, forms
from core.pairs import distilled
from core.pairs.draft_file import KINDS
from core.pairs.pair import embedded_target
from core.records import Settings
from core.text.terminal import progress_printer, put_out, use_utf8

AT_ONCE = 16  # rows of a pass, as of a verification
REPLY = 128  # ids of a reply that are looked at
FLOAT = "float32"


@dataclass(frozen=True)
class Fidelity:
    """Means over ``tokens`` positions; ``kl`` in nats."""

    kl: float
    overlap: float
    top1: float
    tokens: int


def some_chats(corpus: Corpus, count: int) -> list[Chat]:
    """``count`` chats from all over the corpus, their replies cut to ``REPLY`` ids."""
    places = np.linspace(0, len(corpus) - 1, min(count, len(corpus))).astype(int)
    chats = [corpus[place] for place in places]
    return [replace(chat, ids=chat.ids[: chat.prompt_len + REPLY]) for chat in chats]


@torch.inference_mode()
def passes(target: Scorer, chat: Chat) -> Iterator[torch.Tensor]:
    """Log-probabilities after each id of a reply but the last, the prompt's last id first: (rows, vocabulary)
    float32, pass by pass, in rounds of ``AT_ONCE`` rows as when a reply is verified."""
    ids, start = chat.ids.tolist(), chat.prompt_len - 1
    cache = target.new_cache()
    target.prefill(ids[:start], cache)
    for begin in range(start, len(ids) - 1, AT_ONCE):
        yield target.logits(ids[begin : min(begin + AT_ONCE, len(ids) - 1)], cache).float().log_softmax(-1)


@torch.inference_mode()
def fidelity(target: Scorer, reference: Scorer, chats: Sequence[Chat]) -> Fidelity:
    """How far ``target`` is from ``reference`` over the replies of ``chats``."""
    sums, tokens = torch.zeros(3, dtype=torch.float64), 0
    for chat in chats:
        for meant, said in zip(passes(reference, chat), passes(target, chat), strict=True):
            p, q = meant.double().exp(), said.double().exp()
            kl = torch.where(p > 0, p * (meant.double() - said.double()), 0.0).sum()
            same = (meant.argmax(-1) == said.argmax(-1)).sum()
            sums += torch.stack([kl, torch.minimum(p, q).sum(), same.double()])
            tokens += len(meant)
    return Fidelity(*(sums / tokens).tolist(), tokens)


@torch.inference_mode()
def alpha(drafter: Drafter, target: Scorer, chats: Sequence[Chat]) -> tuple[float, int]:
    """α of a drafter at the first drafted position, over every position of the replies, and their number."""
    total, tokens, settings = 0.0, 0, Settings(temperature=1.0)
    for chat in chats:
        ids, state, cache = chat.ids.tolist(), drafter.new_state(), target.new_cache()
        start = chat.prompt_len
        target.prefill(ids[: start - 1], cache)
        drafter.prefill(ids[: start - 1], state, cache)
        for end in range(start, len(ids)):
            proposals = drafter.draft(ids[:end], 1, settings, lambda: 0.5, state, cache)
            p = target.logits(ids[end - 1 : end], cache)[0].float().softmax(-1)
            if proposals:
                q = proposals[0].q
                own = p if q.ids is None else p.index_select(0, q.ids)
                total += torch.minimum(own[: len(q.probabilities)], q.probabilities).sum().item()
            tokens += 1
    return total / tokens, tokens


@dataclass(frozen=True)
class Weights:
    """The embedded target as it came."""

    shape: DecoderShape
    tensors: dict[str, torch.Tensor]

    @property
    def embedding(self) -> torch.Tensor:
        return self.tensors["model.embed_tokens.weight"]

    def target(self, layers: str, head: str, attention: str = FLOAT):
        return embedded_target(self.shape, self.tensors, self.embedding, layers, head, attention)


def load_weights() -> Weights:
    """Raises LoadError where the embedded target cannot be had."""
    folder = prepare_embedded()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Weights(DecoderShape.from_config(config), load_file(folder / "model.safetensors"))


def drafter_of(kind: str, target: Scorer, weights: Weights, form: str) -> Drafter:
    """A draft that ships, on this target, which keeps what it looks at from now on."""
    file = DRAFTS / f"draft-{kind}.safetensors"
    embedding = weights.embedding
    lender = distilled.Lender(NAME, target, weights.shape, embedding, lambda ids: embedding[ids])
    distilled.keep_features(target, [file])
    return distilled.make(file, lender, distilled.Forms(form, form)).drafter


def main() -> int:
    use_utf8()
    parser = argparse.ArgumentParser(prog="python -m core.fidelity", description=__doc__.splitlines()[0])
    parser.add_argument("--chats", type=int, default=10, help="held-out chats to look at (default: 10)")
    parser.add_argument("--forms", help="forms of the layers, by commas; /FORM for the head's")
    parser.add_argument("--drafts", default="", help="kinds of drafts whose α to measure, by commas")
    options = parser.parse_args()
    drafts = [kind for kind in options.drafts.split(",") if kind]
    if unknown := [kind for kind in drafts if kind not in KINDS]:
        parser.error(f"there is no draft of kind {unknown[0]}: choose among {', '.join(KINDS)}")
    if options.chats < 1:
        parser.error("--chats must be 1 or more")
    say = progress_printer(sys.stderr)
    found = evidence.find(sizes.EMBEDDED, home(), say=say)
    asked = options.forms.split(",") if options.forms else [f"{found.layers}/{found.head}"]
    pairs = [(layers, head or found.head) for layers, _, head in (form.partition("/") for form in asked)]
    try:
        for form in (form for pair in pairs for form in pair):
            forms.maker(form)
        weights = load_weights()
    except KeyError as error:
        parser.error(f"there is no form {error}: choose among {', '.join(forms.NAMES)}")
    except LoadError as error:
        say("", None)
        print(error, file=sys.stderr)
        return 1
    corpus = Corpus.load(HELD_OUT)
    chats = some_chats(corpus, options.chats)
    reference = weights.target(FLOAT, FLOAT)
    lines = [f"{'layers / head':40}{'KL, nats':>10}{'overlap':>9}{'top-1':>8}{'tokens':>8}"]
    for layers, head in pairs:
        say(f"{layers} / {head}", None)
        target = weights.target(layers, head, found.attention)
        figures = fidelity(target, reference, chats)
        lines.append(
            f"{f'{layers} / {head}':40}{figures.kl:10.5f}{figures.overlap:9.4f}{figures.top1:8.3f}"
            f"{figures.tokens:8}"
        )
        if drafts:
            lines += _alphas(drafts, target, weights, found.draft, chats)
    say("", None)
    return put_out("\n".join(lines))


def _alphas(
    kinds: Sequence[str], target: Scorer, weights: Weights, form: str, chats: Sequence[Chat]
) -> list[str]:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(prepare_embedded())
    coded = [FENCE in tokenizer.decode(chat.reply.tolist()) for chat in chats]
    lines = []
    for kind in kinds:
        drafter = drafter_of(kind, target, weights, form)
        for name, of in (("code", True), ("prose", False)):
            some = [chat for chat, code in zip(chats, coded, strict=True) if code == of]
            if some:
                value, tokens = alpha(drafter, target, some)
                lines.append(f"  {kind} in {form}: α {value:.4f} on {tokens} tokens of {name}")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
