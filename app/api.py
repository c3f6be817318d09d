"""What programs may call: ``/chat`` writes a reply, ``/pair`` says which models write it.

    from gradio_client import Client
    client = Client("http://127.0.0.1:7860")
    client.predict("Say hello.", api_name="/chat")                     # the whole reply
    for text in client.submit("Say hello.", api_name="/chat"): ...     # the text so far, as it grows
    client.predict(api_name="/pair")

Replies go through the page's own desk, so they wait for the engine with everybody else's and are exact under
the same settings. Nothing is kept of a caller between calls: the history is the caller's. A reply is recorded
only with ``record=True``, as a conversation of its own that holds the question and the reply.

Whatever cannot be answered is a ``gradio.Error`` with one sentence. Knows the desk; no component. Annotations
stand here as types, not as text, because Gradio reads the return type as it stands.
"""

import dataclasses
import time
import uuid
from collections.abc import Iterator
from typing import Any

import gradio as gr

from app.chat.conversation import Conversation, Refused
from app.chat.desk import Desk
from app.widgets.events import SIGN_OF_LIFE_EVERY, TICK
from core.engine.auto_k import usual_k
from core.records import Settings
from core.settings import LOSSY, SettingsError, parse_flag, parse_settings
from core.text.detokenise import PromptError
from core.text.history import flatten_history

_DEFAULTS = Settings()
_OF_K = ("num_draft_tokens", "auto_draft_tokens")


def add(desk: Desk) -> None:
    """Open the endpoints on the page under construction; call it inside its ``gr.Blocks``."""

    def chat(
        message: str,
        history: list | None = None,
        system: str = "",
        temperature: float = _DEFAULTS.temperature,
        top_k: int = _DEFAULTS.top_k,
        top_p: float = _DEFAULTS.top_p,
        min_p: float = _DEFAULTS.min_p,
        repetition_penalty: float = _DEFAULTS.repetition_penalty,
        num_draft_tokens: int | None = None,
        auto_draft_tokens: bool | None = None,
        verifier: str = _DEFAULTS.verifier,
        acceptance_threshold: float | None = None,
        drafter: str | None = None,
        tree_width: int = _DEFAULTS.tree_width,
        max_new_tokens: int = _DEFAULTS.max_new_tokens,
        stop: list[str] | None = None,
        seed: int | None = None,
        record: bool = False,
    ) -> str:  # of each value that it yields: what Gradio describes to clients
        values = dict(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            **_usual_k(desk, num_draft_tokens, auto_draft_tokens),
            verifier=verifier,
            acceptance_threshold=acceptance_threshold,
            tree_width=tree_width,
            max_new_tokens=max_new_tokens,
            stop=stop,
            seed=seed,
        )
        yield from reply(desk, message, history, system, values, record, drafter)

    def pair() -> dict:
        return describe(desk)

    # No limit of its own: that of the page's replies, which share the name, holds for all of them.
    gr.api(
        chat,
        api_name="chat",
        api_description=(
            "Write a reply to message: the text so far, each time it has grown. history: earlier messages,"
            " [{'role': 'user' or 'assistant', 'content': text}, ...] or pairs [question, answer]."
            " num_draft_tokens: K, 0 for the target alone. auto_draft_tokens: K is chosen before each round,"
            " at most num_draft_tokens, where it was measured what passes cost. With neither, K is"
            f" {_DEFAULTS.num_draft_tokens}, and on a card chosen automatically."
            " verifier: 'token' or 'block',"
            f" how drafts are judged, both exact; {', '.join(map(repr, LOSSY))} are for teaching, not exact,"
            " with acceptance_threshold, blank for each rule's usual one. drafter: how drafts are made, of"
            " those that /pair lists; none is the pair's own. tree_width: candidates a position, for drafters"
            " that make trees. stop: strings that end the reply."
            " seed: the same seed and settings give the same reply; none draws one."
            " record: enter question and reply into the record of this app."
        ),
        concurrency_id="reply",
        concurrency_limit=None,
    )
    gr.api(
        pair,
        api_name="pair",
        api_description="Which models write the replies, in which precision and on which device.",
    )


def reply(
    desk: Desk,
    message: object,
    history: object,
    system: str,
    values: dict[str, Any],
    record: bool,
    drafter: str | None = None,
) -> Iterator[str]:
    """The text of a reply as it grows; ``values`` are those of ``core.settings.parse_settings``.

    ``drafter`` is one of the pair's, None its own. Raises ``gradio.Error`` if it cannot be begun, or when it
    ends with an error; what was written by then was yielded. Closing the iterator stops the reply.
    """
    try:
        settings, record = parse_settings(**values), parse_flag("Record", record)
        for name, value in (("The system prompt", system), ("The drafter", drafter)):
            if value is not None and not isinstance(value, str):
                raise PromptError(f"{name} must be text.")
        earlier = flatten_history(history)
        try:
            said = flatten_history([{"role": "user", "content": message}])
        except PromptError:
            raise PromptError("The message must be text.") from None
        if not said:
            raise PromptError("The message is empty; please write something.")
        conversation = ToldConversation(system or "", earlier)
        conversation.claim()
        try:
            question = said[0]["content"]
            answer = desk.ask(conversation, question, settings, "auto", record, drafter or None)
            yield from _growing(answer)
        finally:
            conversation.release()
    except (SettingsError, PromptError, Refused) as error:
        raise gr.Error(str(error), print_exception=False) from None
    sentence = answer.error or (answer.reply and answer.reply.error)
    if sentence:
        raise gr.Error(sentence, print_exception=False)


def _usual_k(desk: Desk, num_draft_tokens: object, auto_draft_tokens: object) -> dict[str, object]:
    """Both as they were told, or else as is usual where the pair runs; they are not checked yet."""
    engine = desk.loading.engine
    device, costs = ("cpu", None) if engine is None else (engine.pair.info.device, engine.pair.costs)
    return dict(zip(_OF_K, usual_k(device, costs, num_draft_tokens, auto_draft_tokens), strict=True))


def _growing(answer: Any) -> Iterator[str]:
    told, told_at, ended = None, time.monotonic(), False
    while not ended:
        ended = answer.done.wait(TICK)
        text, now = answer.text, time.monotonic()
        if ended or (text and text != told) or now - told_at >= SIGN_OF_LIFE_EVERY:
            told, told_at = text, now
            yield text


def describe(desk: Desk) -> dict[str, Any]:
    """What runs: ``loaded``, a ``sentence`` on how loading stands and, once loaded, all of ``PairInfo`` and
    the ``drafters`` that ``/chat`` takes."""
    state = desk.loading
    told: dict[str, Any] = {"loaded": state.engine is not None, "sentence": state.sentence}
    if state.engine is not None:
        told |= dataclasses.asdict(state.engine.pair.info)
        told["drafters"] = list(state.engine.pair.drafters)
    return told


class ToldConversation(Conversation):
    """A conversation whose earlier messages the caller tells, with the system prompt among them or apart."""

    def __init__(self, system: str, earlier: list[dict[str, str]]):
        super().__init__(uuid.uuid4().hex, system)
        self.earlier = earlier

    def messages(self, *arguments: Any, **options: Any) -> list[dict[str, str]]:
        told = super().messages(*arguments, **options)
        at = 1 if told and told[0]["role"] == "system" else 0
        return [*told[:at], *self.earlier, *told[at:]]
