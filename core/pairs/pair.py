"""A draft and a target that share a tokenizer, ready to run, and the other ways to draft for that target.

Knows how to put together the embedded pair from files that are already there;
``core.models.embedded`` fetches and converts them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from core.drafters.base import Drafter, Drafting
from core.drafters.names import DRAFTERS
from core.drafters.untrained import makers
from core.figures.costs import Costs
from core.machine.home import home
from core.machine.progress import Progress, silent
from core.models import sizes
from core.models.base import Scorer
from core.models.decoder import Decoder, DecoderShape
from core.models.embedded import NAME
from core.models.ends import end_ids
from core.models.key_blocks import KEY_BLOCK
from core.models.linear import evidence
from core.models.linear.findings import Found
from core.models.linear.forms import in_two, maker, needs_rotation
from core.models.rotation import Rotation
from core.models.rows import self_test
from core.models.sources import EMBEDDED
from core.pairs import distilled
from core.pairs.spec import CUSTOM
from core.records import PairInfo, Settings
from core.text.detokenise import PromptError


@dataclass
class Pair:
    """``end_ids`` end a reply; ``drafter`` is None where the target writes alone.

    ``suggested`` holds fields of ``Settings`` that the target's ``generation_config`` names: shown as a
    suggestion, never applied unasked. ``notes`` are sentences to show with the pair. ``costs`` are what its
    passes take on this machine (``core.engine.calibration``): with them K can be chosen automatically, which
    begins by expecting ``acceptance``. ``products`` is the evidence by which the forms of its products were
    chosen, where they were. ``others`` make further ways to draft for the same target, by name.
    """

    info: PairInfo
    tokenizer: object
    target: Scorer
    drafter: Drafter | None
    end_ids: frozenset[int]
    suggested: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    costs: Costs | None = None
    acceptance: float = 0.5
    products: Found | None = None
    others: Mapping[str, Callable[[], Drafting]] = field(default_factory=dict)
    _made: dict[str, Pair] = field(default_factory=dict, repr=False)
    _making: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def drafters(self) -> tuple[str, ...]:
        """The names ``drafting`` takes, in the order of ``core.drafters.names.DRAFTERS``."""
        offered = {self.info.drafter, *self.others, "plain"}
        return tuple(name for name in DRAFTERS if name in offered)

    def drafting(self, name: str | None) -> Pair:
        """This target with another way to draft, made at its first use; None is this pair's own.

        Raises PromptError for one that is not offered, LoadError where it cannot be made.
        """
        if name in (None, self.info.drafter):
            return self
        if name not in self.drafters:
            raise PromptError(f"This pair has no drafter {name!r}: choose one of {', '.join(self.drafters)}.")
        with self._making:
            if name not in self._made:
                if name == "plain":
                    changed = dict(drafter=None, info=replace(self.info, **NO_DRAFT), acceptance=0.5)
                else:
                    way = self.others[name]()
                    info = replace(self.info, **way.about)
                    changed = dict(drafter=way.drafter, info=info, acceptance=way.acceptance)
                self._made[name] = replace(self, costs=None, **changed)
            return self._made[name]


WARM_UP = 5.0  # seconds after which no other pass is begun to warm up

# What ``PairInfo`` says of the draft where there is none.
NO_DRAFT = dict(
    draft="",
    draft_fingerprint="",
    draft_quantization="none",
    draft_dtype="",
    draft_context_length=0,
    drafter="plain",
)


def build_embedded_pair(
    folder: Path,
    drafts: Path,
    target_fingerprint: str,
    progress: Progress = silent,
    draft: Path | None = None,
) -> Pair:
    """The embedded pair from a converted Hugging Face folder and the folder of the drafts that ship.

    ``draft`` is another draft for this target, a file or folder, to be the pair's own. Which forms the
    products take is a matter of evidence (``core.models.linear.evidence``). Raises LoadError.
    """
    progress("Reading the target's weights", None)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    shape = DecoderShape.from_config(config)
    # Copied: a view would keep the whole file in memory.
    embedding = tensors["model.embed_tokens.weight"].clone()
    found = evidence.find(sizes.EMBEDDED, home(), say=progress)
    progress("Packing the weights for this processor", None)
    target = embedded_target(shape, tensors, embedding, found.layers, found.head, found.attention)
    forms = distilled.Forms(found.draft, found.draft)
    lender = distilled.Lender(NAME, target, shape, embedding, lambda ids: embedding[ids])
    name = distilled.default_kind(target)
    files = distilled.shipped(drafts, name)
    if draft is not None:
        name, files[name] = distilled.chosen(draft, lender)
    distilled.keep_features(target, files.values())
    trained = distilled.makers(files, lender, forms)
    own = trained.pop(name)()
    if not found.rows_tested:
        rows = self_test(target, progress, behind=KEY_BLOCK - 8)  # which end in two blocks of keys
        found = replace(found, rows_tested=rows.whole, rows_note=rows.sentence)
        if found.rows_tested:
            evidence.remember(sizes.EMBEDDED, found, home())
    warm_up(target, own.drafter, progress)
    progress("Reading the tokenizer", None)
    # Not AutoTokenizer, which gives the same here but imports model code for a second first.
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    generation = json.loads((folder / "generation_config.json").read_text())
    info = PairInfo(
        pair=EMBEDDED if draft is None else CUSTOM,
        target=NAME,
        target_fingerprint=target_fingerprint,
        quantization=distilled.shown(found.layers),
        device="cpu",
        context_length=shape.context_length,
        exactness_note=found.rows_note,
        **own.about,
    )
    return Pair(
        info=info,
        tokenizer=tokenizer,
        target=target,
        drafter=own.drafter,
        end_ids=end_ids(tokenizer, config, generation),
        notes=(found.sentence,) if found.sentence else (),
        products=found,
        others={**makers(target, info, own), **trained},
    )


LOAD_AGAIN = "Other products are the fastest here now: load the pair again, and it runs with them."
CHOSEN = ("layers", "head", "draft", "attention")


def look_again(pair: Pair, say: Progress = silent) -> str | None:
    """Checks and times the forms of a pair's products anew, where evidence chose them, and keeps what is
    found for the next load. The pair then has the new figures, beside the forms that run. Gives a sentence
    where the next load will run others."""
    if pair.products is None:
        return None
    found = evidence.find(sizes.EMBEDDED, home(), again=True, say=say)
    runs = {what: getattr(pair.products, what) for what in CHOSEN}
    pair.products = replace(found, **runs)
    return None if pair.products == found else LOAD_AGAIN


def embedded_target(
    shape: DecoderShape,
    tensors: Mapping[str, torch.Tensor],
    embedding: torch.Tensor,
    layers: str,
    head: str,
    attention: str = "float32",
) -> Decoder:
    """The embedded target with its products in these forms (``core.models.linear.forms``), its outliers
    turned away where ``layers`` asks for that, and keys and values in the dtype ``attention``."""
    rotation = Rotation.of(shape.head_size, tensors["model.norm.weight"]) if needs_rotation(layers) else None
    return Decoder.from_tensors(
        shape,
        tensors,
        maker(layers),
        embedding,
        maker(head)(embedding if rotation is None else rotation.head(embedding)),
        rotation=rotation,
        make_down=maker(in_two(layers)),
        cache_dtype=getattr(torch, attention),
    )


@torch.inference_mode()
def warm_up(
    target: Scorer,
    drafter: Drafter,
    say: Progress = silent,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """One short pass of each kind: kernels set themselves up at first use, which a first reply would feel.

    Ends early where passes take so long that setting up is little beside them.
    """
    ids = list(range(80))
    cache, state, settings = target.new_cache(), drafter.new_state(), Settings()

    def draft(length: int) -> None:
        drafter.draft(ids[:length], 2, settings, lambda: 0.5, state, cache)
        state.crop(length)

    steps = [
        lambda: target.prefill(ids[:64], cache),
        lambda: drafter.prefill(ids[:64], state, cache),
        *(partial(target.logits, ids[:rows], cache) for rows in range(1, settings.num_draft_tokens + 2)),
        *(partial(draft, length) for length in (65, 67)),  # it then reads one id, and two
    ]
    start = clock()
    for done, step in enumerate(steps):
        if clock() - start > WARM_UP:
            return
        say("Warming up", done / len(steps))
        step()
