"""Measures a 7B-shaped pair on a CUDA card without downloads, through the real engine.

    python -m core.bench_synthetic [--device cuda|cpu] [--small] [--json FILE]

Weights are random, in NF4 and in bfloat16, and made on the card; every pass runs in earnest and then says
what a script says (``core.synthetic``), so the acceptance to expect is known: it is printed beside what came
out.

First, checks: the sampling maths of the device against that of the CPU (``core.sampling``), a tiny model on
both, and whether rows of a pass depend on each other in any kernel used. Then tokens/s plain and for
K = 1 to 8, passes by number of rows, draft steps, launches and waits of a round, and bytes of weights a pass
over the measured speed of a copy. On a data-centre card it ends within 4 minutes; past that it skips what is
left. ``--small`` runs everything with tiny models, also on a CPU: that it works is then all it shows.

Needs torch, transformers and bitsandbytes, nothing else. Knows no real model, no text and no page.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from core.models.errors import is_out_of_memory
from core.synthetic_report import FULL, TINY, Report, check, measure
from core.terminal import use_utf8


def _machine(device: torch.device) -> dict[str, str | None]:
    packages = ("torch", "transformers", "bitsandbytes")
    versions = {name: metadata.version(name) for name in packages}
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return versions | {"device": device.type, "card": card, "system": platform.platform(terse=True)}


def run(device: str = "cuda", small: bool = False, json: str | None = None) -> int:
    """The whole run; returns an exit status, 2 where it cannot be made."""
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        print(
            "There is no CUDA card here: python -m core.bench_synthetic --device cpu --small tries it with"
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
        report.say("Tiny models: this shows that everything works; the speeds mean nothing.")
    check(report, place, sizes)
    report.figures["pairs"] = {}
    for form in ("nf4", "bfloat16"):
        if report.over:
            report.say(f"\nTarget in {form}: left out, the time is up")
            continue
        try:
            report.figures["pairs"][form] = measure(report, form, place, sizes)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            report.say(f"  The card's memory is too small for a target in {form}.")
        gc.collect()
        if place.type == "cuda":
            torch.cuda.empty_cache()
    report.figures["seconds"] = report.seconds
    report.say(f"\n{report.seconds:.0f} s in all")
    return _write(report.figures, json) if json else 0


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
        prog="python -m core.bench_synthetic", description="Measure a random pair on a CUDA card."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models, to see that everything works")
    parser.add_argument("--json", metavar="FILE", help="write all figures here as JSON")
    return run(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
