"""The chat's handlers, called as Gradio calls them, without a browser."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import gradio as gr
import pytest

from app.chat.answer import Answer
from app.chat.chat import Chat, status
from app.chat.conversation import FIRST
from app.chat.desk import Desk
from app.chat.settings_panel import SettingsPanel
from app.chat.sheet import READ
from app.serving import zero_gpu
from app.serving.loading import Loader, LoadingState
from core.record.store import Store
from core.records import Settings
from core.text.template import Prompt
from tests.app.toy import PAIR, ToyEngine
from tests.core.builders import reply_of, rounds_of

PANEL = (
    True,
    "",
    1,
    4,
    False,
    "token",
    0.7,
    "0",
    "1",
    "0",
    "1",
    "512",
    "7",
    "",
    "auto",
    True,
    "",
    "",
)  # in the order of settings_panel.inputs


ANN, BEN = (SimpleNamespace(session_hash=name) for name in ("ann", "ben"))  # two pages


@pytest.fixture
def chat(tmp_path: Path) -> Chat:
    loader = Loader(lambda spec, progress: None)
    loader.state = LoadingState("Ready.", 1.0, engine=ToyEngine("one two three " * 20, pause=0.02))
    with gr.Blocks(analytics_enabled=False):
        return Chat(Desk(loader, Store(tmp_path / "record.db")), SettingsPanel(loader))


@pytest.mark.parametrize("doomed", ["one", "all"])
def test_a_reply_that_is_deleted_while_it_is_written_does_not_come_back(chat, doomed):
    conversation = chat.desk.new()
    conversation.view = READ
    updates = chat.ask(ANN, "Forget this.", conversation.key, {}, "Be brief.", *PANEL)
    next(updates), next(updates)
    page = chat.erase(ANN, doomed, conversation.key)
    (last,) = updates
    assert last[chat.session] == page[chat.session] and last[chat.redline] == page[chat.redline]
    assert page[chat.redline]["value"] == "" and page[chat.read]["value"] == []
    assert page[chat.browser]["view"] == READ and page[chat.session] != conversation.key
    assert chat.desk.store.list_conversations() == ()
    new = chat.desk.open(page[chat.session])
    updates = list(chat.ask(ANN, "Go on.", new.key, page[chat.browser], "", *PANEL))
    assert updates[-1][chat.session] == new.key and new.view == READ and len(new.turns) == 1


@pytest.mark.parametrize("doomed", ["one", "all"])
def test_a_question_that_is_deleted_while_it_is_begun_is_not_recorded(chat, monkeypatch, doomed):
    conversation = chat.desk.new()
    list(chat.ask(ANN, "First.", conversation.key, {}, "", *PANEL))
    engine = chat.desk._engine

    def slow(drafter):
        chat.erase(BEN, doomed, conversation.key)
        return engine(drafter)

    monkeypatch.setattr(chat.desk, "_engine", slow)
    with pytest.warns(UserWarning, match="This conversation was deleted"):  # said on the page
        (last,) = chat.ask(ANN, "Second.", conversation.key, {}, "", *PANEL)
    assert last[chat.welcome]["visible"] and last[chat.session] != conversation.key
    assert chat.desk.store.list_conversations() == ()


def test_a_page_sees_the_end_of_a_reply_that_another_page_left(chat):
    conversation = chat.desk.new()
    updates = chat.ask(ANN, "Go on.", conversation.key, {}, "", *PANEL)
    next(updates), next(updates)
    away = chat.begin_anew(BEN, conversation.key)
    last = list(updates)[-1]
    assert last[chat.session] == conversation.key != away[chat.session]
    assert (last[chat.stop]["visible"], last[chat.send]["visible"]) == (False, True)
    assert "Ended: stopped" in last[chat.status] and "one" in last[chat.redline]["value"]
    again = list(chat.answer_again(ANN, conversation.key, {}, "", *PANEL))[-1]
    assert again[chat.regenerate]["interactive"] and len(conversation.last.answers) == 2


@pytest.mark.parametrize("doomed", ["one", "all"])
def test_a_page_leaves_a_conversation_that_another_page_deleted(chat, doomed):
    conversation = chat.desk.new()
    updates = chat.ask(ANN, "Go on.", conversation.key, {}, "", *PANEL)
    next(updates), next(updates)
    chat.erase(BEN, doomed, conversation.key)
    last = list(updates)[-1]
    assert last[chat.session] not in ("", conversation.key) and last[chat.redline]["value"] == ""
    assert last[chat.welcome]["visible"] and not last[chat.stop]["visible"]


def test_new_pressed_while_a_reply_is_begun_stays_new(chat, monkeypatch):
    conversation, pages = chat.desk.new(), []
    begin = chat.desk.ask

    def ask(*what):
        pages.append(chat.begin_anew(ANN, conversation.key))
        return begin(*what)

    monkeypatch.setattr(chat.desk, "ask", ask)
    (only,) = chat.ask(ANN, "Too late.", conversation.key, {}, "", *PANEL)
    assert only[chat.session] == pages[0][chat.session] != conversation.key
    assert only[chat.welcome]["visible"] and only[chat.status] == "" and chat.message not in only
    assert conversation.current.finish_reason == "cancelled" and not conversation.busy


def test_what_comes_after_new_asks_nothing_and_stays_in_its_box(chat):
    conversation = chat.desk.new()
    away = chat.begin_anew(ANN, conversation.key)
    (only,) = chat.ask(ANN, "Too late.", conversation.key, {}, "", *PANEL)
    assert only[chat.session] == away[chat.session] and chat.message not in only
    assert not conversation.turns
    assert chat.switch(ANN, READ, conversation.key)[chat.browser]["conversation"] == away[chat.session]


def test_a_page_that_outlived_its_server_goes_on_with_the_conversation_its_browser_keeps(chat):
    conversation = chat.desk.new()
    list(chat.ask(None, "First.", conversation.key, {}, "", *PANEL))
    with gr.Blocks(analytics_enabled=False):
        loader = chat.desk.loader
        restarted = Chat(Desk(loader, Store(chat.desk.store.path)), SettingsPanel(loader))
    page = list(restarted.ask(None, "Second.", "", {"conversation": conversation.key}, "", *PANEL))[-1]
    assert page[restarted.session] == conversation.key
    stored = restarted.desk.store.conversation(conversation.key)
    assert [m.content for m in stored.messages if m.role == "user"] == ["First.", "Second."]
    assert list(restarted.ask(None, "Lost?", "", {}, "", *PANEL)) == [{restarted.browser: {}}]


def test_a_reply_says_that_it_waits_until_its_own_engine_turns_to_it():
    """Another pair may be loaded meanwhile, and that one is idle."""
    answer = Answer("key", FIRST, Settings(), "auto", PAIR, Prompt([1, 2]))
    answer.had_to_wait = True
    answer.generation = SimpleNamespace(reused_tokens=None, prefill_seconds=None)
    assert status(answer) == "Waiting for another reply to end."
    answer.generation.reused_tokens = 0
    assert status(answer) == "Reading the prompt."


def test_a_drafter_is_made_once_and_the_page_says_so(chat):
    conversation = chat.desk.new()
    panel = (True, "ngram", *PANEL[2:])
    said = []
    for _ in range(2):
        updates = list(chat.ask(None, "Draft otherwise.", conversation.key, {}, "", *panel))
        said.append(sum("Making the drafter" in update.get(chat.status, "") for update in updates))
    assert said == [1, 0]
    assert conversation.current.info.drafter == "ngram"
    own = list(chat.answer_again(None, conversation.key, {}, "", *PANEL))
    assert not any("Making" in update.get(chat.status, "") for update in own)
    assert [answer.info.drafter for answer in conversation.last.answers] == ["ngram", "model"]


def test_while_a_drafter_is_timed_the_page_says_so():
    answer = Answer("key", FIRST, Settings(), "auto", PAIR, Prompt([1]))
    answer.measuring = True
    assert status(answer).startswith("Measuring what a pass with this drafter costs")


def test_between_stop_and_the_end_the_page_says_so():
    answer = Answer("key", FIRST, Settings(), "auto", PAIR, Prompt([1]))
    assert status(answer) == "Reading the prompt."
    answer.cancel.set()
    assert status(answer) == "Stopping."


def test_a_reply_whose_process_was_killed_says_that_it_is_not_whole(chat):
    store, pair = chat.desk.store, chat.desk.engine.pair.info
    key = store.new_conversation()
    store.begin_reply(key, store.add_message(key, "user", "Count."), Settings(), pair, "auto", 3)
    answer = chat.desk.open(key).current
    assert status(answer) == "Ended: interrupted."


def test_what_was_left_out_and_what_the_model_lacks_is_said_with_the_reply():
    answer = Answer(
        "key", FIRST, Settings(), "auto", PAIR, Prompt([1], dropped_messages=2, notes=("A note.",))
    )
    answer.reply = reply_of(rounds_of("aab"))
    answer.done.set()
    said = status(answer)
    assert said == (
        "The oldest 2 messages no longer fit the context and were left out: "
        "the system prompt and the newest turns stay. A note."
    )


def test_a_load_that_failed_is_dismissed_or_tried_again(chat):
    engine = chat.desk.engine

    def state(**changes):
        return LoadingState("No network.", failed=True, **changes)

    page = chat.show_loading(state(engine=engine))
    assert "No network." in page[chat.loading] and "The chat goes on with Toy-135M." in page[chat.loading]
    assert page[chat.dismiss]["visible"] and page[chat.send]["interactive"]
    page = chat.show_loading(state())
    assert not page[chat.dismiss]["visible"] and not page[chat.send]["interactive"]
    chat.desk.loader.state = state(engine=engine)
    chat.desk.loader.dismiss()
    assert chat.show_loading(chat.desk.loader.state)[chat.loading] == ""


def test_a_shared_page_cannot_start_another_load_over_a_pair_that_runs(chat):
    chat.desk.personal = False
    chat.desk.loader.state = before = LoadingState("No network.", failed=True, engine=chat.desk.engine)
    chat.load_again()
    assert chat.desk.loader.state is before


def test_on_zerogpu_a_load_that_failed_is_not_tried_again_but_by_a_restart(chat, monkeypatch):
    """What is loaded after the launch never reaches a GPU."""
    monkeypatch.setattr(zero_gpu, "active", lambda: True)
    chat.desk.loader.state = before = LoadingState("No network.", failed=True)
    chat.load_again()
    assert chat.desk.loader.state is before
    page = chat.show_loading(chat.desk.loading)
    assert "No network. Restart the Space to try again." in page[chat.loading]
    assert not page[chat.loading_actions]["visible"]
    with gr.Blocks(analytics_enabled=False):
        assert not Chat(chat.desk, SettingsPanel(chat.desk.loader)).retry.visible
