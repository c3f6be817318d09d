"""Each form of a product: near the dense one, and row by row independent (docs/ENGINE.md, rule 13)."""

from __future__ import annotations

import functools

import pytest
import torch

from core.models.linear import MANY, Int4Linear, Int8Linear, Nf4Linear, checks, forms
from core.models.linear.forms import maker
from core.models.linear.products import GROUP, PaddedLinear, quantize_int4
from core.models.sizes import EMBEDDED
from core.settings import MAX_DRAFT_TOKENS

ROWS = MAX_DRAFT_TOKENS + 1
QUANTISED = [form for form in forms.NAMES if form not in forms.DENSE]
# Largest error of a random row: of the weights' levels, and of the activations'.
ERRORS = {"int8-fbgemm7": 0.03, "int4": 0.1, "float32": 1e-6}


@functools.cache
def is_right(form: str) -> bool:
    """Whether this machine's kernel is; a wrong one is a verdict of test_checks.py."""
    return checks.check(form, EMBEDDED)[0].right


@pytest.fixture(autouse=True)
def what_is_right_here(request) -> None:
    """A form that is wrong on this machine is not run anywhere: nothing is asked of it."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    for name in params.keys() & {"form", "beside"}:
        if not is_right(params[name]):
            pytest.skip(f"{params[name]} is not right on this processor")


def weight(out: int = 192, inside: int = 128) -> torch.Tensor:
    return torch.randn(out, inside, generator=torch.Generator().manual_seed(1)) * 0.05


def some_rows(count: int = ROWS) -> torch.Tensor:
    return torch.randn(count, 128, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("form", forms.NAMES)
def test_near_the_dense_product(form):
    x = some_rows(5) * torch.tensor([[1e-3], [1], [30], [1], [0]])
    expected = x @ weight().T
    product = maker(form)(weight())
    result = product(x).float()
    error = ((result - expected).norm(dim=1)[:4] / expected.norm(dim=1)[:4]).max()
    assert error < ERRORS.get(form, 0.015)
    assert result[4].abs().max() == 0  # a row of zeros divides nothing by zero
    assert product.shape == (192, 128) and product.form == ("none" if form in forms.DENSE else form[:4])


@pytest.mark.parametrize("form", forms.NAMES)
def test_its_two_factors_are_the_product(form):
    product, x = maker(form)(weight()), some_rows()
    y, scale = product.unscaled(x)
    assert torch.equal(product(x), y if scale is None else y * scale)
    many, scale = product.unscaled(x, many=True)
    assert torch.equal(product.many(x), many if scale is None else many * scale)


@pytest.mark.parametrize("form", QUANTISED)
def test_rows_do_not_depend_on_each_other(form):
    """Each row as its one-row product, whatever the last one: also where that is a hundred times larger."""
    linear, x = maker(form)(weight()), some_rows()
    single = torch.cat([linear(row[None]) for row in x])
    for rows in range(2, ROWS + 1):
        loud = x[:rows].clone()
        loud[-1] *= 100
        assert torch.equal(linear(x[:rows]), single[:rows])
        assert torch.equal(linear(loud)[:-1], single[: rows - 1])


@pytest.mark.parametrize("form", [form for form in forms.NAMES if form.startswith(forms.TWO)])
def test_two_parts_keep_more_than_eight_bits_of_an_activation(form):
    x = some_rows(1)
    x[0, 5] = 500.0  # one peak, as this family's activations have, would leave the others no levels
    expected = x.double() @ Int8Linear.rounded(weight()).T
    small = x[:, :5].double() @ Int8Linear.rounded(weight())[:, :5].T
    bound = 0.05 * (127 / forms.half(form)) ** 2
    assert (maker(form)(weight())(x) - expected).norm() / small.norm() < bound


class Steps:
    """A kernel that keeps the steps it is given, whole or not, and gives nothing."""

    name, half, rounds = "steps", 127, True

    def __init__(self, levels: torch.Tensor, scale: torch.Tensor):
        self.width = len(levels)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.given = x.clone()
        return x.new_zeros(len(x), self.width)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_row_is_cut_into_127_steps_of_its_largest_size(parts):
    """The largest may be negative, a half goes to the even number, and rows of zeros, of tiny numbers and of
    bad ones have steps, too."""
    product = Int8Linear(weight(8, 4), Steps, parts)
    x = torch.tensor(
        [[-254.0, 2.0, 1.0, 127.5], [0.0] * 4, [1e-32, 0, 0, 0], [3.0, torch.nan, 0, 0], [torch.inf, 1, 0, 0]]
    )
    before = x.clone()
    step = product.unscaled(x)[1]
    assert torch.equal(x.isnan(), before.isnan()) and torch.equal(x.nan_to_num(), before.nan_to_num())
    assert step.shape == (5, 1) and step[0] == 2 and torch.equal(step[1:3, 0], torch.tensor([1e-30, 1e-30]))
    assert step[3].isnan() and step[4].isinf()  # a row that is no use stays so, for who judges it to see
    given = product.product.given
    whole, rest = torch.tensor([-127.0, 1, 0, 64]), torch.tensor([0.0, 0, 127, -63.5])
    if parts == 1:
        assert torch.equal(given[0], before[0] / 2) and given[1].abs().max() == 0
    else:
        assert torch.equal(given[0], whole) and torch.equal(given[5], rest)
        assert given[[1, 6]].abs().max() == 0


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
    torch.testing.assert_close(Int4Linear.rounded(file_weight), file_weight, atol=2e-3, rtol=0.01)
    x = torch.eye(4 * GROUP)
    torch.testing.assert_close(Int4Linear(file_weight)(x).float(), file_weight.T, atol=2e-3, rtol=0.01)


@pytest.mark.parametrize("beside", [f for f in forms.NAMES if f.startswith((forms.TWO, "bfloat16"))])
def test_many_rows_are_each_as_they_would_be_elsewhere(beside):
    """So that a prompt read in parts leaves the keys of one reading."""
    product, plain = maker(forms.BESIDE + beside)(weight()), Int4Linear(weight())
    x = some_rows(MANY)
    whole = product.many(x)
    assert 0 < (whole.float() - product(x).float()).norm() < 0.01 * whole.float().norm()
    for start, rows in ((0, 1), (0, 255), (7, 3), (100, 17), (100, 156), (255, 1)):
        assert torch.equal(product.many(x[start : start + rows]), whole[start : start + rows])
    assert torch.equal(product(x[:9]), plain(x[:9])) and torch.equal(plain.many(x[:9]), plain(x[:9]))


def test_a_padded_product_is_the_dense_one():
    product, x = PaddedLinear(weight()), some_rows(5)
    torch.testing.assert_close(product(x), x @ weight().T)
    assert product(some_rows(MANY)).shape == (MANY, 192) and checks.reads_alike(product)


def test_nf4_is_near_the_dense_product_row_by_row():
    pytest.importorskip("bitsandbytes")
    product, x = Nf4Linear(weight()), some_rows()
    expected = x @ weight().T
    assert 0 < (product(x).float() - expected).norm() / expected.norm() < 0.15
    # Its kernel for a CPU may sum in another order for other row counts, but sees no other row.
    assert checks.product_dependence(product, 128, ROWS) < 0.01
    assert [Nf4Linear.takes(torch.empty(*size)) for size in ((32, 64), (48, 64), (32, 96))] == [1, 0, 0]


def test_what_forms_are_called_and_ask_for():
    assert [forms.family(form) for form in ("int8-onednn", "int8x2-fbgemm7", "int4+bfloat16", "float32")] == [
        "int8",
        "int8",
        "int4",
        "float32",
    ]
    assert forms.in_two("int8-onednn") == "int8x2-onednn" and forms.in_two("int4") == "int4"
    assert forms.needs_rotation("int8-onednn") and not forms.needs_rotation("int8x2-onednn")
    assert [forms.is_close(form) for form in ("int8-fbgemm7", "int8x2-fbgemm7", "int8-fbgemm")] == [0, 1, 1]
    assert forms.takes("int4", weight()) and not forms.takes("int4", weight(40))
    with pytest.raises(KeyError):
        maker("int8-unheard-of")
