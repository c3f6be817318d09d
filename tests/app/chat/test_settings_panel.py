from __future__ import annotations

import dataclasses
import inspect

import gradio as gr
import pytest

from app.chat.settings_panel import (
    NO_DRAFT,
    NOT_LENT,
    NOT_MEASURED,
    OWN,
    SettingsPanel,
    auto_update,
    drafter_update,
    read_settings,
    switch_auto,
    threshold_update,
    tree_update,
)
from app.serving import zero_gpu
from app.serving.loading import Loader
from core.engine.auto_k import MOST
from core.records import Settings
from core.settings import MAX_DRAFT_TOKENS, SettingsError
from tests.app.toy import ToyEngine

PANEL = {
    "speculate": True,
    "drafter": "",
    "tree_width": 1,
    "num_draft_tokens": 4,
    "auto_draft_tokens": False,
    "verifier": "token",
    "temperature": 0.7,
    "top_k": "0",
    "top_p": "1",
    "min_p": "0",
    "repetition_penalty": "1",
    "max_new_tokens": "512",
    "seed": "1",
    "stop": "",
    "domain": "auto",
    "record": True,
    "lossy": "",
    "acceptance_threshold": "",
}


def test_the_panel_as_it_is_first_shown_means_the_defaults():
    with gr.Blocks(analytics_enabled=False):
        panel = SettingsPanel(Loader(lambda spec, progress: None))
    values = [component.value for component in panel.inputs]
    assert list(inspect.signature(read_settings).parameters) == list(PANEL)
    choices = read_settings(*values)
    assert choices.settings == Settings(seed=choices.settings.seed)
    assert (choices.domain, choices.record) == ("auto", True)
    assert all(component.info for component in [*panel.inputs, panel.system])


def test_speculation_off_is_k_0():
    off = read_settings(**{**PANEL, "speculate": False, "auto_draft_tokens": True}).settings
    assert (off.num_draft_tokens, off.auto_draft_tokens) == (0, False)


def test_automatic_k_and_the_verifier_reach_the_settings():
    chosen = read_settings(**{**PANEL, "auto_draft_tokens": True, "verifier": "block"}).settings
    assert (chosen.num_draft_tokens, chosen.auto_draft_tokens, chosen.verifier) == (4, True, "block")
    assert chosen.exact


def test_choosing_k_automatically_makes_the_slider_the_most_and_gives_the_fixed_one_back():
    slider, kept = switch_auto(True, 5, 3)
    assert (slider["value"], slider["maximum"], kept) == (MOST, MOST, 5) and "Most" in slider["label"]
    slider, kept = switch_auto(False, 8, kept)
    assert (slider["value"], slider["maximum"], kept) == (5, MAX_DRAFT_TOKENS, 5)
    assert "Most" not in slider["label"]


def test_k_can_be_chosen_only_where_the_costs_of_the_pair_are_known(monkeypatch):
    engine = ToyEngine("Yes.")
    loader = Loader(lambda spec, progress: engine)
    assert auto_update(loader.state, False)["interactive"] is False  # nothing runs yet
    loader.start(wait=True)
    update = auto_update(loader.state, True)
    assert update["interactive"] and "value" not in update  # what was chosen stays
    engine.pair.costs = None
    refused = auto_update(loader.state, True)
    assert (refused["interactive"], refused["value"], refused["info"]) == (False, False, NOT_MEASURED)
    monkeypatch.setattr(zero_gpu, "active", lambda: True)
    assert auto_update(loader.state, True)["info"] == NOT_LENT
    engine.pair.info = dataclasses.replace(engine.pair.info, drafter="plain")
    assert auto_update(loader.state, True)["info"] == NO_DRAFT


def test_on_a_card_k_is_automatic_until_somebody_chooses():
    engine = ToyEngine("Yes.")
    loader = Loader(lambda spec, progress: engine)
    loader.start(wait=True)
    assert auto_update(loader.state, False)["value"] is False  # toys are on the processor
    engine.pair.info = dataclasses.replace(engine.pair.info, device="cuda")
    assert auto_update(loader.state, False)["value"] is True
    assert "value" not in auto_update(loader.state, True)
    engine.pair.costs = None  # could not be measured
    assert auto_update(loader.state, False)["value"] is False


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("top_k", "many", "Top-k must be a whole number"),
        ("top_p", "2", "Top-p must be a number"),
        ("min_p", "1.5", "Min-p must be a number"),
        ("repetition_penalty", "0", "Repetition penalty must be a number"),
        ("max_new_tokens", "0", "Maximum new tokens must be a whole number"),
        ("seed", "1.5", "Seed must be a whole number"),
        ("num_draft_tokens", 17, "Draft tokens \\(K\\) must be"),
    ],
)
def test_a_bad_value_is_one_sentence(name, value, said):
    with pytest.raises(SettingsError, match=said):
        read_settings(**{**PANEL, name: value})


def test_stop_strings_are_lines():
    assert read_settings(**{**PANEL, "stop": "END\n\nSTOP"}).settings.stop == ("END", "STOP")


def test_what_the_model_suggests_is_shown_and_fills_the_fields_at_a_press():
    engine = ToyEngine("Yes.")
    loader = Loader(lambda spec, progress: engine)
    with gr.Blocks(analytics_enabled=False):
        panel = SettingsPanel(loader)
    assert panel.show_loading(loader.state, False)[panel.suggested] == ""
    loader.start(wait=True)
    assert not panel.show_loading(loader.state, False)[panel.suggestion]["visible"]
    engine.pair.suggested = {"temperature": 0.6, "top_k": 20}
    assert "suggests temperature 0.6, top-k 20." in panel.show_loading(loader.state, False)[panel.suggested]
    filled = panel._suggested()
    values = [filled.get(component, component.value) for component in panel.inputs]
    settings = read_settings(*values).settings
    assert settings == Settings(temperature=0.6, top_k=20, seed=settings.seed)


def test_the_list_of_drafters_is_that_of_the_pair_that_answers():
    loader = Loader(lambda spec, progress: ToyEngine("Yes."))
    assert drafter_update(loader.state)["choices"] == [(OWN, "")]
    loader.start(wait=True)
    update = drafter_update(loader.state)
    assert update["value"] == "model"
    assert [name for _, name in update["choices"]] == ["model", "ngram", "recycling", "plain"]
    assert update["choices"][0][0] == "A small model (this pair's own)"


def test_a_tree_is_offered_where_the_drafter_makes_one():
    assert tree_update("recycling")["visible"] and "value" not in tree_update("recycling")
    hidden = tree_update("ngram")
    assert not hidden["visible"] and hidden["value"] == 1


def test_a_lossy_rule_takes_the_place_of_the_verifier_with_its_usual_threshold():
    assert threshold_update("typical")["value"] == "0.09" and threshold_update("typical")["visible"]
    assert not threshold_update("greedy")["visible"] and not threshold_update("")["visible"]
    choices = read_settings(
        **{**PANEL, "lossy": "threshold", "acceptance_threshold": "", "drafter": "ngram", "tree_width": 2}
    )
    settings = choices.settings
    assert (settings.verifier, settings.acceptance_threshold, settings.exact) == ("threshold", 0.3, False)
    assert (choices.drafter, settings.tree_width) == ("ngram", 2)
    with pytest.raises(SettingsError, match="threshold of the rule target-ratio must be a number from 0.7"):
        read_settings(**{**PANEL, "lossy": "target-ratio", "acceptance_threshold": "0.2"})
