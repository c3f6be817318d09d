"""The chat's handlers, called as Gradio calls them, without a browser."""

from __future__ import annotations

from pathlib import Path

import gradio as gr
import pytest

from app.answer import Answer
from app.chat import READ, Chat, status
from app.conversation import FIRST, Desk
from app.loading import Loader, LoadingState
from app.settings_panel import SettingsPanel
from core.chat import Prompt
from core.records import Settings
from core.store import Store
from tests.app.toy import PAIR, ToyEngine

PANEL = (
    True,
    4,
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
)  # in the order of settings_panel.inputs


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
    updates = chat.ask("Forget this.", conversation.key, {}, "Be brief.", *PANEL)
    next(updates), next(updates)
    page = chat.erase(doomed, conversation.key)
    assert list(updates) == []
    assert page[chat.redline]["value"] == "" and page[chat.read]["value"] == []
    assert page[chat.browser]["view"] == READ and page[chat.session] != conversation.key
    assert chat.desk.store.list_conversations() == ()


def test_between_stop_and_the_end_the_page_says_so():
    answer = Answer("key", FIRST, Settings(), "auto", PAIR, Prompt([1]))
    assert status(answer, None) == "Reading the prompt."
    answer.cancel.set()
    assert status(answer, None) == "Stopping."


def test_a_reply_whose_process_was_killed_says_that_it_is_not_whole(chat):
    store, pair = chat.desk.store, chat.desk.engine.pair.info
    key = store.new_conversation()
    store.begin_reply(key, store.add_message(key, "user", "Count."), Settings(), pair, "auto", 3)
    answer = chat.desk.open(key).current
    assert status(answer, None) == "Ended: interrupted."
