"""The machine a bench ran on: its description, its load, how fast it reads memory, what a pass must read.

Knows torch, and of a pair's models only that weights are tensors that their layers and head hold.
"""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import transformers

from core.bench.measured import Limit
from core.machine.threads import usable_cores
from core.pairs.pair import Pair

BUFFER_BYTES = 2 << 30  # far beyond the caches of large servers, too (some hold half of it)
READS = 7  # of each buffer; the best counts, since others' work only adds to it
RESIDENT_READS = 50
# Objects that are looked into for weights: those of packages that define models or their products.
_PACKAGES = ("core", "bitsandbytes", "transformers")
_FOR_PROMPTS = ("beside",)  # weights of core.models.linear that no pass over few rows reads


def processor_name() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def load_average() -> tuple[float, float, float] | None:
    try:
        return os.getloadavg()
    except (AttributeError, OSError):  # Windows has none
        return None


def machine(device: str) -> dict[str, object]:
    """What the figures of a pair on ``device`` ("cpu" or "cuda") depend on, for people and for JSON."""
    return {
        "processor": processor_name(),
        "cores": usable_cores(),
        "card": torch.cuda.get_device_name() if device == "cuda" else None,
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "transformers": transformers.__version__,
    }


def resident_bytes() -> int:
    """Memory this process holds now."""
    import psutil

    return psutil.Process().memory_info().rss


def synchronise(device: str) -> None:
    """Waits until what was asked of a card is done."""
    if device == "cuda":
        torch.cuda.synchronize()


# --- The limit ---------------------------------------------------------------------------------------------


def measure_limit(pair: Pair) -> Limit:
    """What the pair's passes read, and how fast its device does, with the threads torch uses now."""
    device = pair.info.device
    target = weight_bytes(pair.target)
    model = getattr(pair.drafter, "model", None)
    step = getattr(pair.drafter, "step_weights", None)  # of a drafter that is no model by itself
    large = min(BUFFER_BYTES, _free(device) // 4)
    return Limit(
        target_bytes=target,
        draft_bytes=weight_bytes(model) if model else held_bytes(step) if step else None,
        memory_bytes=large,
        memory=read_speed(large, READS, device),
        resident=read_speed(target, RESIDENT_READS, device),
    )


def _free(device: str) -> int:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    import psutil

    return psutil.virtual_memory().available


def read_speed(size: int, reads: int, device: str) -> float:
    """Bytes per second at which a buffer of ``size`` bytes is summed up: the best of ``reads`` times."""
    buffer = torch.ones(max(1, size // 4), dtype=torch.float32, device=device)
    best = 0.0
    for _ in range(reads + 1):  # the first one warms up, and counts if it should be the best
        synchronise(device)
        start = time.perf_counter()
        buffer.sum()
        synchronise(device)
        best = max(best, buffer.nbytes / (time.perf_counter() - start))
    return best


def weight_bytes(scorer: object) -> int:
    """Bytes of the weights that a pass over few rows reads: every tensor of layers, norm and head, once.

    The embedding, of which a pass reads a row for each id, counts only where it is the head, too.
    """
    model = getattr(scorer, "model", None)
    if isinstance(model, torch.nn.Module):
        embedding = model.get_input_embeddings()
        roots = [
            list(module.parameters(recurse=False)) + list(module.buffers(recurse=False)) + [_others(module)]
            for module in model.modules()
            if module is not embedding
        ]
    else:
        roots = [getattr(scorer, name, None) for name in ("layers", "norm", "head")]
    return held_bytes(roots)


def held_bytes(things: Sequence[object]) -> int:
    """Bytes of all tensors that ``things`` hold, each once."""
    return sum(_bytes(tensor) for tensor in _unique(_tensors(things, set())))


def _others(module: torch.nn.Module) -> list[object]:
    """What a module holds beside its parameters, buffers and modules: packed weights, say."""
    return [value for name, value in vars(module).items() if not name.startswith("_")]


def _tensors(thing: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors that ``thing`` holds, in containers, attributes, closures and partial calls."""
    if thing is None or isinstance(thing, (str, bytes, int, float, type)) or id(thing) in seen:
        return
    seen.add(id(thing))
    inside: Iterable[object] = ()
    if isinstance(thing, torch.Tensor):
        yield thing
        inside = vars(thing).values()  # bitsandbytes keeps scales there
    elif isinstance(thing, dict):
        inside = thing.values()
    elif isinstance(thing, (list, tuple, set)):
        inside = thing
    elif isinstance(thing, functools.partial):
        inside = (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, torch.ScriptObject):  # packed for FBGEMM or QNNPACK
        weight = torch.ops.quantized.linear_unpack(thing)[0]
        inside = (weight.int_repr(), weight.q_per_channel_scales())
    elif closure := getattr(thing, "__closure__", None):
        inside = [cell.cell_contents for cell in closure]
    elif isinstance(thing, torch.nn.Module):
        inside = (*thing.parameters(), *thing.buffers(), *map(_others, thing.modules()))
    elif type(thing).__module__.partition(".")[0] in _PACKAGES:
        slots = [getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ())]
        attributes = getattr(thing, "__dict__", {}).items()
        inside = (*slots, *(value for name, value in attributes if name not in _FOR_PROMPTS))
    for other in inside:
        yield from _tensors(other, seen)


def _unique(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, those that share their memory once."""
    found = {}
    for tensor in tensors:
        try:
            place = tensor.data_ptr()
        except RuntimeError:  # packed by oneDNN: without an address to tell
            place = None
        place = place or id(tensor)
        if place not in found or _bytes(found[place]) < _bytes(tensor):  # one may be a part of the other
            found[place] = tensor
    return list(found.values())


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
