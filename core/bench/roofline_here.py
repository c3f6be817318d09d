"""What an estimate needs of the machine it is made on: facts of its card, its copies, and its host's calls.

``core.bench.roofline`` says what follows from them. Times single calls, no round. On a processor it gives
figures of the same names, which are good for seeing that everything works.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from core.bench.cards import Card
from core.bench.roofline import HOST, Host
from core.bench.synthetic_measured import copy_speed, synchronise
from core.models.linear import Nf4Linear

COPIED = 1 << 28  # bytes
CALLS, TURNS = 100, 5  # in a row, and how often: a card's queue holds a thousand launches


def measured(device: torch.device, copied: int = COPIED) -> tuple[Card, Host]:
    """The card, or processor, ``device``, and its host."""
    bandwidth = copy_speed(copied, device)
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        about = facts.name, facts.total_memory, bandwidth, (facts.major, facts.minor)
        return Card(*about, facts.multi_processor_count, measured=True), measure_host(device)
    return Card("this processor", 0, bandwidth, (0, 0), 1, measured=True), measure_host(device)


@torch.inference_mode()
def measure_host(device: torch.device) -> Host:
    """The host's times on this machine: of a launch, a view and a product in NF4; the rest is ``HOST``'s."""
    x = torch.zeros(8, 64, device=device)
    launch, view = (_least(work, device) for work in (lambda: x.add_(1), lambda: x[1:]))
    try:
        product = Nf4Linear(torch.zeros(64, 64, device=device), torch.float16)
        row = x[:1].half()
        nf4 = max(_least(lambda: product(row), device) - launch, 0.0)
    except ImportError:  # no bitsandbytes: nothing runs in NF4 then
        nf4 = HOST.nf4
    return Host(launch, view, nf4, HOST.round, HOST.kernel, copy=1.0)


def _least(work: Callable[[], object], device: torch.device) -> float:
    """Seconds in which the host has asked for ``work``, which is not waited for."""
    found = []
    for _ in range(TURNS):
        synchronise(device)
        start = time.perf_counter()
        for _ in range(CALLS):
            work()
        found.append((time.perf_counter() - start) / CALLS)
    return min(found)
