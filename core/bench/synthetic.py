"""Measures a 7B-shaped pair on a CUDA card without downloads, through the real engine.

    python -m core.bench.synthetic [--device cuda|cpu] [--small] [--json FILE]

Weights are random and made on the card; every pass runs in earnest and then says what a script says
(``core.bench.random_pair``), so the acceptance to expect is known: it is printed beside what came out.

It ends within three minutes (past 150 s nothing new is begun) and says first what would settle most:

1. whether the device computes what the CPU does;
2. how often a round waits, once in every way that is played on the device, and how many kernels it launches
   beside what the fake card counts (``core.bench.fake_card``);
3. the target's pass in NF4 by number of rows, where bitsandbytes unpacks the weights, and a draft step;
4. tokens/s plain and by K, beside the roofline of this card and host (``core.bench.roofline_here``);
5. a reply while the card's memory is full, and another after it;
6. how far rows of a pass depend on each other;
7. the same target in NF4 in float16, and unquantised: passes, and the speed of K = 0 and 4.

What must hold and does not is said again at the end, and the exit status is 1 then. ``--small`` runs
everything with tiny models, also on a CPU: that it works is all that shows, and full memory is played.

Needs torch, transformers and bitsandbytes, nothing else. Knows no real model, no text and no page.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from core.bench.random_pair import dtype_word
from core.bench.roofline_here import measured
from core.bench.synthetic_report import DTYPES, FULL, TINY, Report, agreement, measure
from core.models.errors import is_out_of_memory
from core.models.memory import release
from core.text.terminal import use_utf8


def _machine(device: torch.device) -> dict[str, str | None]:
    packages = ("torch", "transformers", "bitsandbytes")
    versions = {name: metadata.version(name) for name in packages}
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return versions | {"device": device.type, "card": card, "system": platform.platform(terse=True)}


def run(device: str = "cuda", small: bool = False, json: str | None = None) -> int:
    """The whole run; returns an exit status: 2 where it cannot be made, 1 where something is not as it must
    be."""
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        print(
            "There is no CUDA card here: python -m core.bench.synthetic --device cpu --small tries it with"
            " tiny models.",
            file=sys.stderr,
        )
        return 2
    if place.type == "cpu" and not small:
        print("A 7B-shaped pair is for a card: give --small with --device cpu.", file=sys.stderr)
        return 2
    report, sizes = Report(), TINY if small else FULL
    report.figures["machine"] = machine = _machine(place)
    report.say(", ".join(f"{name} {value}" for name, value in machine.items() if value))
    if small:
        report.say("Tiny models: this shows that everything works; the figures mean nothing.")
    agreement(report, place, sizes)
    here = measured(place, sizes.copied)
    report.figures["bandwidth"] = here[0].bandwidth
    report.figures["pairs"] = {}
    first, second = DTYPES
    for form, dtype, brief in (("nf4", first, False), ("nf4", second, True), ("none", first, True)):
        name = f"{form}, {dtype_word(dtype)}"
        if report.over:
            report.say(f"\nTarget {name}: left out, the time is up")
            continue
        try:
            report.figures["pairs"][name] = measure(report, form, dtype, place, sizes, here, brief)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            report.say(f"  The card's memory is too small for a target {name}.")
        if place.type == "cuda":
            release()
    report.figures |= {"seconds": report.seconds, "problems": report.problems}
    report.say(f"\n{report.seconds:.0f} s in all")
    for problem in report.problems:
        report.say(f"NOT AS IT MUST BE: {problem}")
    kept = _write(report.figures, json) if json else 0
    return kept or int(bool(report.problems))


def _write(figures: dict, path: str) -> int:
    try:
        Path(path).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"{path} cannot be written: {(error.strerror or str(error)).lower()}.", file=sys.stderr)
        return 2
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    use_utf8()
    parser = argparse.ArgumentParser(
        prog="python -m core.bench.synthetic", description="Measure a random pair on a CUDA card."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models, to see that everything works")
    parser.add_argument("--json", metavar="FILE", help="write all figures here as JSON")
    return run(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
