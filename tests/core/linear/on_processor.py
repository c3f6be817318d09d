"""A process of its own for ``test_processors.py``: what a processor makes of the embedded pair.

Run: ``python -m tests.core.linear.on_processor [mac]``, narrowed by ``ONEDNN_MAX_CPU_ISA`` and
``ATEN_CPU_CAPABILITY``; prints one JSON object. With ``mac`` what a wheel for Apple's processors lacks is
taken away first.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from types import SimpleNamespace

import core  # noqa: F401  (sets how torch's threads wait, before torch is imported)

import torch  # isort: skip

PROMPT = "Write a Python function that adds two numbers."
TOKENS = 12


def take_away_what_a_mac_lacks() -> None:
    torch.backends.cpu.get_cpu_capability = lambda: "DEFAULT"
    torch.backends.mkldnn.is_available = lambda: False
    torch.cpu._is_vnni_supported = lambda: False
    torch.cpu._is_amx_tile_supported = lambda: False
    for name in ("mkldnn", "onednn", "quantized"):
        setattr(torch.ops, name, SimpleNamespace())


@torch.inference_mode()
def main() -> None:
    if "mac" in sys.argv[1:]:
        take_away_what_a_mac_lacks()
    from core.distill.corpus import Chat
    from core.engine.loop import Engine
    from core.fidelity import FLOAT, fidelity, load_weights
    from core.models.memory import choose_dtype
    from core.pairs.load import load_embedded
    from core.records import Settings
    from core.text.chat import encode_chat

    pair = load_embedded()
    ids = encode_chat(pair.tokenizer, [{"role": "user", "content": PROMPT}])
    replies = []
    for count in (0, 3):
        settings = Settings(temperature=0, num_draft_tokens=count, max_new_tokens=TOKENS)
        generation = Engine(pair).generate(ids, settings)
        rounds = list(generation)
        replies.append(generation.reply.token_ids)
    chat = Chat(torch.tensor([*ids, *replies[0]]).numpy(), len(ids), 0.0)
    near = fidelity(pair.target, load_weights().target(FLOAT, FLOAT), [chat])
    found = pair.products
    print(
        json.dumps(
            {
                "capability": torch.backends.cpu.get_cpu_capability(),
                "layers": found.layers,
                "head": found.head,
                "draft": found.draft,
                "table": [asdict(entry) for entry in found.table],
                "sentence": found.sentence,
                "plain": replies[0],
                "speculative": replies[1],
                "rounds": len(rounds),
                "exactness_note": pair.info.exactness_note,
                "notes": pair.notes,
                "kl": near.kl,
                "overlap": near.overlap,
                "large_dtype": choose_dtype("auto", "cpu", 3 * 10**9),
            }
        )
    )


if __name__ == "__main__":
    main()
