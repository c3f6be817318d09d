"""The Models tab's handlers, called as Gradio calls them, without a browser and without a hub."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import gradio as gr
import pytest

from app.chat.desk import Desk
from app.serving import choosing, zero_gpu
from app.serving.loading import Loader, LoadingState
from app.tabs.models_tab import MEASURE_AGAIN, WRITING, ModelsTab
from app.tabs.pairs_view import facts, question_about_own, running
from core.engine import calibration
from core.figures.costs import Costs
from core.models.checkpoint import Checkpoint
from core.models.errors import LoadError
from core.models.memory import OVERHEAD, gigabytes, size_of
from core.models.weights import WeightFile
from core.pairs.catalogue import CATALOGUE
from core.pairs.spec import CUSTOM, PairSpec
from core.record.store import Store
from tests.app.tabs.test_products_view import FOUND
from tests.app.toy import PAIR, ToyEngine
from tests.core import builders
from tests.core.models_on_disk import write_model

AUTO = ("auto", "auto", "auto", "auto")
HOSTILE = "<img src=x onerror=alert(1)>${alert(2)}{{value}}"


class Bench:
    """A tab, its loader, and what was asked of the loader."""

    def __init__(self, folder: Path, personal: bool = True):
        self.loaded = []
        self.gate = threading.Event()
        self.gate.set()

        def load(spec, progress):
            self.gate.wait(10)
            self.loaded.append(spec)
            return ToyEngine("Yes.")

        self.loader = Loader(load)
        self.loader.start(wait=True)
        self.desk = Desk(self.loader, Store(folder / "record.db"), personal)
        with gr.Blocks(analytics_enabled=False), gr.Tab("Models") as tab:
            self.tab = ModelsTab(self.desk, tab)

    def measure(self) -> list[str]:
        """What stood beside the button, in turn, after Measure again was pressed."""
        return [update[self.tab.measuring] for update in self.tab.measure_again()]

    def ask(self, name: str, target: str = "", draft: str = "", how=AUTO) -> dict:
        """The page after Load was pressed."""
        page = {}
        for update in self.tab.ask(name, target, draft, *how):
            page |= update
        return page

    def settled(self) -> None:
        for thread in threading.enumerate():
            if thread.name == "loader":
                thread.join(10)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def to_download(monkeypatch):
    """Sets how many bytes the hub would send, or the sentence it refuses with."""

    def answer(what):
        def weigh(pair, progress=None):
            if isinstance(what, str):
                raise LoadError(what)
            return what

        monkeypatch.setattr(choosing, "bytes_to_download", weigh)

    return answer


def test_what_is_on_this_disk_is_loaded_at_once(bench, to_download):
    to_download(0)
    page = bench.ask("qwen3-8b", how=("nf4", "none", "cuda", "bfloat16"))
    bench.settled()
    spec = bench.loaded[-1]
    assert (spec.name, spec.target, spec.draft) == ("qwen3-8b", "Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B")
    assert (spec.quantize, spec.draft_quantize, spec.device, spec.dtype) == (
        "nf4",
        "none",
        "cuda",
        "bfloat16",
    )
    assert page[bench.tab.confirm]["visible"] is False


def test_gigabytes_are_asked_about_first(bench, to_download):
    to_download(5_600_000_000)
    page = bench.ask("qwen3-4b")
    assert "This downloads 5.6 GB." in page[bench.tab.question] and page[bench.tab.confirm]["visible"]
    assert bench.loaded == [None]  # what ran before
    pair = page[bench.tab.doomed]
    assert bench.tab.not_now()[bench.tab.doomed] is None
    page = bench.tab.agree(pair)
    bench.settled()
    assert bench.loaded[-1].name == "qwen3-4b" and not page[bench.tab.confirm]["visible"]


def test_a_pair_of_ones_own_is_weighed_before_it_is_loaded(bench, tmp_path, monkeypatch):
    target = write_model(tmp_path / "target", "qwen3", seed=1, num_hidden_layers=6)
    draft = write_model(tmp_path / "draft", "qwen3", seed=2)
    (target / "README.md").write_text("---\nlicense: mit\n---\n")
    free = {"bytes": 10**12}
    monkeypatch.setattr("app.tabs.pairs_view.free_bytes", lambda device: free["bytes"])
    how = ("none", "none", "cpu", "float32")
    page = bench.ask(CUSTOM, str(target), str(draft), how)
    sizes = [size_of(json.loads((folder / "config.json").read_text())) for folder in (target, draft)]
    needed = (
        sum(size.weights("none", "float32") + size.kept(128, 128, "float32") * 5 // 4 for size in sizes)
        + OVERHEAD
    )
    asked = page[bench.tab.question]
    assert "Nothing is left to download." in asked and page[bench.tab.confirm]["visible"]
    assert f"<dd>{gigabytes(needed)}</dd>" in asked and "<dd>mit; not stated</dd>" in asked
    assert f"<dd>{sizes[0].parameters / sizes[1].parameters:.1f} : 1</dd>" in asked
    assert "more memory than is free" not in asked
    free["bytes"] = needed - 1
    assert "more memory than is free" in bench.ask(CUSTOM, str(target), str(draft), how)[bench.tab.question]
    alone = bench.ask(CUSTOM, str(target), "", how)[bench.tab.question]
    assert "Draft" not in alone and "Size ratio" not in alone
    assert bench.loaded == [None]
    bench.tab.agree(page[bench.tab.doomed])
    bench.settled()
    assert bench.loaded[-1].target == str(target)


def test_of_a_hubs_model_licence_gate_and_download_are_told(monkeypatch):
    def plan(source: str, **known):
        weights = (WeightFile("model.safetensors", 7_000_000_000),)
        checkpoint = Checkpoint(source, "hub", Path(), {}, weights, **known)
        return SimpleNamespace(checkpoint=checkpoint, need=SimpleNamespace(bytes=6_000_000_000), device="cpu")

    plans = [
        plan("owner/Big", licence="<b>", gated=True, parameters=8_000_000_000, cached=False),
        plan("owner/Small", licence="mit", gated=False, parameters=500_000_000),
    ]
    monkeypatch.setattr("core.pairs.plan.plan_models", lambda pair: plans)
    asked = question_about_own(PairSpec(CUSTOM, "owner/Big", "owner/Small"))
    assert "This downloads 7.0 GB." in asked and "<dd>12.4 GB</dd>" in asked and "<dd>16.0 : 1</dd>" in asked
    assert "&lt;b&gt;, gated: the hub asks for a login and consent; mit, not gated" in asked
    assert "Big (8.0 B)" in asked and "Small (500 M)" in asked


def test_what_cannot_be_is_said_and_nothing_is_loaded(bench, to_download):
    to_download("The hub knows no model <b>: check the name.")
    page = bench.ask("qwen3-4b")
    assert "The hub knows no model &lt;b&gt;" in page[bench.tab.progress]
    assert "does not exist" in bench.ask(CUSTOM, "/no/such/folder")[bench.tab.progress]
    assert "Name a target" in bench.ask(CUSTOM, "  ")[bench.tab.progress]
    assert "is no model" in bench.ask(CUSTOM, "<b>")[bench.tab.progress]
    assert bench.loaded == [None]


def test_another_choice_puts_away_what_was_said_of_the_last(bench, to_download):
    to_download("The hub knows no model of this name.")
    assert "The hub knows no model" in bench.ask("qwen3-8b")[bench.tab.progress]
    assert bench.tab.choose("qwen3-4b", "", "", *AUTO)[bench.tab.progress] == ""
    bench.loader.state = LoadingState("The disk is full.", failed=True, engine=bench.desk.engine)
    assert "The disk is full." in bench.tab.choose("qwen3-4b", "", "", *AUTO)[bench.tab.progress]


def test_a_second_choice_while_loading_is_refused_in_words(bench, to_download):
    to_download(0)
    bench.gate.clear()
    bench.ask("qwen3-4b")
    assert "Another pair is being loaded" in bench.ask("qwen3-8b")[bench.tab.progress]
    bench.gate.set()
    bench.settled()
    assert [spec and spec.name for spec in bench.loaded] == [None, "qwen3-4b"]


def test_only_a_personal_page_may_change_what_runs(tmp_path, to_download):
    to_download(0)
    bench = Bench(tmp_path, personal=False)
    assert bench.ask("qwen3-4b") == {}
    bench.tab.agree(choosing.chosen("qwen3-4b", "", "", dict.fromkeys(choosing.FORMS, "auto")))
    bench.tab.give_up()
    bench.settled()
    assert bench.loaded == [None] and bench.loader.state.engine is not None
    assert "Toy-135M" in bench.tab.show_loading(bench.loader.state)[bench.tab.runs]


def test_on_zerogpu_the_pair_stays(tmp_path, to_download, monkeypatch):
    monkeypatch.setattr(zero_gpu, "active", lambda: True)
    bench = Bench(tmp_path)
    assert bench.ask("qwen3-4b") == {} and not bench.tab.may_choose


def test_unloading(bench):
    bench.tab.give_up()
    page = bench.tab.show_loading(bench.loader.state)
    assert "No models are loaded" in page[bench.tab.runs] and not page[bench.tab.unload]["interactive"]


def test_what_runs_is_shown_as_it_is_and_as_inert_text():
    info = dataclasses.replace(
        PAIR, target=HOSTILE, quantization="nf4", dtype="bfloat16", exactness_note=HOSTILE
    )
    shown = running(info, [HOSTILE], 12_000_000, 512_000_000)
    assert "<img" not in shown and "${" not in shown and "{{" not in shown
    assert "nf4, bfloat16" in shown and "12 MB of 512 MB" in shown and "abababababab" in shown
    alone = dataclasses.replace(PAIR, draft="", draft_fingerprint="", draft_context_length=0, drafter="plain")
    assert "None: the target alone" in running(alone, [], 0, 0)


def test_what_passes_cost_is_shown_with_the_k_that_is_best_by_it(bench):
    shown = bench.tab.show_loading(bench.loader.state)[bench.tab.runs]
    assert "<dt>Draft step</dt><dd>2.0 ms</dd>" in shown
    lines = re.findall("<tr.*?</tr>", shown)
    # K = 0 to 8; at half, two drafts promise 1.75 tokens in 15 ms, plain 1 in 11 ms
    assert len(lines) == 10 and "50% acceptance" in lines[0]
    assert "0, plain" in lines[1] and "10.0 ms" in lines[1] and ">1.00×<" in lines[1]
    assert ["best" in line for line in lines].index(True) == 3 and "1.28×<i>best</i>" in lines[3]
    bench.loader.state.engine.pair.costs = None
    assert "Draft step" not in bench.tab.show_loading(bench.loader.state)[bench.tab.runs]


@pytest.fixture
def measured(monkeypatch):
    """The pairs that were measured again, in no time."""
    pairs = []

    def measure(pair, say):
        pairs.append(pair)
        return Costs(draft=0.5, verify=(1.0, 2.0))

    monkeypatch.setattr(calibration, "measure_again", measure)
    return pairs


@pytest.fixture
def warned(monkeypatch):
    sentences = []
    monkeypatch.setattr(gr, "Warning", sentences.append)
    return sentences


def test_measuring_again_replaces_the_costs_and_tells_every_page(bench, measured):
    before = bench.loader.state
    assert bench.tab.show_loading(before)[bench.tab.measure]["interactive"]
    bench.measure()
    assert measured == [before.engine.pair] and before.engine.pair.costs.draft == 0.5
    state = bench.loader.state
    assert state.number > before.number and state == before
    assert "1000.0 ms" in bench.tab.show_loading(state)[bench.tab.runs]
    assert not before.engine.busy


def test_measuring_again_says_what_it_does_and_shows_the_new_table(bench, measured, monkeypatch):
    """Also where the next load will run other forms: the table is the new one, marked with what runs."""
    old = dataclasses.replace(FOUND, table=FOUND.table[:3])
    new = dataclasses.replace(FOUND, layers="int8x2-onednn")
    pair, heard = bench.desk.engine.pair, threading.Event()
    pair.products = old

    def find(sizes, folder, again, say):
        say("Finding the fastest: timing int4", 0.5)
        assert heard.wait(10)
        return new

    monkeypatch.setattr("core.models.linear.evidence.find", find)
    monkeypatch.setattr(gr, "Info", lambda sentence: None)
    updates = bench.tab.measure_again()
    for update in updates:
        if "timing int4" in update[bench.tab.measuring]:
            assert "value='0.500'" in update[bench.tab.measuring]
            assert not update[bench.tab.measure]["interactive"]
            heard.set()
    assert heard.is_set() and update[bench.tab.measuring] == "" and update[bench.tab.measure]["interactive"]
    shown = bench.tab.show_loading(bench.loader.state)[bench.tab.runs]
    assert "<th scope='row'>int4<i>layers, drafts</i></th><td>yes</td><td>4.30</td>" in shown


def test_measuring_again_says_where_other_products_would_run(bench, measured, monkeypatch):
    said = []
    monkeypatch.setattr(gr, "Info", said.append)
    monkeypatch.setattr("core.pairs.pair.look_again", lambda pair, say: "Load the pair again.")
    bench.measure()
    assert said == ["Load the pair again."] and len(measured) == 1


def test_nothing_is_measured_beside_a_reply(bench, measured, warned):
    with bench.desk.engine.lock:
        bench.measure()
    assert measured == [] and warned == [WRITING]
    bench.measure()
    assert len(measured) == 1


def test_a_measurement_that_fails_leaves_the_pair_as_it_was(bench, warned, monkeypatch):
    def fail(pair, say):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(calibration, "measure_again", fail)
    before = bench.desk.engine.pair.costs
    bench.measure()
    assert bench.desk.engine.pair.costs is before and not bench.desk.engine.busy
    assert warned == ["The passes could not be measured (RuntimeError: out of memory)."]


def test_not_everybody_and_not_everything_is_measured(tmp_path, bench, measured):
    shared = Bench(tmp_path, personal=False)
    shared.measure()
    bench.desk.engine.pair.info = dataclasses.replace(PAIR, drafter="plain")
    bench.measure()
    assert not bench.tab.show_loading(bench.loader.state)[bench.tab.measure]["interactive"]
    bench.tab.give_up()
    bench.measure()
    assert measured == []


def test_the_facts_of_a_pair(monkeypatch):
    monkeypatch.setattr(choosing, "is_here", lambda source: "0.6B" in source)
    monkeypatch.setattr("app.tabs.pairs_view.free_bytes", lambda device: None if device == "cuda" else 10**9)
    how = dict.fromkeys(choosing.FORMS, "auto")
    shown = facts("qwen3-8b", how)
    assert "13.7 : 1" in shown and "Apache-2.0, not gated" in shown
    assert "1.0 GB in memory" in shown and "needs more memory than is free" in shown
    assert "gated: the hub asks" in facts("llama-3.1-8b", how)
    for name in CATALOGUE:
        assert "–" not in facts(name, how)


def test_memory_needed_follows_what_was_chosen(monkeypatch):
    monkeypatch.setattr(choosing.memory, "free_bytes", lambda device: 10**12)
    entry = CATALOGUE["qwen3-8b"]

    def needed(**how):
        return choosing.needed_bytes(entry, {**dict.fromkeys(choosing.FORMS, "auto"), **how})

    assert needed() == entry.needed_bytes("cuda")
    assert needed() < needed(quantize="llm-int8") < needed(quantize="none")
    assert needed(device="cpu") == entry.needed_bytes("cpu")


def test_weights_that_changed_since_they_were_measured_are_named(bench):
    store = bench.desk.store
    state = bench.loader.state
    builders.record(store, "aab", pair=dataclasses.replace(PAIR, target_fingerprint="12" * 32))
    assert MEASURE_AGAIN in bench.tab.show_loading(state)[bench.tab.runs]
    builders.record(store, "p", pair=PAIR)
    assert MEASURE_AGAIN in bench.tab.show_loading(state)[bench.tab.runs]
    builders.record(store, "aab", pair=PAIR)
    assert MEASURE_AGAIN not in bench.tab.show_loading(state)[bench.tab.runs]


def test_a_card_is_offered_the_pair_that_fits_and_uses_it_where_it_is_on_this_disk(bench, monkeypatch):
    card = {"free": None}
    monkeypatch.setattr(choosing.memory, "free_bytes", lambda device: card["free"])
    embedded = dataclasses.replace(
        bench.loader.state, engine=ToyEngine("Yes.", info=dataclasses.replace(PAIR, pair="embedded"))
    )
    assert choosing.offer(embedded) is None and choosing.by_machine().name == "embedded"
    card["free"] = 24 * 10**9
    entry = choosing.offer(embedded)
    assert entry is not None and entry.needed_bytes("cuda") <= card["free"] and not entry.gated
    assert choosing.offer(dataclasses.replace(embedded, spec=choosing.spec("embedded"))) is None  # was chosen
    monkeypatch.setattr(choosing, "is_here", lambda source: False)
    assert choosing.by_machine().name == "embedded"
    monkeypatch.setattr(choosing, "is_here", lambda source: True)
    assert choosing.by_machine().name == entry.name
    page = bench.tab.look_at(entry)
    assert page[bench.tab.pair] == entry.name and entry.target in page[bench.tab.facts]


def test_only_what_is_missing_counts_as_download(monkeypatch):
    monkeypatch.setattr(choosing, "is_here", lambda source: source.endswith("0.6B"))
    pair = choosing.spec("qwen3-8b")
    assert choosing.bytes_to_download(pair) == CATALOGUE["qwen3-8b"].target_model.download_bytes

    class Found:
        cached, weight_bytes = False, 123

    monkeypatch.setattr(choosing.checkpoint, "inspect", lambda source, progress=None: Found())
    other = dataclasses.replace(pair, target="somebody/else")
    assert choosing.bytes_to_download(other) == 123
