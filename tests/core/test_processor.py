"""What a processor's torch cannot answer is a no."""

from __future__ import annotations

import types

import pytest
import torch

from core.models.memory import choose_dtype
from core.models.processor import has_fast_bfloat16


@pytest.fixture
def apple(monkeypatch):
    """torch as it is on Apple's processors: built without oneDNN, so that its operators are not there."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", object())


def test_nx_01_a_torch_without_onednn_still_chooses_a_dtype(apple):
    assert has_fast_bfloat16() is False
    assert choose_dtype("auto", "cpu", 3 * 10**9) == "float32"


@pytest.mark.parametrize("error", [RuntimeError("no such operator"), NotImplementedError("not here")])
def test_an_operator_that_fails_is_a_no(monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setattr(torch.ops, "mkldnn", types.SimpleNamespace(_is_mkldnn_bf16_supported=fail))
    assert has_fast_bfloat16() is False


@pytest.mark.parametrize("answer", [True, False])
def test_what_it_answers_counts(monkeypatch, answer):
    operators = types.SimpleNamespace(_is_mkldnn_bf16_supported=lambda: answer)
    monkeypatch.setattr(torch.ops, "mkldnn", operators)
    assert has_fast_bfloat16() is answer
    assert choose_dtype("auto", "cpu", 3 * 10**9) == ("bfloat16" if answer else "float32")
