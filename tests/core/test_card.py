"""Which 16 bits a card gets, and cards that this torch has no kernels for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from app.serving import choosing
from core.models import card, memory
from core.models.errors import LoadError
from core.models.memory import choose_dtype
from core.pairs import distilled
from core.pairs.plan import choose_device

CU126 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.fixture
def lent(monkeypatch):
    """A card of that name, capability and torch."""

    def lend(name: str, capability: tuple[int, int], built: list[str], gfx: str | None = None) -> None:
        monkeypatch.setattr(torch.version, "hip", None if gfx is None else "7.0")
        properties = SimpleNamespace(gcnArchName=gfx)
        for what, answer in {
            "is_available": True,
            "get_device_name": name,
            "get_device_capability": capability,
            "get_arch_list": built,
            "get_device_properties": properties,
            "mem_get_info": (80 << 30, 80 << 30),
        }.items():
            monkeypatch.setattr(torch.cuda, what, lambda *_, answer=answer: answer)

    return lend


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        ((6, 1), "float16"),
        ((7, 0), "float16"),
        ((7, 5), "float16"),
        ((8, 0), "bfloat16"),
        ((8, 6), "bfloat16"),
        ((8, 9), "bfloat16"),
        ((9, 0), "bfloat16"),
        ((12, 0), "bfloat16"),
    ],
)
def test_a_card_gets_its_own_16_bits(capability, dtype, lent):
    lent("some card", capability, CU126)
    assert choose_dtype("auto", "cuda", 10**10) == dtype
    assert choose_dtype("float32", "cuda", 10**10) == "float32"


def test_amds_cards_say_cuda_and_have_bfloat16(lent):
    lent("AMD Radeon RX 6800", (10, 3), ["gfx1030"], "gfx1030")
    assert choose_dtype("auto", "cuda", 10**10) == "bfloat16"
    assert choose_device("auto") == "cuda"
    lent("AMD Instinct MI250", (9, 0), ["gfx90a"], "gfx90a:sramecc+:xnack-")
    assert choose_device("auto") == "cuda"
    lent("AMD Radeon 780M", (11, 0), ["gfx1030", "gfx1100"], "gfx1103")
    with pytest.raises(LoadError, match="no kernels for the card AMD Radeon 780M .gfx1103.: .*--device cpu"):
        choose_device("auto")


@pytest.mark.parametrize(
    ("name", "capability", "built", "other"),
    [
        ("Tesla P40", (6, 1), CU130, "one built for CUDA 12.6"),
        ("Tesla V100", (7, 0), CU130, "one built for CUDA 12.6"),
        ("NVIDIA GeForce RTX 5090", (12, 0), CU126, "a newer torch"),
    ],
)
@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_a_card_unknown_to_this_torch_is_one_sentence(asked, name, capability, built, other, lent):
    lent(name, capability, built)
    with pytest.raises(LoadError) as raised:
        choose_device(asked)
    said = str(raised.value)
    assert name in said and "--device cpu" in said and other in said and said.count(". ") == 0
    assert choose_device("cpu") == "cpu"
    assert choosing.suggestion() is None, "no pair is offered that cannot run"


def test_a_known_card_is_offered_a_pair(lent):
    lent("NVIDIA GeForce RTX 4090", (8, 9), CU130)
    assert choosing.suggestion() is not None
    assert choose_device("auto") == "cuda"


@pytest.mark.parametrize(
    ("built", "capability", "known"),
    [
        (["sm_86"], (8, 9), True),  # a later card of the same generation
        (["sm_89"], (8, 6), False),
        (["sm_80"], (9, 0), False),
        (["sm_80", "compute_80"], (9, 0), True),  # the driver compiles
        (["sm_90a"], (9, 0), True),
        (["sm_120"], (12, 1), True),
        (["compute_120"], (9, 0), False),
    ],
)
def test_what_runs_where(built, capability, known):
    assert card.runs(built, capability) is known


def test_without_a_card_nothing_is_said_of_one():
    assert card.unknown() is None and card.half() == "bfloat16"
    assert memory.choose_dtype("auto", "cuda", None) == "bfloat16"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_trained_draft_multiplies_in_the_type_its_target_runs_in(dtype):
    """A card below compute capability 8.0 has no products in bfloat16."""
    model = SimpleNamespace(device=torch.device("meta"), dtype=dtype)
    draft = SimpleNamespace(tensors={}, feature_layers=(), head_ids=torch.arange(2))
    lender = SimpleNamespace(model=model, rows=lambda ids: torch.empty(2, 4))
    made = distilled._on_target(draft, lender, distilled.Forms("float32", "float32"))
    weight = torch.empty(8, 4, device="meta")
    assert {made[name](weight).weight.dtype for name in ("make", "make_head")} == {dtype}
