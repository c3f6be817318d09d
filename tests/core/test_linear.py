"""Each form of a product: near the dense one, and row by row independent (docs/ENGINE.md, rule 13)."""

from __future__ import annotations

import pytest
import torch

from core.models.linear import (
    FORMS,
    GROUP,
    MANY,
    Int4Linear,
    Nf4Linear,
    best_form,
    fitting,
    product_dependence,
    quantize_int4,
    reading,
)
from core.settings import MAX_DRAFT_TOKENS

ROWS = MAX_DRAFT_TOKENS + 1


def weight(out: int = 192, inside: int = 128) -> torch.Tensor:
    return torch.randn(out, inside, generator=torch.Generator().manual_seed(1)) * 0.05


@pytest.mark.parametrize(
    "form, error", [("float32", 1e-6), ("bfloat16", 0.01), ("int8", 0.01), ("int4", 0.1)]
)
def test_near_the_dense_product(form, error):
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(2)) * torch.tensor(
        [[1e-3], [1], [30], [1], [0]]
    )
    expected = x @ weight().T
    result = FORMS[form](weight())(x).float()
    assert (result - expected).norm(dim=1)[:4].div(expected.norm(dim=1)[:4]).max() < error
    assert result[4].abs().max() == 0  # a row of zeros divides nothing by zero


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_rows_do_not_depend_on_each_other(form):
    """Each row as its one-row product, whatever the last one: also where that is a hundred times larger."""
    linear = FORMS[form](weight())
    x = torch.randn(ROWS, 128, generator=torch.Generator().manual_seed(0))
    single = torch.cat([linear(row[None]) for row in x])
    for rows in range(2, ROWS + 1):
        loud = x[:rows].clone()
        loud[-1] *= 100
        assert torch.equal(linear(x[:rows]), single[:rows])
        assert torch.equal(linear(loud)[:-1], single[: rows - 1])


def test_int8_keeps_more_than_eight_bits_of_an_activation():
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(3))
    x[0, 5] = 500.0  # one peak, as this family's activations have, would leave the others no levels
    levels = (weight() / weight().abs().amax(1, True) * 127).round() * weight().abs().amax(1, True) / 127
    expected = x @ levels.T
    relative = ((FORMS["int8"](weight())(x) - expected).norm() / (x[:, :5] @ levels[:, :5].T).norm()).item()
    assert relative < 0.05


def test_int4_finds_the_levels_of_a_q4_1_file_again():
    """Levels 0..15 with a scale and a minimum for 32 inputs: quantised, dequantised to bfloat16, and back."""
    generator = torch.Generator().manual_seed(4)
    levels = torch.randint(0, 16, (64, 4, GROUP), generator=generator)
    levels[..., 0], levels[..., 1] = 0, 15  # every group of such a file holds its minimum and its maximum
    scale = torch.rand(64, 4, 1, generator=generator) * 0.02 + 0.001
    low = -scale * 15 * torch.rand(64, 4, 1, generator=generator)
    file_weight = (levels * scale + low).view(64, 4 * GROUP)
    found, found_scale, found_low = quantize_int4(file_weight.bfloat16())
    assert torch.equal(found, levels.view(64, -1).int())
    torch.testing.assert_close(found_scale, scale[..., 0], rtol=0.02, atol=0)
    x = torch.eye(4 * GROUP)
    torch.testing.assert_close(Int4Linear(file_weight)(x).float(), file_weight.T, atol=2e-3, rtol=0.01)


def test_many_rows_are_each_as_they_would_be_elsewhere():
    """So that a prompt read in parts leaves the keys of one reading."""
    product, plain = Int4Linear(weight(), dense=True), Int4Linear(weight())
    x = torch.randn(MANY, 128, generator=torch.Generator().manual_seed(2))
    whole = product.many(x)
    assert 0 < (whole.float() - product(x).float()).norm() < 0.005 * whole.float().norm()
    for start, rows in ((0, 1), (0, 255), (7, 3), (100, 17), (100, 156), (255, 1)):
        assert torch.equal(product.many(x[start : start + rows]), whole[start : start + rows])
    assert torch.equal(product(x[:9]), plain(x[:9])) and torch.equal(plain.many(x[:9]), plain(x[:9]))


def test_dense_weights_are_kept_where_they_read_faster(monkeypatch):
    monkeypatch.setattr("core.models.linear.has_bfloat16_tiles", lambda: True)
    product = reading("int4")(weight())
    torch.testing.assert_close(product(torch.eye(128)).T, product.dense, rtol=0.01, atol=1e-6)
    assert reading("int8") is FORMS["int8"]
    monkeypatch.setattr("core.models.linear.has_bfloat16_tiles", lambda: False)
    assert reading("int4")(weight()).dense is None


def test_a_size_that_int4_cannot_take_becomes_int8():
    for make in (fitting, reading):
        assert [make("int4")(weight(out)).form for out in (192, 40)] == ["int4", "int8"]
    assert fitting("float32") is FORMS["float32"]


def test_nf4_is_near_the_dense_product_row_by_row():
    pytest.importorskip("bitsandbytes")
    product, x = Nf4Linear(weight()), torch.randn(ROWS, 128, generator=torch.Generator().manual_seed(2))
    expected = x @ weight().T
    assert 0 < (product(x).float() - expected).norm() / expected.norm() < 0.15
    # Its kernel for a CPU may sum in another order for other row counts, but sees no other row.
    assert product_dependence(product, 128, ROWS) < 0.01
    assert [Nf4Linear.takes(torch.empty(*size)) for size in ((32, 64), (48, 64), (32, 96))] == [1, 0, 0]


def test_best_form_is_one_this_machine_has(monkeypatch):
    assert best_form("int4") in ("int4", "bfloat16", "float32")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    assert best_form("int4") in ("bfloat16", "float32")
    assert best_form("int8") in ("bfloat16", "float32")
