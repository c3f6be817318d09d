"""The fake card itself: what it counts, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes import functional
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._device import _device_constructors

from core.bench.fake_card import CUDA, FakeCard, NeedsNumbers
from core.models.linear import Nf4Linear


@pytest.fixture
def card():
    with FakeCard() as card, torch.inference_mode():
        yield card


def test_launches_and_views_are_told_apart(card):
    x = torch.empty(2, 3, device=CUDA)
    with card.counting() as counts:
        y = x @ x.T
        y.float(), y.view(4), y[0], y[:, 1:], y.unsafe_split(1, 1), torch.empty_like(y)  # no kernels
        y.double(), torch.nn.functional.rms_norm(y, (2,)), y.mul_(2)
    assert dict(counts.kinds) == {"mm": 1, "_to_copy": 1, "rms_norm": 1, "mul_": 1}
    assert (counts.launches, counts.waits) == (4, 0) and counts.views >= 5


def test_attention_is_one_kernel_and_its_rows_need_no_copy(card):
    q = torch.empty(1, 2, 8, 64, device=CUDA, dtype=torch.float16)
    with card.counting() as counts:
        y = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        y.transpose(1, 2)[0].reshape(8, 128)
    assert counts.launches == 1 and y.shape == q.shape and y.dtype == q.dtype
    with pytest.raises(RuntimeError, match="do not go together"):
        torch.nn.functional.scaled_dot_product_attention(q, q.float(), q)


UPLOADS = {
    "to": (lambda: torch.ones(2).to(CUDA), 1),
    "tensor": (lambda: torch.tensor([1, 2], device=CUDA), 1),
    "as_tensor": (lambda: torch.as_tensor([1, 2], device=CUDA), 1),
    "pageable": (lambda: torch.ones(2).to(CUDA, non_blocking=True), 1),
    "pinned": (lambda: torch.tensor([1.0], pin_memory=True).to(CUDA, non_blocking=True), 0),
    "a list as index": (lambda: torch.empty(3, 2, device=CUDA)[[0, 2]], 1),
    "an index of the host": (lambda: torch.empty(3, 2, device=CUDA)[torch.tensor([0, 2])], 1),
    "copy_": (lambda: torch.empty(2, device=CUDA).copy_(torch.ones(2)), 1),
}


@pytest.mark.parametrize("name", UPLOADS)
def test_uploads_wait_unless_their_memory_is_pinned(card, name):
    upload, waits = UPLOADS[name]
    with card.counting() as counts:
        made = upload()
    assert made.device == CUDA
    assert (counts.uploads, counts.downloads, counts.waits) == (1, 0, waits)


DOWNLOADS = {
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu", torch.float64),
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0]),
    "float": lambda x: float(x.sum()),
    "an index without dimensions": lambda x: x[x[0].long()],
    "copy_": lambda x: torch.ones(3).copy_(x),
}


@pytest.mark.parametrize("name", DOWNLOADS)
def test_looking_at_a_number_is_a_wait(card, name):
    x = torch.empty(3, device=CUDA)
    with card.counting() as counts:
        DOWNLOADS[name](x)
    assert (counts.uploads, counts.downloads, counts.waits) == (0, 1, 1)


def test_what_is_downloaded_is_real_and_is_the_answers(card):
    card.answer = lambda tensor: torch.full(tensor.shape, 7, dtype=tensor.dtype)
    x = torch.empty(2, device=CUDA, dtype=torch.float16)
    assert x.cpu().double().tolist() == x.tolist() == [7, 7] and x.cpu().dtype == torch.float16
    assert torch.arange(3).sum() == 3, "what is on the host is computed"


@pytest.mark.parametrize("ask", [lambda x: x[x > 0], torch.unique, lambda x: x.masked_select(x > 0)])
def test_a_size_that_depends_on_numbers_is_refused(card, ask):
    with pytest.raises(NeedsNumbers), card.counting() as counts:
        ask(torch.empty(3, device=CUDA))
    assert counts.waits == 1


def test_a_tensor_of_the_host_does_not_go_with_one_of_the_card(card):
    x = torch.empty(3, device=CUDA)
    for mixed in (
        lambda: x + torch.ones(3),
        lambda: torch.cat([x, torch.ones(3)]),
        lambda: torch.ones(3) * x,
    ):
        with pytest.raises(RuntimeError, match="on the same device"):
            mixed()
    assert (x + torch.tensor(1.0)).device == CUDA, "one number may, as on a card"


def test_it_leaves_nothing_behind():
    before = dict(vars(FakeTensor)), dict(functional.name2qmap), torch.tensor, torch.cuda.Event
    with FakeCard():
        Nf4Linear(torch.empty(32, 64, device=CUDA))
    assert before == (dict(vars(FakeTensor)), dict(functional.name2qmap), torch.tensor, torch.cuda.Event)
    assert type(torch.ones(1) + 1) is torch.Tensor


def test_it_leaves_torch_as_it_was():
    """Models that were read after it had positions made of whatever lay in memory: torch had listed the fake
    card's own ``tensor`` among those that heed a device."""
    _device_constructors.cache_clear()
    with FakeCard(), torch.device("cuda"):
        torch.empty(1)
    with torch.device("meta"):
        assert torch.tensor([1.0]).device.type == "meta"
