"""What is right and what is not: kernels made wrong, slow, missing, or of rows that see each other."""

from __future__ import annotations

import pytest
import torch

from core.models.linear import checks, int8
from tests.core.linear.some_findings import SMALL

REFERENCE = "int8x2-reference"


class Reference:
    """A kernel in plain torch, as slow and as right as it is made."""

    name, half, rounds = "reference", 127, True

    def __init__(self, levels, scale):
        self.levels, self.scale = levels.float(), scale

    def __call__(self, x):
        return x.round() @ self.levels.T * self.scale


class Slow(Reference):
    now = 0.0  # of a clock by which only its products take time

    def __call__(self, x):
        Slow.now += 1.045
        return super().__call__(x)


class Saturated(Reference):
    """Sums of two products in 16 bits, as x86 without VNNI makes them."""

    def __call__(self, x):
        pairs = ((x.round() + 128)[:, None, :] * self.levels).unflatten(2, (-1, 2)).sum(3)
        return (pairs.clamp(-32768, 32767).sum(2) - 128 * self.levels.sum(1)) * self.scale


class Missing(Reference):
    def __init__(self, levels, scale):
        raise AttributeError("'_OpNamespace' 'onednn' object has no attribute 'qlinear_prepack'")


class Neighbours(Reference):
    """One scale for all rows: right for each alone."""

    def __call__(self, x):
        return super().__call__(x) * (1 + 1e-7 * len(x))


@pytest.fixture
def kernel(monkeypatch):
    def use(kind):
        monkeypatch.setitem(int8.KERNELS, "reference", kind)
        monkeypatch.setattr(checks.time, "perf_counter", lambda: Slow.now)
        return checks.check(REFERENCE, SMALL, checks.HOPELESS * 0.0007)[0]

    return use


def test_a_right_kernel_is_right(kernel):
    found = kernel(Reference)
    assert found.right and found.error < 1e-6 and found.alone < 1e-6


def test_a_kernel_that_was_made_wrong_is_not_chosen(kernel):
    found = kernel(Saturated)
    assert not found.right and found.error > 0.05 and found.verdict.startswith("wrong by")


def test_a_kernel_that_was_made_slow_is_not_chosen(kernel):
    """After one call, with what that took in its report."""
    found = kernel(Slow)
    assert not found.right and found.error < 1e-6
    assert found.verdict == "too slow: 1045 ms where the quickest takes 0.7"


def test_a_kernel_that_is_not_there_says_so(kernel):
    found = kernel(Missing)
    assert found.error is None and "does not run here ('_OpNamespace' 'onednn'" in found.verdict


def test_a_kernel_whose_rows_depend_on_each_other_is_not_chosen(kernel):
    found = kernel(Neighbours)
    assert 1e-7 < found.alone < 1e-5 and found.error < 1e-5
    assert found.verdict.startswith("a row depends on the rows beside it, by ")


def test_attention_whose_rows_depend_on_each_other_is_not_chosen(monkeypatch):
    attend = checks.F.scaled_dot_product_attention

    def by_rows(query, keys, values, attn_mask):
        return attend(query, keys, values, attn_mask) * query.shape[2]

    monkeypatch.setattr(checks.F, "scaled_dot_product_attention", by_rows)
    assert not checks.attends_alike("float32", SMALL)
    monkeypatch.undo()
    assert checks.attends_alike("float32", SMALL)


def test_numbers_that_are_none_are_wrong(monkeypatch, kernel):
    monkeypatch.setattr(
        Reference, "__call__", lambda self, x: torch.full((len(x), len(self.scale)), torch.nan)
    )
    assert kernel(Reference).error == float("inf")


def test_one_disturbed_call_rules_nothing_out(monkeypatch):
    """Of three the least counts."""
    monkeypatch.setitem(int8.KERNELS, "reference", Reference)
    ticks = iter([0.0, 0.09, 1.0, 1.001, 2.0, 2.0005] * 2)
    monkeypatch.setattr(checks.time, "perf_counter", lambda: next(ticks))
    found, taken = checks.check(REFERENCE, SMALL, 0.002)
    assert found.right and taken == pytest.approx(0.0005)


def test_dense_products_are_there_whatever_they_take(monkeypatch):
    """Where nothing else is right they have to do."""
    monkeypatch.setattr(checks.time, "perf_counter", iter(range(1000)).__next__)
    assert checks.check("float32", SMALL, 1e-6)[0].right
    assert checks.check("bfloat16", SMALL, 1e-6)[0].right
    assert checks.check("int4", SMALL, 1e-6)[0].verdict.startswith("too slow")
    monkeypatch.setattr(checks, "_error", lambda *_: 0.5)
    assert checks.check("float32", SMALL)[0].right and not checks.check("bfloat16", SMALL)[0].right
