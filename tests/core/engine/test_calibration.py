"""Costs are measured once, kept by what they depend on, and never in the way."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from core.drafters.ngram import NgramDrafter
from core.engine import calibration
from core.engine.auto_k import AutoK
from core.figures.costs import Costs
from core.machine.home import home
from tests.core.test_decoder import pair_of
from tests.core.tiny import as_decoder, tiny_llama
from tests.core.toy_drafts import toy_drafts_pair


@pytest.fixture
def pair():
    return pair_of(as_decoder(tiny_llama(1)), as_decoder(tiny_llama(2, layers=1)))


def test_costs_are_measured_once_and_kept(pair, monkeypatch):
    first = calibration.costs(pair)
    assert len(first.verify) == calibration.MOST + 1
    assert 0 < first.draft and 0 < first.overhead
    assert list(first.verify) == sorted(first.verify) and first.verify[0] > 0
    monkeypatch.setattr(calibration, "measure", None)
    assert calibration.costs(pair) == first
    assert first.round_seconds(2) == 2 * first.draft + first.verify[2] + first.overhead


def test_threads_are_chosen_with_the_costs_and_used_again(pair, monkeypatch):
    chosen = []
    monkeypatch.setattr(calibration, "choose", lambda work, say: (work(), chosen.append(True)))
    monkeypatch.setattr(calibration, "use", chosen.append)
    calibration.costs(pair)
    assert chosen == [True]  # of work that runs
    calibration.costs(pair)
    assert chosen == [True, torch.get_num_threads()]


def test_costs_of_batched_rounds(pair):
    found = calibration.measure(pair, batched=True)
    assert len(found.verify) == calibration.MOST + 1
    assert list(found.verify) == sorted(found.verify) and found.verify[0] > 0
    assert 0 < found.draft and 0 < found.overhead


@pytest.mark.parametrize("drafter", ["medusa", "ngram"])
def test_costs_of_batched_rounds_of_a_drafter_that_drafts_fewer(drafter):
    """Medusa has as many drafts as heads; in a text without repeats n-gram lookup has none."""
    pair = toy_drafts_pair("medusa")
    if drafter == "ngram":
        wide = as_decoder(tiny_llama(1, vocabulary=128))
        pair = dataclasses.replace(pair_of(wide, wide), drafter=NgramDrafter(wide.context_length))
    found = calibration.measure(pair, batched=True)
    assert len(found.verify) == calibration.MOST + 1
    assert list(found.verify) == sorted(found.verify) and found.verify[0] > 0
    assert (found.draft > 0) == (drafter == "medusa") and math.isfinite(found.draft)


class Slow:
    """A clock that moves when one of the pair's passes runs, by ``seconds``; counts the passes by rows."""

    def __init__(self, pair, monkeypatch, seconds):
        self.now, self.rows = 0.0, []
        inner = pair.target.logits

        def logits(ids, cache):
            self.now += seconds
            self.rows.append(len(ids))
            return inner(ids, cache)

        # A decoder is frozen.
        monkeypatch.setattr(type(pair.target), "logits", lambda model, ids, cache: logits(ids, cache))

    def __call__(self):
        return self.now


def test_where_passes_take_long_each_is_timed_once_and_those_of_a_large_k_not_at_all(pair, monkeypatch):
    monkeypatch.setattr(calibration, "Engine", WithoutRounds)
    said, slow = [], Slow(pair, monkeypatch, seconds=3.0)
    found = calibration.measure(pair, say=lambda *what: said.append(what), clock=slow)
    assert slow.rows == [1, 2, 3, 4] and found.verify == (3.0,) * 4 and found.overhead == 0
    fractions = [fraction for _, fraction in said]
    assert fractions == sorted(fractions) and len(fractions) == 5 and said[0] == (calibration.MEASURING, 0)
    AutoK(found, 0.9).choose("other", 8)  # goes on with fewer


class WithoutRounds:
    """An engine for whose rounds there must be no time."""

    batched = False

    def __init__(self, pair, batched=None):
        pass


def test_batched_rounds_that_take_long_are_few(pair, monkeypatch):
    slow = Slow(pair, monkeypatch, seconds=0.0)
    monkeypatch.setattr(calibration, "BUDGET", -1.0)  # over from the beginning
    found = calibration.measure(pair, batched=True, clock=slow)
    assert len(found.verify) == calibration.LEAST + 1


def test_what_there_was_time_to_test_does_not_measure_a_pair_anew(pair, monkeypatch):
    first = calibration.costs(pair)
    pair.info = dataclasses.replace(pair.info, exactness_note="2 of 16 row counts were tested.")
    monkeypatch.setattr(calibration, "measure", None)
    assert calibration.costs(pair) == first


def test_other_weights_are_measured_anew(pair, monkeypatch):
    calibration.costs(pair)
    monkeypatch.setattr(calibration, "measure", lambda pair, **how: Costs(1.0, (2.0,), 3.0))
    pair.info = dataclasses.replace(pair.info, target_fingerprint="other")
    assert calibration.costs(pair) == Costs(1.0, (2.0,), 3.0)
    assert len(json.loads((home() / calibration.KEPT).read_text())) == 2


@pytest.mark.parametrize("damaged", ["", "[]", "{", '{"x": 1}'])
def test_a_damaged_file_is_replaced(pair, monkeypatch, damaged):
    monkeypatch.setattr(calibration, "measure", lambda pair, **how: Costs(1.0, (2.0,), 3.0))
    home().mkdir(parents=True)
    (home() / calibration.KEPT).write_text(damaged)
    assert calibration.costs(pair) == Costs(1.0, (2.0,), 3.0)
    monkeypatch.setattr(calibration, "measure", None)
    assert calibration.costs(pair) == Costs(1.0, (2.0,), 3.0)


def test_a_folder_that_cannot_be_written_only_costs_the_next_measurement(pair, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REDLINE_HOME", str(tmp_path / "file" / "home"))
    assert calibration.costs(pair).draft > 0


def test_measuring_again_replaces_what_was_kept(pair, monkeypatch):
    first = calibration.costs(pair)
    monkeypatch.setattr(calibration, "measure", lambda pair, **how: Costs(1.0, (2.0,), 3.0))
    assert calibration.costs(pair) == first
    assert calibration.measure_again(pair) == calibration.costs(pair) == Costs(1.0, (2.0,), 3.0)


def test_a_pair_that_cannot_be_measured_is_only_logged(pair, monkeypatch, caplog):
    def fail(pair, **how):
        raise RuntimeError("no clock")

    monkeypatch.setattr(calibration, "measure", fail)
    assert calibration.costs_if_any(pair) is None and "no clock" in caplog.text
    monkeypatch.undo()
    assert calibration.costs_if_any(pair).draft > 0


def test_the_target_alone_has_no_costs(pair):
    pair.drafter = None
    assert calibration.costs(pair) is None
