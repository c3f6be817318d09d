"""What the commands of the documentation would run on machines that are not here, or why they are refused.

    python -m tests.core.machines

prints the table; "*" marks what runs through transformers' own modules. Machines are what torch and the
system say of them: device, free memory, compute capability and the architectures that torch was built for.
Models are those of the catalogue, by their configs; a GGUF file is one of Qwen2.5. Knows nothing of what
really happens on such a machine.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from core.models import asked, memory, quantize
from core.models.checkpoint import Checkpoint
from core.models.errors import LoadError
from core.pairs import load, plan
from core.pairs.catalogue import CATALOGUE
from core.pairs.flags import add_pair_arguments, pair_spec
from core.pairs.spec import PairSpec, embedded_spec

DOCS = [
    Path(__file__).resolve().parents[2] / name for name in ("README.md", "docs/USING.md", "docs/SPACE.md")
]
BUILDS = {  # of torch, and the architectures that each has kernels for
    "cu126": ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"],
    "cu130": ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"],
    "rocm": ["gfx90a", "gfx942", "gfx1030", "gfx1100"],
}
MODELS = {
    model.repo: model for entry in CATALOGUE.values() for model in (entry.target_model, entry.draft_model)
}
# A GGUF file's model by its name in the documentation.
FILES = {"big": "Qwen/Qwen2.5-7B-Instruct", "small": "Qwen/Qwen2.5-0.5B-Instruct"}


@dataclass(frozen=True)
class Machine:
    """``card`` is in GB, 0 for none; ``memory`` is the processor's."""

    card: int
    capability: tuple[int, int] = (8, 9)
    build: str = "cu130"
    memory: int = 32

    @property
    def name(self) -> str:
        if not self.card:
            return f"cpu, {self.memory} GB"
        kind = "AMD gfx1100" if self.build == "rocm" else f"{self.capability[0]}.{self.capability[1]}"
        short = f", {self.memory} GB main" if self.memory < 8 else ""
        return f"{self.card} GB, {kind}, {self.build}{short}"


MACHINES = [
    Machine(0, memory=8),
    Machine(0, memory=32),
    *(Machine(card) for card in (8, 12, 16, 24, 80)),
    *(Machine(16, capability) for capability in ((7, 5), (8, 6), (9, 0))),
    Machine(16, (6, 1), "cu126"),
    Machine(16, (6, 1), "cu130"),
    Machine(24, (11, 0), "rocm"),
    Machine(16, (7, 5), memory=4),
]


@contextlib.contextmanager
def on(machine: Machine) -> Iterator[None]:
    """As if torch were asked there. A card's driver and desktop have half a gigabyte of it."""
    free = {"cpu": machine.memory * 10**9, "cuda": (machine.card << 30) - 5 * 10**8 if machine.card else None}
    hip = machine.build == "rocm"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "hip", "7.0" if hip else None)
        for what, answer in {
            "is_available": bool(machine.card),
            "device_count": 1,
            "current_device": 0,
            "get_device_name": machine.name,
            "get_device_capability": machine.capability,
            "get_arch_list": BUILDS[machine.build],
            "get_device_properties": SimpleNamespace(gcnArchName="gfx1100" if hip else None),
            "mem_get_info": (free["cuda"], machine.card << 30),
        }.items():
            patch.setattr(torch.cuda, what, lambda *_, answer=answer: answer)
        for module in (memory, plan.memory):
            patch.setattr(module, "free_bytes", lambda device: free[device])
        patch.setattr(quantize, "best_form", lambda form, *_: form)
        patch.setattr(asked, "has_bitsandbytes", lambda: True)
        patch.setattr(quantize, "has_bitsandbytes", lambda: True)
        patch.setattr(plan, "inspect", lambda source, say: _checkpoint(source))
        patch.setattr(plan, "_config", lambda found: _transformers_config(found.config))
        patch.setattr(plan, "_tokenizer", lambda *given: None)
        yield


def _checkpoint(source: str) -> Checkpoint:
    gguf = source.endswith(".gguf")
    model = MODELS[FILES[Path(source).stem] if gguf else source]
    return Checkpoint(
        source,
        "gguf" if gguf else "hub",
        Path(),
        model.config,
        (),
        gguf_file=Path(source).name if gguf else None,
        parameters=model.size.parameters,
        quantized="Q4_K_M" if gguf else None,
    )


def _transformers_config(config: dict):
    return AutoConfig.for_model(**config)


def commands() -> list[str]:
    """Every command of the documentation that names a pair, and the one that names none."""
    lines = [line.strip() for file in DOCS for line in file.read_text(encoding="utf-8").splitlines()]
    found = [line for line in lines if line.startswith(("python app.py", ".venv/bin/python app.py"))]
    found = [line.split("#")[0].split("python ", 1)[1].strip() for line in found]
    own = "FOLDER"  # a model that only the reader knows
    return list(dict.fromkeys(line for line in found if own not in line))


def spec_of(command: str) -> PairSpec:
    import argparse

    parser = argparse.ArgumentParser()
    add_pair_arguments(parser)
    return pair_spec(parser.parse_args(shlex.split(command)[1:]), {}) or embedded_spec()


def planned(command: str, machine: Machine) -> str:
    """What runs, model by model: form, dtype and by what, and the memory it needs; or the sentence that
    refuses."""
    spec = spec_of(command)
    if load._as_it_comes(spec):
        return "the embedded pair on the processor"
    with on(machine):
        try:
            plans = plan.plan_models(spec)
            plan.check_memory(plans)
        except LoadError as error:
            return str(error)
        models = [f"{one.name} {one.form} {one.dtype}{'' if one.not_lean is None else '*'}" for one in plans]
        needed = sum(one.need.bytes for one in plans) + memory.OVERHEAD
        return f"{plans[0].device}: {' + '.join(models)}, {memory.gigabytes(needed)}"


def main() -> None:
    for command in commands():
        print(command)
        for machine in MACHINES:
            print(f"  {machine.name:30} {planned(command, machine)}")


if __name__ == "__main__":
    sys.exit(main())
