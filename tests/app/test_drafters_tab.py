"""The Drafters tab: what may be started, by whom, what is shown, and a run in a browser."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace

import gradio as gr
import pytest

from app import drafters_tab
from app.conversation import Desk
from app.drafters_tab import DraftersTab, progress, result, title
from app.loading import Loader, LoadingState
from app.page import build, launch
from core.compare import Step
from core.store import Store
from tests.app.driver import free_port
from tests.core.test_compare import engine, made


@contextlib.contextmanager
def tab(tmp_path, *, personal=True, loaded=True):
    state = LoadingState("Ready.", engine=engine()) if loaded else LoadingState("Loading the pair.")
    with contextlib.closing(Store(tmp_path / "redline.db")) as store:
        desk = Desk(SimpleNamespace(state=state), store, personal)
        with gr.Blocks(analytics_enabled=False):
            yield DraftersTab(desk)


def finished(page: DraftersTab) -> DraftersTab:
    deadline = time.monotonic() + 60
    while page.runner.running:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return page


ASKED = (2, 3, 0.8, 1, 16)  # prompts, K, temperature, tree width, tokens


def test_a_run_is_shown_kept_opened_again_and_deleted(tmp_path):
    with tab(tmp_path) as page:
        offered = page.show_loading(page.desk.loading)[page.drafters]
        assert offered["value"] == ["model", "ngram", "recycling", "auto"]
        page.start(["model", "ngram"], *ASKED)
        shown = finished(page).look(-1)
        assert "12 of 12 replies, done" in shown[page.progress]
        assert "Code" in shown[page.result] and "ngram" in shown[page.result]
        assert shown[page.begin]["interactive"] and not shown[page.stop]["interactive"]
        ((name, key),) = shown[page.earlier]["choices"]
        assert "model, ngram with" in name and shown[page.earlier]["value"] == key
        assert page.look(page.runner.number) == {page._seen: page.runner.number}  # nothing new
        assert page.open(key) == shown[page.result]
        assert page.write().endswith(".csv")
        left = page.remove(key)
        assert left[page.earlier]["choices"] == [] and page.desk.store.comparisons() == []


def test_a_second_start_is_refused_and_a_cancelled_run_keeps_what_was_measured(tmp_path):
    with tab(tmp_path) as page:
        page.start(["model", "ngram", "recycling"], 10, 3, 0.8, 1, 64)
        with pytest.raises(gr.Error, match="running already"):
            page.start(["model"], *ASKED)
        while page.runner.step is None or page.runner.step.done < 2:
            time.sleep(0.005)
        page.runner.cancel()
        step = finished(page).runner.step
        assert step.now == "cancelled" and 2 <= step.done < step.total
        (kept,) = page.desk.store.comparisons()
        assert not kept.complete and len(kept.replies) == step.done
        assert "cancelled" in result(kept) and title(kept).endswith("cancelled")


@pytest.mark.parametrize(
    ("drafters", "loaded", "said"),
    [([], True, "Choose at least one drafter"), (["model"], False, "Loading the pair.")],
)
def test_what_cannot_be_started_is_one_sentence(tmp_path, drafters, loaded, said):
    with tab(tmp_path, loaded=loaded) as page:
        with pytest.raises(gr.Error, match=said):
            page.start(drafters, *ASKED)
        assert not page.runner.running


def test_zero_gpu_lends_nothing_to_comparisons(tmp_path, monkeypatch):
    monkeypatch.setattr(drafters_tab.zero_gpu, "active", lambda: True)
    with tab(tmp_path) as page, pytest.raises(gr.Error, match="ZeroGPU"):
        page.start(["model"], *ASKED)


def test_a_shared_page_shows_nothing_of_the_record(tmp_path):
    with tab(tmp_path, personal=False) as page:
        page.desk.store.add_comparison(made())
        assert page.open(made().id) == drafters_tab.NOTHING
        assert "choices" not in page.look(-1)[page.earlier]
        page.remove(page.desk.store.comparisons()[0].id)
        assert len(page.desk.store.comparisons()) == 1
        with pytest.raises(gr.Error, match="yours alone"):
            page.write()


def test_what_is_shown_is_inert_and_says_what_is_not_exact():
    step = Step(1, 4, "<b>model</b>", made(), ("No <i>eagle</i>.",))
    assert "<b>" not in progress(step, True, "") and "&lt;i&gt;" in progress(step, True, "")
    assert progress(None, False, "") == ""
    assert "2.00×" in result(made()) and "NOT EXACT" not in result(made())


def test_a_comparison_in_a_browser(tmp_path, browser):
    with contextlib.closing(Store(tmp_path / "redline.db")) as store:
        loader = Loader(lambda spec, progress: engine())
        loader.start(wait=True)
        page = build(Desk(loader, store))
        port = free_port()
        launch(page, "127.0.0.1", port)
        view = browser.new_page()
        try:
            view.goto(f"http://127.0.0.1:{port}")
            view.get_by_role("tab", name="Drafters").click()
            view.get_by_label("N-gram: repeats of the text so far").wait_for()
            for label in ("Token recycling", "N-gram where it matches"):
                view.get_by_label(label).first.uncheck()
            view.locator("#compare-prompts input[type=number]").fill("1")
            view.get_by_role("button", name="Start").click()
            view.locator(".compare-table").nth(1).wait_for()
            view.get_by_text("6 of 6 replies, done").wait_for()
            assert view.locator("#compare-result tbody tr").count() == 6
        finally:
            view.close()
            page.close()
