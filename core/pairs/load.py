"""From a ``PairSpec`` to a ``Pair`` that runs: the one way to get any pair, the embedded one included.

Decides which way a pair is loaded and sees that whatever goes wrong is one sentence with nothing left loaded.
Imports at first only what the embedded pair needs: ``core.pairs.general`` knows all others.

Run: ``python -m core.pairs.load --target MODEL [--draft MODEL] ...`` loads a pair and prints what it is.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from core.machine.heartbeat import heard
from core.machine.progress import Progress, silent
from core.models.embedded import DRAFTS, checked_fingerprint, prepare_embedded
from core.models.errors import LoadError, first_line, is_out_of_memory
from core.models.memory import release
from core.models.sources import EMBEDDED, SpecError
from core.pairs.flags import add_pair_arguments, pair_spec
from core.pairs.spec import PairSpec, draft_folder, embedded_spec
from core.text.terminal import progress_printer

if TYPE_CHECKING:
    from core.pairs.pair import Pair

log = logging.getLogger(__name__)


def load_pair(spec: PairSpec, progress: Progress = silent) -> Pair:
    """The pair ``spec`` asks for, ready to run. Raises LoadError, with nothing left loaded."""
    try:
        with heard(progress) as say:
            return _load(spec, say)
    except LoadError as error:
        sentence = str(error)
    except Exception as error:  # of many kinds: the last are those of kernels that fail at their first use
        # As text, since whoever kept the exception would keep the models.
        log.error("The pair could not be loaded:\n%s", traceback.format_exc())
        sentence = _sentence(error)
    # Only now, when the exception that held on to half a pair is gone.
    release()
    raise LoadError(sentence)


def load_embedded(progress: Progress = silent, draft: Path | None = None) -> Pair:
    """The embedded pair, ready to run; prepares the target first where that has not been done.

    ``draft`` is another draft for this target, a file or folder, in the place of the pair's own.
    ``progress(sentence, fraction)`` is called from this thread; fraction is 0 to 1, or None where it
    is not known. Raises LoadError.
    """
    from core.pairs.pair import build_embedded_pair  # imports torch: the page can be up before

    folder = prepare_embedded(progress)
    return build_embedded_pair(folder, DRAFTS, checked_fingerprint(folder, progress), progress, draft)


def _load(spec: PairSpec, progress: Progress) -> Pair:
    if not _as_it_comes(spec):
        from core.pairs.general import load_general  # with transformers, which takes seconds to import

        return load_general(spec, progress)
    if (folder := draft_folder(spec.draft)) is not None:
        return load_embedded(progress, folder)
    pair = load_embedded(progress)
    return pair if spec.draft else pair.drafting("plain")


def _as_it_comes(spec: PairSpec) -> bool:
    """Whether the embedded target is asked for without wishes: it then runs on its own lean path."""
    return (
        spec.target == EMBEDDED
        and spec.quantize == spec.draft_quantize == "auto"
        and spec.device in ("auto", "cpu")
        and spec.dtype in ("auto", "float32")
        and (spec.draft in (EMBEDDED, None) or draft_folder(spec.draft) is not None)
    )


def _sentence(error: Exception) -> str:
    """One sentence for what nobody had in mind."""
    if is_out_of_memory(error):
        return (
            "There was too little memory to load this pair: quantise it further, choose smaller models, or "
            "close what else uses the memory."
        )
    return f"The pair could not be loaded ({first_line(error)}): check its files, or choose another pair."


def main() -> None:
    parser = argparse.ArgumentParser(description="Load a pair and print what it is.")
    add_pair_arguments(parser)
    say = progress_printer(sys.stderr)
    try:
        pair = load_pair(pair_spec(parser.parse_args(), os.environ) or embedded_spec(), say)
    except (LoadError, SpecError) as error:
        say("", None)
        sys.exit(str(error))
    say("", None)
    print(pair.info)
    print(*pair.notes, sep="\n")


if __name__ == "__main__":
    main()
