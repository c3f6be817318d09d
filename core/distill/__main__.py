"""Train a draft for a target and write the folder that ``--draft FOLDER`` loads.

    python -m core.distill --kind eagle --synthesize 3000 --out my-draft
    python -m core.distill --kind model --target FOLDER --data chats.jsonl notes.txt --out my-draft
    python -m core.distill --kind model --from-history --start assets/draft/draft-model.safetensors --out mine

The same command goes on where it was broken off. Text is what the target wrote (``--synthesize``), or the
user's own (``core.distill.sources``). Knows the command line; ``core.distill.run`` does the work.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from core.distill.corpus import Corpus, CorpusError
from core.distill.files import remedy
from core.machine.heartbeat import heard
from core.machine.progress import Progress
from core.models.errors import LoadError, is_out_of_memory
from core.models.sources import EMBEDDED
from core.pairs.draft_file import KINDS
from core.text.terminal import progress_printer, put_out, use_utf8

HELD_OUT = Path(__file__).resolve().parents[2] / "data" / "heldout.npz"  # of the embedded target


_FILES = "of chats (.jsonl, .npz), a database of Redline's (.db), or plain text"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m core.distill", description="Train a draft for a target.")
    parser.add_argument("--kind", choices=KINDS, required=True, help="how it drafts")
    parser.add_argument("--target", default=EMBEDDED, help="embedded (default), or a folder with a model")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where to write it")
    text = parser.add_argument_group("text, of one or more of these")
    text.add_argument("--data", type=Path, nargs="+", default=[], metavar="FILE", help=_FILES)
    text.add_argument("--from-history", action="store_true", help="replies in Redline's database")
    text.add_argument("--synthesize", type=int, default=0, metavar="N", help="chats the target writes itself")
    text.add_argument("--held-out", type=Path, metavar="FILE", help="chats to measure on (.npz)")
    how = parser.add_argument_group("training")
    how.add_argument("--steps", type=int, default=2000)
    how.add_argument("--layers", type=int, help="of the draft (model: 3, eagle: 1)")
    how.add_argument("--head-ids", type=int, default=16_384, metavar="N", help="it scores (default: 16384)")
    how.add_argument("--start", type=Path, metavar="FOLDER", help="a draft to go on with")
    how.add_argument("--tokens", type=int, default=1200, help="ids a step reads, about (default: 1200)")
    how.add_argument("--rate", type=float, default=0.01, help="of Muon (default: 0.01)")
    how.add_argument("--save-every", type=int, default=100, metavar="STEPS", help="(default: 100)")
    how.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    how.add_argument("--seed", type=int, default=0)
    how.add_argument("--licence", help="of the draft: the target's binds it (embedded: Apache-2.0)")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.data and not options.from_history and options.synthesize < 1:
        parser.error("name text with --data or --from-history, or let the target write some: --synthesize N")
    if min(options.steps, options.tokens, options.head_ids, options.save_every) < 1:
        parser.error("--steps, --tokens, --head-ids and --save-every begin at 1")
    if not 0 < options.rate < math.inf:
        parser.error("--rate is a number above 0")
    if options.layers is not None and options.layers < 1:
        parser.error("--layers begins at 1")
    use_utf8()
    progress = progress_printer(sys.stderr)
    place = options.out  # or what there is of it: before hours of work that could not be kept
    while not os.path.exists(place):  # Path.exists raises inside a folder that may not be entered
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        sys.exit(f"{options.out} cannot be made or written into: name another folder with --out.")
    from core.distill.train import TrainingError, check_torch  # torch takes a second to import

    try:
        check_torch()  # before hours of writing text, too
        with heard(progress) as say:

            def lasting(sentence: str) -> None:
                say.aside(lambda: print(sentence, file=sys.stderr, flush=True))

            found = _run(options, say, lasting)
    except (CorpusError, LoadError, TrainingError) as error:
        progress("", None)
        sys.exit(str(error))
    except OSError as error:
        progress("", None)
        sys.exit(_disk_sentence(options.out, error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        progress("", None)
        sys.exit(
            "There was too little memory to go on: close what else uses it, or name another --out with "
            "fewer --tokens. The same command goes on from the last checkpoint."
        )
    except KeyboardInterrupt:
        progress("", None)
        sys.exit("Broken off: the same command goes on from the last checkpoint.")
    progress("", None)
    said = [f"alpha on held-out {domain}: {alpha}" for domain, alpha in found.items()]
    said.append(f"{options.out}: run it with --target {options.target} --draft {options.out}")
    if status := put_out("\n".join(said)):
        sys.exit(status)


def _disk_sentence(out: Path, error: OSError) -> str:
    """What a file that cannot be read or written means for a training in ``out``."""
    return (
        f"{error.filename or out} cannot be read or written ({(error.strerror or str(error)).lower()}): "
        f"{remedy(error)}. The same command then goes on from the last checkpoint."
    )


def _run(options: argparse.Namespace, progress: Progress, lasting: Callable[[str], object]) -> dict:
    """``lasting`` is told what is to stay on the screen."""
    import torch

    from core.distill.run import LAYERS, Recipe, distill
    from core.distill.sources import read_all
    from core.distill.synthesize import synthesize
    from core.distill.target import load_target
    from core.distill.train import Plan
    from core.machine.home import home
    from core.models import sizes
    from core.models.embedded import prepare_embedded, target_fingerprint
    from core.models.linear import evidence
    from core.record.store import default_path

    if options.device == "cuda" and not torch.cuda.is_available():
        raise LoadError("There is no CUDA card here: leave --device out.")
    on_card = options.device == "cuda"
    fast = on_card or evidence.find(sizes.EMBEDDED, home(), say=progress).reads_bfloat16
    progress("Reading the target", None)
    dtype = torch.bfloat16 if fast else torch.float32
    target, tokenizer = load_target(options.target, options.device, dtype)
    text, origin = list(options.data), []
    if options.data:
        origin.append(f"Text of {', '.join(path.name for path in options.data)}.")
    if options.from_history:
        text.append(default_path())
        origin.append("Replies on record in Redline's database.")
    if options.synthesize:
        shards = options.out / "work" / "text"
        written = synthesize(
            target.model, tokenizer, options.synthesize, shards, seed=options.seed, progress=progress
        )
        text += written
        chats = len(Corpus.load(*written))  # a few more than were asked for
        origin.append(f"{chats:,} chats that {target.name} wrote itself, users' turns included.")
    # Of a database, what this very target wrote.
    wrote = target_fingerprint(prepare_embedded()) if options.target == EMBEDDED else None
    corpus = read_all(text, tokenizer, target_fingerprint=wrote, most=_most_ids(options, target))
    held_out = options.held_out
    if held_out is None and options.target == EMBEDDED and HELD_OUT.exists():
        held_out = HELD_OUT
    layers = LAYERS[options.kind] if options.layers is None else options.layers
    plan = Plan(options.steps, options.tokens, options.rate, seed=options.seed, save_every=options.save_every)
    _, found = distill(
        target,
        tokenizer,
        corpus,
        None if held_out is None else Corpus.load(held_out),
        Recipe(options.kind, layers, options.head_ids, options.start),
        plan,
        options.out,
        " ".join(origin),
        options.licence or ("Apache-2.0" if options.target == EMBEDDED else "That of the target."),
        progress,
        lasting,
    )
    return found


def _most_ids(options: argparse.Namespace, target) -> int:
    """How many ids of text the disk has room for; what an earlier run of the command left of it is room."""
    from core.distill.kinds import feature_layers
    from core.distill.needs import bytes_of_features, free_on_disk

    kinds = len(feature_layers(options.kind, target.shape.layers))
    there = sum(file.stat().st_size for file in (options.out / "work").glob("features-*.bin"))
    return (free_on_disk(options.out) + there) // bytes_of_features(target, kinds, 1)


if __name__ == "__main__":
    main()
