"""Whether a device computes what the CPU does, and whether rows of a pass depend on each other there.

Serves ``core.bench.synthetic``. Knows tiny models and random rows; no time.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from core.bench.random_pair import SMALL, NoText, random_model, scripted_pair
from core.drafters.model import ModelDrafter
from core.engine import device_rule
from core.engine.auto_k import MOST
from core.engine.loop import Engine
from core.models.decoder import Decoder
from core.models.linear.checks import product_dependence
from core.models.linear.forms import maker
from core.models.transformers_decoder import TransformersDecoder
from core.records import Fate, Settings
from core.verify import sampling

FLOAT = maker("float32")
_FILTERS = (
    Settings(temperature=1.0),
    Settings(temperature=0),
    Settings(temperature=0.7, top_k=20),
    Settings(temperature=1.2, top_p=0.8),
    Settings(temperature=1.0, top_k=30, top_p=0.9, min_p=0.05),
    Settings(temperature=0.9, min_p=0.1, repetition_penalty=1.3),
)


def filters_differ(device: torch.device, width: int = 1000) -> float:
    """The largest difference of a probability from the CPU's, over the filters, in rows of every kind."""
    generator = torch.Generator().manual_seed(1)
    rows = 3 * torch.randn(MOST + 1, width, generator=generator)
    prefix = torch.randint(width, (50,), generator=generator).tolist()
    seen = torch.zeros(width, dtype=torch.bool)
    seen[prefix] = True
    worst = 0.0
    for settings in _FILTERS:
        found = device_rule.distributions(rows.to(device), settings, seen.to(device).expand_as(rows)).p.cpu()
        for row, logits in zip(found, rows, strict=True):
            p, _ = sampling.distributions(logits, settings, prefix)
            worst = max(worst, (row - p.over(torch.arange(width))).abs().max().item())
    return worst


def verdicts_differ(device: torch.device, cases: int, width: int = 400, k: int = 5) -> int:
    """In how many of ``cases`` for each verifier a block is judged differently from the CPU's reference."""
    generator, differing = torch.Generator().manual_seed(2), 0
    for case, verifier in itertools.product(range(cases), sampling.VERIFIERS):
        p, other = (torch.rand(k + 1, width, generator=generator) ** 3 for _ in range(2))
        p, q = (rows / rows.sum(1, keepdim=True) for rows in (p, (p + other * (case % 4))[:k]))
        draws = torch.rand(2 * k + 1, generator=generator, dtype=torch.float64)
        uniform = iter(draws.tolist()).__next__
        proposals = []
        for row in map(sampling.Distribution, q):
            proposals.append(sampling.Proposal(sampling.sample(row, uniform()), row, row))
        target = [sampling.Distribution(row) for row in p]
        *drafts, own = sampling.VERIFIERS[verifier](target.__getitem__, proposals, uniform)
        expected = (sum(outcome.fate is Fate.ACCEPTED for outcome in drafts), own.id)
        rows = device_rule.Rows(p, p, torch.ones(k + 1, dtype=torch.bool), p.amax(1))
        rows = device_rule.Rows(*(getattr(rows, name).to(device) for name in rows.__slots__))
        ids = torch.tensor([proposal.id for proposal in proposals], device=device)
        count = torch.tensor(k, device=device)
        found = device_rule.judge(rows, q.to(device), ids, count, draws.to(device), verifier)
        differing += (found.kept.item(), found.own.item()) != expected
    return differing


def _tiny(kind: str, sizes: dict, device: torch.device) -> Decoder | TransformersDecoder:
    """A float32 model of spread-out predictions, the same on every device."""
    torch.manual_seed(0)
    model = random_model(sizes, torch.device("cpu"), torch.float32, spread=0.15).to(device)
    return TransformersDecoder(model) if kind == "transformers" else Decoder.from_model(model, FLOAT)


def tiny_differs(kind: str, device: torch.device, count: int = 4) -> tuple[float, int, int]:
    """A tiny float32 pair on the device and on the CPU: the largest difference of a probability, and of
    ``count`` replies how many differ in an id, batched there against step by step here, and how many."""
    ids = list(range(24))
    pairs = []
    for place in (device, torch.device("cpu")):
        target, draft = (_tiny(kind, sizes, place) for sizes in SMALL)
        pair = scripted_pair(target, draft, 0.5, "none")
        drafter = ModelDrafter(draft, vocabulary=target.vocabulary)
        pairs.append(replace(pair, target=target, drafter=drafter, tokenizer=NoText()))
    rows = [pair.target.logits(ids, pair.target.new_cache()).softmax(-1) for pair in pairs]
    replies = []
    for pair, on_device in zip(pairs, (True, False), strict=True):
        engine = Engine(pair, batched=on_device)
        settings = [Settings(temperature=1.0, seed=n, max_new_tokens=16) for n in range(count)]
        generations = [engine.generate(ids, setting) for setting in settings]
        for generation in generations:
            for _ in generation:
                pass
        replies.append([generation.reply.token_ids for generation in generations])
    different = sum(one != other for one, other in zip(*replies, strict=True))
    return (rows[0] - rows[1]).abs().max().item(), different, len(replies[0])


def kernels_depend(decoder: Decoder) -> dict[str, float]:
    """For the products of a layer and the head: how far a row's result depends on the rows beside it."""
    layer = decoder.layers[0]
    names = ("qkv", "out", "gate_up", "down", "head")
    return {
        name: product_dependence(product, product.shape[1], MOST + 1, decoder.device, decoder.dtype)
        for name, product in zip(names, (*layer.products, decoder.head), strict=True)
    }


@torch.inference_mode()
def filters_depend(device: torch.device, width: int) -> float:
    """The same for the filter chain."""
    rows = 3 * torch.randn(MOST + 1, width, generator=torch.Generator().manual_seed(3)).to(device)
    worst = 0.0
    for settings in _FILTERS[:-1]:
        whole = device_rule.distributions(rows, settings).p
        alone = torch.cat([device_rule.distributions(row[None], settings).p for row in rows])
        worst = max(worst, (whole - alone).abs().max().item())
    return worst
