"""The peer flashspec: how its rounds are counted, by a stand-in with its names, and by itself where it is."""

import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch

from core.bench import with_flashspec as bench_flashspec
from tests.core.models_on_disk import make_model


class Stand(ModuleType):
    """What of flashspec is used; keeps what it was made with, and plays three rounds of 10 ms."""

    def __init__(self):
        super().__init__("flashspec")
        self.engines = []
        for name in ("FlashSpecConfig", "SamplingConfig", "ArmSpec", "HuggingFaceDrafter", "TargetModel"):
            setattr(self, name, lambda *given, **named: SimpleNamespace(given=given, **named))

    def SpeculativeEngine(self, config, drafters, target, arms):
        def generate(ids, max_new_tokens, ends):
            engine.asked = (ids.tolist(), max_new_tokens, ends)
            time.sleep(0.03)
            steps = [SimpleNamespace(emitted=n, seconds=0.01) for n in (2, 3, 1)]
            return SimpleNamespace(arm_steps=steps)

        engine = SimpleNamespace(config=config, drafters=drafters, arms=arms, generate=generate)
        self.engines.append(engine)
        return engine


def test_the_first_round_is_the_time_to_the_first_token(monkeypatch):
    stand = Stand()
    monkeypatch.setitem(sys.modules, "flashspec", stand)
    monkeypatch.setitem(sys.modules, "flashspec.engine", stand)
    model = SimpleNamespace(device=torch.device("cpu"))
    times = bench_flashspec.generate(model, model, (4, 5), frozenset({9, 2}), 0.8, 16, 3, num_draft_tokens=4)
    assert times["tokens"] == 4 and times["decode_seconds"] == pytest.approx(0.02)
    assert times["ttft_seconds"] == pytest.approx(times["seconds"] - 0.02) and times["seconds"] >= 0.03
    (engine,) = stand.engines
    assert engine.asked == ([[4, 5]], 16, [2, 9])
    assert engine.config.sampling.temperature == engine.drafters[0].temperature == 0.8
    assert engine.config.sampling.seed == 3 and engine.arms[0].given == (0, 4)
    bench_flashspec.generate(model, model, (4, 5), frozenset(), 0, 16, 3)
    assert stand.engines[1].arms is None  # its own strategy


@pytest.mark.parametrize("k", [None, 3])
def test_flashspec_itself(k):
    pytest.importorskip("flashspec")
    target, draft = make_model("llama", 1), make_model("llama", 2)
    times = bench_flashspec.generate(target, draft, [5, 6, 7], frozenset(), 0.8, 10, 1, num_draft_tokens=k)
    assert 0 < times["tokens"] < 10 and 0 < times["decode_seconds"] < times["seconds"]
