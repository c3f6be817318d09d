"""What the embedded pair writes on the processor that runs this, and how it scores a reply given to it.

Knows nothing of emulation or of other processors: ``test_aarch64.py`` runs this on two and compares.

Run: ``python -m tests.proof.on_aarch64 FILE ID...`` scores the reply of these ids into FILE (safetensors) and
prints JSON. ``REDLINE_HOME`` holds the converted model.
"""

from __future__ import annotations

import json
import sys
import time

import core  # noqa: F401  (sets how torch's threads wait, before torch is imported)

import torch  # isort: skip
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast  # noqa: F401  (what it lacks is told at once, not at the end)

from core.engine.loop import Engine
from core.pairs.load import load_embedded
from core.pairs.pair import Pair
from core.records import Settings

# Of what follows the model is sure enough that rounding changes no token: see the test's margins.
PROMPT = "A, B, C, D,"
TOKENS = 8


def write(pair: Pair) -> tuple[list[int], int]:
    """``TOKENS`` ids behind ``PROMPT`` at temperature 0, and the number of rounds they took."""
    settings = Settings(temperature=0, num_draft_tokens=3, max_new_tokens=TOKENS)
    generation = Engine(pair).generate(pair.tokenizer.encode(PROMPT), settings)
    rounds = sum(1 for _ in generation)
    reply = generation.reply
    assert reply.error is None, reply.error
    return list(reply.token_ids), rounds


@torch.inference_mode()
def score(pair: Pair, reply: list[int]) -> torch.Tensor:
    """The target's logits (len(reply), vocabulary), float32, at each place of ``reply`` behind ``PROMPT``."""
    ids = pair.tokenizer.encode(PROMPT)
    cache = pair.target.new_cache()
    pair.target.prefill(ids[:-1], cache)
    return pair.target.logits([ids[-1], *reply[:-1]], cache).float()


def main(file: str, *reply: str) -> None:
    start = time.perf_counter()

    def tell(sentence: str, fraction: float | None = None) -> None:
        print(f"{time.perf_counter() - start:7.1f} s  {sentence}", file=sys.stderr, flush=True)

    pair = load_embedded(tell)
    tell("Scoring the reply")
    save_file({"logits": score(pair, [int(id_) for id_ in reply]).contiguous()}, file)
    tell("Writing one")
    ids, rounds = write(pair)
    tell("Done")
    said = {
        "reply": ids,
        "rounds": rounds,
        "quantization": pair.info.quantization,
        "exactness_note": pair.info.exactness_note,
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
