"""A conversation: its questions and answers, and who may write in it.

The true texts live here, untouched by whatever the page needs to display them. Knows the token view's
encoding; no engine, no record and no Gradio component.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from app.chat.answer import Answer
from app.chat.token_view import encode_user
from core.figures.metrics import Figures, measured_speedup
from core.record.stored import StoredConversation
from core.text.thoughts import as_message

FIRST, REGENERATED, PLAIN = "first", "regenerated", "plain"
PLAIN_CAPTION = "once more, plainly: the target alone"
SECONDS_TO_STOP = 15.0


class Refused(Exception):
    """A reply cannot be begun now; the message is one sentence for the page."""


@dataclass(eq=False)
class Turn:
    """A question and its answers, oldest first. ``question_id`` is None if it was not recorded."""

    question: str
    answers: list[Answer] = field(default_factory=list)
    question_id: str | None = None

    @property
    def kept(self) -> Answer | None:
        """The answer that the conversation goes on from: the newest that is not a plain repetition."""
        return next((answer for answer in reversed(self.answers) if answer.kind != PLAIN), None)

    @property
    def repeated(self) -> Answer | None:
        """The plain repetition of ``kept``, if it was asked for."""
        last = self.answers[-1] if self.answers else None
        return last if last is not None and last.kind == PLAIN else None

    @property
    def shown(self) -> list[Answer]:
        return [answer for answer in (self.kept, self.repeated) if answer is not None]

    @property
    def speedup(self) -> tuple[Figures, Figures, float | None] | None:
        """Measured: the first answer's figures, the plain one's, their ratio; None before there are two."""
        if self.kept is None or self.repeated is None or not self.repeated.done.is_set():
            return None
        speculative, plain = self.kept.figures(), self.repeated.figures()
        return speculative, plain, measured_speedup(speculative, plain)

    def drawn(self) -> str:
        """The turn in the token view's form; captions tell a plain repetition from what it repeats."""
        measured, captions = self.speedup, ["", PLAIN_CAPTION]
        if measured and measured[2] is not None:
            captions[0] = f"speculative: measured {measured[2]:.2f}× the plain speed"
        answers = [
            answer.drawn(" · ".join(filter(None, (caption, answer.not_exact))))
            for answer, caption in zip(self.shown, captions, strict=False)
        ]
        return encode_user(self.question) + "".join(answers)


class Conversation:
    """One conversation of one browser. ``view`` is how its replies are shown: "redline" or "read".

    ``key`` is random, and whoever knows it may see the conversation: the browser it belongs to.
    ``deleted``: it was to be forgotten. ``entering`` is held while something of it is entered into the record
    or it is marked as deleted.
    """

    def __init__(self, key: str, system: str = "", recorded: bool = False):
        self.key, self.system, self.recorded = key, system, recorded
        self.recorded_system = system if recorded else None
        self.view = "redline"
        self.turns: list[Turn] = []
        self.writing: Answer | None = None
        self.deleted = False
        self.entering = threading.Lock()
        self._claim = threading.Lock()  # held by whoever writes
        self._next = threading.Lock()  # held by the one that waits for it

    @property
    def busy(self) -> bool:
        """Whether somebody has the right to write, or a reply goes on."""
        return self._claim.locked() or (self.writing is not None and not self.writing.done.is_set())

    @property
    def last(self) -> Turn | None:
        return self.turns[-1] if self.turns else None

    @property
    def current(self) -> Answer | None:
        """The answer that the figures are about: the newest."""
        return self.last.answers[-1] if self.last and self.last.answers else None

    def messages(self, until: Turn | None = None) -> list[dict[str, str]]:
        """What the model is told, up to and with the question of ``until``; empty replies are left out."""
        messages = [{"role": "system", "content": self.system}] if self.system.strip() else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.question})
            if turn is until:
                break
            if turn.kept is not None and turn.kept.text:
                messages.append(as_message(turn.kept.text, turn.kept.opening))
        return messages

    def drawn(self) -> str:
        """The whole conversation in the token view's form."""
        return "".join(turn.drawn() for turn in self.turns)

    def claim(self) -> None:
        """Take the right to write; waits for a reply that was just stopped.

        Raises Refused while another is written, begun or waited for: what is sent twice is asked once.
        """
        refused = Refused("A reply is still being written: stop it first, or wait for its end.")
        if not self._next.acquire(blocking=False):
            raise refused
        try:
            writing = self.writing
            ending = writing is not None and (writing.cancel.is_set() or writing.done.is_set())
            if not self._claim.acquire(timeout=SECONDS_TO_STOP if ending else 0):
                raise refused
            self.writing = None  # until the next reply is begun
        finally:
            self._next.release()

    def release(self) -> None:
        """Give the right back. Stops the reply if it is still being written, as when the tab was closed.

        Returns in time where that reply cannot be stopped yet, as while a GPU is waited for; the right is
        then given back at its end, so that never two write one conversation.
        """
        writing = self.writing
        if writing is not None:
            writing.cancel.set()
            if not writing.done.wait(SECONDS_TO_STOP):
                threading.Thread(target=self._release_after, args=(writing,), daemon=True).start()
                return
        self._claim.release()

    def _release_after(self, answer: Answer) -> None:
        answer.done.wait()
        self._claim.release()

    def stop(self) -> None:
        """Ask the reply in progress to end after the round in flight; what was said is kept."""
        if self.writing is not None:
            self.writing.cancel.set()


def rebuild(stored: StoredConversation) -> Conversation:
    """A conversation as the record has it: its views and figures are as they were."""
    conversation = Conversation(stored.id, stored.system_prompt, recorded=True)
    for message in stored.messages:
        if message.role == "user":
            conversation.turns.append(Turn(message.content, question_id=message.id))
        elif conversation.turns:
            for reply in message.replies:
                answer = Answer(reply.id, reply.kind, reply.settings, reply.domain_choice, reply.pair)
                answer.rounds, answer.reply, answer.opening = list(reply.rounds), reply, reply.opening
                answer.done.set()
                conversation.last.answers.append(answer)
    return conversation
