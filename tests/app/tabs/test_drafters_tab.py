"""The Drafters tab: what may be started, by whom, and what each page is shown."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from types import SimpleNamespace

import gradio as gr
import pytest

from app.chat.desk import Desk
from app.serving.loading import LoadingState
from app.tabs import drafters_tab
from app.tabs.compared_view import progress, result, title
from app.tabs.drafters_tab import ANOTHER, CHANGED, DraftersTab
from app.widgets.display import as_html
from core.compare import Step
from core.models.errors import LoadError
from core.record.compared import with_replies
from core.record.store import Store
from core.settings import LOSSY, VERIFIERS
from tests.core.test_compare import SETTINGS, engine, made


@contextlib.contextmanager
def tab(tmp_path, *, personal=True, loaded=True):
    state = LoadingState("Ready.", engine=engine()) if loaded else LoadingState("Loading the pair.")
    with contextlib.closing(Store(tmp_path / "redline.db")) as store:
        desk = Desk(SimpleNamespace(state=state), store, personal)
        with gr.Blocks(analytics_enabled=False):
            yield DraftersTab(desk)


def finished(page: DraftersTab) -> DraftersTab:
    deadline = time.monotonic() + 60
    while page.runner.running is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return page


def begun(page: DraftersTab, owner: str, replies: int):
    """The owner's run, once it has so many replies."""
    deadline = time.monotonic() + 60
    while (step := page.runner.of(owner).step) is None or step.done < replies:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return page.runner.of(owner)


ASKED = (2, 3, 0.8, 1, 16, "token")  # prompts, K, temperature, tree width, tokens, verifier
LONG = (10, 3, 0.8, 1, 64, "token")


def test_a_run_is_shown_kept_opened_again_and_deleted(tmp_path):
    with tab(tmp_path) as page:
        offered = page.show_loading(page.desk.loading)[page.drafters]
        assert offered["value"] == ["model", "ngram", "recycling", "auto"]
        page.start(["model", "ngram"], *ASKED)
        shown = finished(page).look(-1, None)
        assert "12 of 12 replies: done" in shown[page.progress] and "<progress" not in shown[page.progress]
        assert "Code" in shown[page.result] and "ngram" in shown[page.result]
        assert shown[page.begin]["interactive"] and not shown[page.stop]["interactive"]
        ((name, key),) = shown[page.earlier]["choices"]
        assert "model, ngram with" in name and shown[page.earlier]["value"] == key
        assert page.look(page.runner.number, None) == {page._seen: page.runner.number}  # nothing new
        assert page.open(key) == {page._opened: key, page.result: shown[page.result]}
        assert page.write().endswith(".csv")
        left = page.remove(key)
        assert left[page.earlier]["choices"] == [] and page.desk.store.comparisons() == []


def test_drafts_may_be_judged_by_any_rule(tmp_path):
    with tab(tmp_path) as page:
        assert [name for _, name in page.fields[-1].choices] == list(VERIFIERS)
        for verifier in ("block", "draft-ratio"):
            page.start(["model"], *ASKED[:-1], verifier)
            finished(page)
        kept = page.desk.store.comparisons()
        assert [one.settings.verifier for one in kept] == ["draft-ratio", "block"]
        assert kept[0].settings.acceptance_threshold == LOSSY["draft-ratio"][0]


@pytest.mark.parametrize("everything", [True, False])
def test_a_comparison_that_was_deleted_does_not_come_back(tmp_path, everything):
    with tab(tmp_path) as page:
        page.start(["model"], *ASKED)
        ((_, key),) = finished(page).look(-1, None)[page.earlier]["choices"]
        if everything:
            page.desk.forget_everything()
        else:
            page.remove(key)
        shown = page.look(-1, None)
        assert shown[page.earlier]["choices"] == [] and shown[page.earlier]["value"] is None
        assert shown[page.progress] == "" and page.result not in shown


def test_a_second_start_is_refused_and_a_cancelled_run_keeps_what_was_measured(tmp_path):
    with tab(tmp_path) as page:
        page.start(["model", "ngram", "recycling"], *LONG)
        with pytest.raises(gr.Error, match="running already"):
            page.start(["model"], *ASKED)
        run = begun(page, "", 2)
        shown = page.look(-1, None)
        assert "<progress" in shown[page.progress] and shown[page.stop]["interactive"]
        page.cancel()
        finished(page)
        assert run.step.now == "cancelled" and 2 <= run.step.done < run.step.total
        (kept,) = page.desk.store.comparisons()
        assert not kept.complete and len(kept.replies) == run.step.done
        assert "not complete" in result(kept) and "not complete: model" in title(kept)


def test_what_was_opened_from_the_record_stays_while_a_run_goes_on(tmp_path):
    with tab(tmp_path) as page:
        earlier = made()
        page.desk.store.add_comparison(earlier)
        assert "2.00×" in page.look(-1, None)[page.result]  # the newest on record, where nothing ran
        page.start(["model"], *ASKED)
        shown = finished(page).look(-1, earlier.id)
        assert page.result not in shown and len(shown[page.earlier]["choices"]) == 2
        assert shown[page.earlier]["value"] == earlier.id
        assert page.look(-1, None)[page.earlier]["value"] == page.runner.of("").step.comparison.id


def test_on_a_shared_page_a_run_is_shown_to_whoever_began_it(tmp_path):
    ann, ben = (SimpleNamespace(session_hash=name) for name in ("ann", "ben"))
    with tab(tmp_path, personal=False) as page:
        page.start(["model"], *LONG, ann)
        run = begun(page, "ann", 2)
        theirs = page.look(-1, None, ben)
        assert as_html(ANOTHER) in theirs[page.progress] and page.result not in theirs
        assert not theirs[page.begin]["interactive"] and not theirs[page.stop]["interactive"]
        with pytest.raises(gr.Error, match="Somebody else"):
            page.start(["model"], *ASKED, ben)
        page.cancel(ben)  # as when a page is closed
        assert not run.cancel.is_set()
        page.cancel(ann)
        finished(page)
        page.start(["ngram"], *ASKED, ben)
        finished(page)
        first, second = (page.look(-1, None, whose)[page.result] for whose in (ann, ben))
        assert "ngram" in second and "ngram" not in first and "model" in first


def test_a_run_ends_when_another_pair_is_loaded(tmp_path):
    with tab(tmp_path) as page:
        page.start(["model"], *LONG)
        begun(page, "", 1)
        page.desk.loader.state = LoadingState("Ready.", engine=engine())
        assert CHANGED in finished(page).look(-1, None)[page.progress]
        assert not page.desk.store.comparisons()[0].complete


@pytest.mark.parametrize("personal", [True, False])
def test_why_a_drafter_cannot_be_made_is_its_owners_to_know(tmp_path, personal):
    def broken():
        raise LoadError("/home/me/eagle.safetensors is damaged.")

    with tab(tmp_path, personal=personal) as page:
        pair = page.desk.engine.pair
        pair.others = {**pair.others, "eagle": broken}
        page.start(["eagle", "model"], *ASKED)
        shown = finished(page).look(-1, None)[page.progress]
        assert ("/home/me" in shown) is personal and "8 of 8 replies: done" in shown


@pytest.mark.parametrize(
    ("drafters", "loaded", "said"),
    [([], True, "Choose at least one drafter"), (["model"], False, "Loading the pair.")],
)
def test_what_cannot_be_started_is_one_sentence(tmp_path, drafters, loaded, said):
    with tab(tmp_path, loaded=loaded) as page:
        with pytest.raises(gr.Error, match=said):
            page.start(drafters, *ASKED)
        assert page.runner.running is None


def test_zero_gpu_lends_nothing_to_comparisons(tmp_path, monkeypatch):
    monkeypatch.setattr(drafters_tab.zero_gpu, "active", lambda: True)
    with tab(tmp_path) as page, pytest.raises(gr.Error, match="ZeroGPU"):
        page.start(["model"], *ASKED)


def test_a_shared_page_shows_nothing_of_the_record(tmp_path):
    with tab(tmp_path, personal=False) as page:
        kept = made()
        page.desk.store.add_comparison(kept)
        assert page.open(kept.id) == {page._opened: None, page.result: drafters_tab.NOTHING}
        assert not {page.earlier, page.result} & page.look(-1, None).keys()
        page.remove(kept.id)
        assert page.desk.store.comparisons() == [kept]
        with pytest.raises(gr.Error, match="yours alone"):
            page.write()


def test_what_is_shown_is_inert_and_says_what_is_not_exact():
    step = Step(1, 4, "<b>model</b>", made(), ())
    said = progress(step, True, ["No <i>eagle</i>."])
    assert "<b>" not in said and "&lt;i&gt;" in said and "value='0.250'" in said
    assert progress(None, False) == ""
    assert "2.00×" in result(made()) and "Not exact" not in result(made())
    assert "model was fastest, 2.00× plain; 2 replies each" in result(made())
    lossy = replace(made(), settings=replace(SETTINGS, verifier="greedy"))
    assert "Not exact" in result(lossy) and "greedy, not exact" in title(lossy)
    block = replace(made(), settings=replace(SETTINGS, verifier="block"))
    assert "judged block by block" in result(block) and "block by block" in title(block)
    slow = with_replies(made(), [r for r in made().replies if r.drafter == "plain"], False)
    assert "2 replies each" in result(slow) and "fastest" not in result(slow)
