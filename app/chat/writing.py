"""The writing of a reply: rounds, as the engine gives them, to the answer on the page and to the record.

A reply is written in a thread of its own, which appends each ``Round`` to its ``Answer`` and to the record
before it asks for the next; the page only looks on, so a closed tab or a slow browser loses nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
from typing import Any

from app.chat.answer import Answer
from app.serving import zero_gpu
from core.record.store import Store

log = logging.getLogger(__name__)


def begin_writing(engine: Any, answer: Answer, store: Store | None) -> None:
    """Begins to write ``answer``, and to enter it into ``store`` where it is to be recorded."""
    # With the request's context: ZeroGPU charges the visitor's quota by it.
    run = contextvars.copy_context().run
    threading.Thread(target=run, args=(_write, engine, answer, store), name="reply", daemon=True).start()


def _write(engine: Any, answer: Answer, store: Store | None) -> None:
    try:
        _measure(engine, answer)
        answer.had_to_wait = engine.busy
        answer.generation = engine.generate(
            answer.prompt.ids,
            answer.settings,
            cancel=answer.cancel,
            domain=answer.domain,
            drafter=answer.info.drafter,
        )
        with contextlib.closing(answer.generation):  # whatever happens here, the engine is free again
            for round in answer.generation:
                if store is not None:
                    store.add_round(answer.key, round)
                answer.rounds.append(round)
        answer.reply = answer.generation.reply
        if store is not None:
            store.finish_reply(answer.key, answer.reply)
    except Exception as error:  # a fault of ours: the page must learn of it, and go on
        log.exception("A reply failed")
        answer.error = f"The reply could not be written ({type(error).__name__}: {error})."
    finally:
        answer.generation = None  # it would keep an engine that was given up in memory
        answer.done.set()


def _measure(engine: Any, answer: Answer) -> None:
    """What passes cost with a drafter that was not used yet, where K is to be chosen by it and the engine is
    free; else K stays as set for this reply, which its rounds say."""
    pair = engine.pair.drafting(answer.info.drafter)
    if not answer.settings.auto_draft_tokens or pair.costs is not None or zero_gpu.active():
        return
    from core.engine.calibration import costs_if_any  # imports torch

    with engine.idle() as free:
        if free:
            answer.measuring = True
            pair.costs = answer.costs = costs_if_any(pair)
            answer.measuring = False
