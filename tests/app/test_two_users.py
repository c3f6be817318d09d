"""Case UI-08: two people at once, over the real engine. Neither changes or sees anything of the other's.

One asks while the other's reply is being written: a seed that were anybody else's, too, would show.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

from app.chat.conversation import Conversation
from app.chat.desk import Desk
from app.serving.loading import LoadingState
from core.engine.loop import Engine
from core.record.store import Store
from core.records import Settings
from tests.app.letters import chat_pair

QUESTIONS = {"A": ("My word is APPLE", "What is my word?"), "B": ("My word is PEAR", "What is my word?")}
SEEDS = {"A": 1, "B": 2}


class Halt:
    """Holds the target up once, in the middle of a reply, until ``go`` is set."""

    def __init__(self, decoder, after: int):
        self.reached, self.go = threading.Event(), threading.Event()
        self._logits, self._left = decoder.logits, after
        decoder.logits = self.logits

    def logits(self, ids, cache):
        self._left -= 1
        if self._left == 0:
            self.reached.set()
            assert self.go.wait(60)
        return self._logits(ids, cache)


def new_desk(folder: Path) -> Desk:
    engine = Engine(chat_pair())
    return Desk(SimpleNamespace(state=LoadingState("Ready.", engine=engine)), Store(folder / "redline.db"))


def ask(desk: Desk, conversation: Conversation, who: str, turn: int):
    settings = Settings(temperature=1.0, max_new_tokens=40, seed=SEEDS[who])
    conversation.claim()
    answer = desk.ask(conversation, QUESTIONS[who][turn], settings, "auto", record=True)
    threading.Thread(target=lambda: answer.done.wait(60) and conversation.release(), daemon=True).start()
    return answer


def what_it_was(answer) -> tuple:
    assert answer.done.wait(60) and answer.error is None
    figures = answer.figures()
    counts = (figures.drafted, figures.accepted, figures.rejected, figures.emitted, figures.rounds)
    return answer.prompt.ids, answer.reply.token_ids, answer.text, counts, figures.alpha


def test_replies_that_overlap_are_those_of_each_alone(tmp_path):
    alone = {}
    for who in QUESTIONS:
        desk = new_desk(tmp_path / who)
        conversation = desk.new()
        alone[who] = [what_it_was(ask(desk, conversation, who, turn)) for turn in (0, 1)]
    assert alone["A"][0][1] != alone["B"][0][1]

    desk = new_desk(tmp_path / "both")
    conversations = {who: desk.new() for who in QUESTIONS}
    for turn in (0, 1):
        halt = Halt(desk.engine.pair.target, after=4)
        answers = {"A": ask(desk, conversations["A"], "A", turn)}
        assert halt.reached.wait(60)
        answers["B"] = ask(desk, conversations["B"], "B", turn)
        assert 0 < len(answers["A"].rounds) and not answers["A"].done.is_set()
        halt.go.set()
        for who, answer in answers.items():
            assert what_it_was(answer) == alone[who][turn], (who, turn)
        assert answers["B"].had_to_wait

    for who, conversation in conversations.items():
        stored = desk.store.conversation(conversation.key)
        said = [message.content for message in stored.messages]
        assert said == [
            text for turn in (0, 1) for text in (QUESTIONS[who][turn], alone[who][turn][2])
        ]  # each record holds its own conversation and nothing else
