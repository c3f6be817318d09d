"""All conversations of this process: which are in memory and on record, and how a reply in one is begun.

Knows the engine, the store and the token view's encoding; no Gradio component.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from app.chat.answer import Answer
from app.chat.card import locate, token_details
from app.chat.conversation import FIRST, PLAIN, REGENERATED, Conversation, Refused, Turn, rebuild
from app.chat.writing import begin_writing
from app.serving import zero_gpu
from app.serving.loading import Loader, LoadingState
from core.models.errors import LoadError
from core.record.store import Store
from core.records import EXACT_VERIFIERS, PairInfo, Settings
from core.text.chat import fit_chat, prompt_limit
from core.text.detokenise import clean_text, shown_alone
from core.text.template import Prompt

log = logging.getLogger(__name__)

CONVERSATIONS_KEPT = 64  # in memory, and any that is being written; older ones come back from the record
NOT_LOADED = "The models are not loaded yet."
NOT_SAID = "The models could not be loaded: whoever runs this page finds the reason in its log."
NOT_DRAFTING = "This way to draft cannot be used: whoever runs this page finds the reason in its log."
NOT_RECORDED = "The record could not be changed: whoever runs this page finds the reason in its log."
RESTART = "Restart the Space to try again."


class Desk:
    """All conversations of this process, the engine they share, and the record.

    ``personal``: only one person can reach the page, so all of the record may be exported and deleted there,
    and other pairs be loaded. ``notices`` are sentences about the record that hold as long as it runs.
    """

    def __init__(self, loader: Loader, store: Store, personal: bool = True, notices: Sequence[str] = ()):
        self.loader, self.store, self.personal, self.notices = loader, store, personal, tuple(notices)
        self._conversations: OrderedDict[str, Conversation] = OrderedDict()
        self._answers: WeakValueDictionary[str, Answer] = WeakValueDictionary()
        # What pages show that turned away from a conversation.
        self._turned: WeakValueDictionary[str, Conversation] = WeakValueDictionary()
        self.also_forget: list[Callable[[], None]] = []  # called when everything is forgotten
        self._lock = threading.Lock()
        self._logged: str | None = None
        self._made: set[tuple[PairInfo, str | None]] = set()  # drafters that were asked of pairs

    @property
    def engine(self) -> Any | None:
        """The engine, or None while the pair is not loaded."""
        return self.loader.state.engine

    @property
    def loading(self) -> LoadingState:
        """The loader's state as the page may tell it: why a load failed, paths and all, is its owner's."""
        state = self.loader.state
        if not state.failed:
            return state
        said = [state.sentence if self.personal else NOT_SAID]
        if zero_gpu.active():
            said.append(RESTART)  # a pair that is loaded after the launch never reaches a GPU
        return dataclasses.replace(state, sentence=" ".join(said))

    @property
    def problem(self) -> str | None:
        """What the record has to complain of, as the page may tell it: paths and all, it is its owner's."""
        problem = self.store.problem
        if self.personal or problem is None:
            return problem
        if problem != self._logged:
            log.warning("%s", problem)
            self._logged = problem
        return NOT_RECORDED

    def new(self) -> Conversation:
        return self._keep(Conversation(uuid.uuid4().hex))

    def open(self, key: object) -> Conversation | None:
        """The conversation of that key, from memory or from the record; None if there is none."""
        if not isinstance(key, str) or not key:
            return None
        with self._lock:
            if key in self._conversations:
                self._conversations.move_to_end(key)
                return self._conversations[key]
        stored = self.store.conversation(key)
        return None if stored is None else self._keep(rebuild(stored))

    def turn(self, page: str, old: Conversation, new: Conversation) -> None:
        """The page turns from one conversation to another: stop, and show it nothing more of the old one."""
        if page:
            self._turned[page] = new
        old.stop()

    def shown(self, page: str, conversation: Conversation) -> Conversation:
        """What the page shows now: ``conversation``, unless it has turned to another one."""
        now = self._turned.get(page)
        if now is None or now.deleted or now.key == conversation.key:
            return conversation
        return now

    def forget(self, conversation: Conversation) -> None:
        """Delete one conversation, from memory and from the record."""
        with conversation.entering:
            conversation.deleted = True
        conversation.stop()
        with self._lock:
            for key in [key for key, kept in self._conversations.items() if kept is conversation]:
                del self._conversations[key]
        if conversation.recorded:
            self.store.delete_conversation(conversation.key)

    def forget_everything(self) -> None:
        """Delete all conversations of everybody, from memory and from the record."""
        with self._lock:
            conversations = list(self._conversations.values())
            self._conversations.clear()
        for conversation in conversations:
            with conversation.entering:
                conversation.deleted = True
            conversation.stop()
        for forget in self.also_forget:
            forget()
        self.store.delete_all()

    def details(self, key: str, i: int) -> dict:
        """What the card of token ``i`` of a reply shows. Raises LookupError for what is not in memory."""
        answer = self._answers[key]
        round, index = locate(answer.rounds, i)
        tokenizer, engine = answer.tokenizer, self.engine
        if tokenizer is None and engine is not None and _same_target(engine.pair.info, answer.info):
            tokenizer = engine.pair.tokenizer

        def texts(ids: Sequence[int]) -> list[str]:
            return [shown_alone(tokenizer, id) if tokenizer else "" for id in ids]

        settings = answer.settings
        rule, threshold = settings.verifier, settings.acceptance_threshold
        return token_details(round, index, settings.temperature, texts, rule, threshold)

    def has_to_make(self, drafter: str | None) -> bool:
        """Whether the next reply with this drafter of the loaded pair has to make it first."""
        engine = self.engine
        if engine is None or drafter in (None, "", engine.pair.info.drafter):
            return False
        return (engine.pair.info, drafter) not in self._made

    def ask(
        self,
        conversation: Conversation,
        question: str,
        settings: Settings,
        domain: str,
        record: bool,
        drafter: str | None = None,
    ) -> Answer:
        """Begin to answer a new question. The caller has claimed the conversation.

        ``drafter`` is one of the loaded pair's, None its own. Raises Refused or PromptError, with nothing
        changed, if it cannot be begun.
        """
        engine, pair = self._engine(drafter)
        messages = [*conversation.messages(), {"role": "user", "content": question}]
        prompt = _fit(pair, messages, settings)
        conversation.turns.append(Turn(question))
        return self._begin(conversation, FIRST, settings, domain, record, engine, pair, prompt)

    def again(
        self,
        conversation: Conversation,
        settings: Settings,
        domain: str,
        record: bool,
        drafter: str | None = None,
    ) -> Answer:
        """Begin another answer to the last question. As ``ask``."""
        if conversation.last is None:
            raise Refused("There is no reply to write again yet.")
        engine, pair = self._engine(drafter)
        prompt = _fit(pair, conversation.messages(until=conversation.last), settings)
        kind = REGENERATED if conversation.last.answers else FIRST
        return self._begin(conversation, kind, settings, domain, record, engine, pair, prompt)

    def again_plainly(self, conversation: Conversation, record: bool) -> Answer:
        """Begin the last reply once more with the target alone: same prompt, seed and settings, K = 0.

        Raises as ``ask`` does, and where another target is loaded since: the two would not compare.
        """
        first = conversation.last.kept if conversation.last else None
        if first is None or not first.rounds:
            raise Refused("There is no reply to repeat yet.")
        if not first.drafted:
            raise Refused("This reply was written plainly already: there is nothing to compare it with.")
        engine, pair = self._engine()
        if not _same_target(pair.info, first.info):
            raise Refused(
                f"This reply was written with {first.info.target} as it ran then: "
                "load that pair again to compare, or regenerate the reply."
            )
        settings = dataclasses.replace(first.settings, num_draft_tokens=0, auto_draft_tokens=False)
        if not first.exact:  # there is nothing to judge, so no rule stands with it on record
            settings = dataclasses.replace(settings, verifier=EXACT_VERIFIERS[0], acceptance_threshold=None)
        prompt = first.prompt
        if prompt is None:
            prompt = _fit(pair, conversation.messages(until=conversation.last), settings)
        return self._begin(conversation, PLAIN, settings, first.domain, record, engine, pair, prompt)

    def set_system(self, conversation: Conversation, system: str) -> None:
        """Change what the model is told before the conversation, from the next reply on."""
        conversation.system = clean_text(system)

    def _keep(self, conversation: Conversation) -> Conversation:
        with self._lock:
            conversation = self._conversations.setdefault(conversation.key, conversation)
            # One that is being written would come back from the record as another one beside it.
            idle = [
                key for key, kept in self._conversations.items() if not kept.busy and kept is not conversation
            ]
            for key in idle[: max(len(self._conversations) - CONVERSATIONS_KEPT, 0)]:
                del self._conversations[key]
        for turn in conversation.turns:
            self._answers.update((answer.key, answer) for answer in turn.answers)
        return conversation

    def _record(self, conversation: Conversation, answer: Answer) -> str:
        """Enter the beginning of a reply into the record, with whatever it needs there; its key there."""
        store, turn = self.store, conversation.last
        if not conversation.recorded:
            # The record gives the key by which the conversation is found again after a restart.
            conversation.key, conversation.recorded = store.new_conversation(conversation.system), True
            self._keep(conversation)
        elif conversation.system != conversation.recorded_system:
            store.set_system_prompt(conversation.key, conversation.system)
        conversation.recorded_system = conversation.system
        if turn.question_id is None:
            turn.question_id = store.add_message(conversation.key, "user", turn.question)
        repeated = turn.kept if answer.kind == PLAIN else turn.answers[-1] if turn.answers else None
        return store.begin_reply(
            conversation.key,
            turn.question_id,
            answer.settings,
            answer.info,
            answer.domain,
            answer.prompt_tokens,
            kind=answer.kind,
            answers_reply_id=repeated.key if repeated else None,
            opening=answer.opening,
        )

    def _engine(self, drafter: str | None = None) -> tuple[Any, Any]:
        """What writes the next reply, and its pair with that drafter. It writes that reply to its end,
        whatever is loaded meanwhile."""
        engine = self.loader.state.engine
        if engine is None:
            raise Refused(NOT_LOADED if self.loader.state.loading else self.loading.sentence)
        try:
            pair = engine.pair.drafting(drafter)
        except LoadError as error:
            log.warning("A drafter could not be made: %s", error)
            raise Refused(str(error) if self.personal else NOT_DRAFTING) from None
        self._made.add((engine.pair.info, drafter))
        return engine, pair

    def _begin(
        self,
        conversation: Conversation,
        kind: str,
        settings: Settings,
        domain: str,
        record: bool,
        engine: Any,
        pair: Any,
        prompt: Prompt,
    ) -> Answer:
        turn = conversation.last
        stops = tuple(dict.fromkeys((*settings.stop, *prompt.stop)))
        settings = dataclasses.replace(settings, stop=stops)
        key = uuid.uuid4().hex
        answer = Answer(key, kind, settings, domain, pair.info, prompt, pair.tokenizer, pair.costs)
        with conversation.entering:
            if conversation.deleted:  # while it was begun: nothing of it may come back
                raise Refused("This conversation was deleted.")
            if record:
                answer.key = self._record(conversation, answer)
        turn.answers.append(answer)
        self._answers[answer.key] = answer
        conversation.writing = answer
        begin_writing(engine, answer, self.store if record else None)
        return answer


def _fit(pair: Any, messages: list[dict[str, str]], settings: Settings) -> Prompt:
    return fit_chat(pair.tokenizer, messages, prompt_limit(pair.info.context_length, settings.max_new_tokens))


def _same_target(one: PairInfo, other: PairInfo) -> bool:
    """Whether two replies' targets are the same weights in the same form on the same device."""
    what = ("target_fingerprint", "quantization", "dtype", "device")
    return all(getattr(one, name) == getattr(other, name) for name in what)
