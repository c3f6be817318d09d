"""The chat: the handlers of the sheet on which one reads and writes, and of its margin (``app.chat.sheet``).

A reply is written by ``app.chat.writing`` in a thread; the handlers here look at what there is of it
every ``TICK`` seconds and hand the difference to the one view that is shown. Stop, Copy and the
Read / Redline switch do not queue, so they answer while a reply streams.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import gradio as gr

from app.chat import settings_panel
from app.chat.answer import Answer
from app.chat.conversation import Conversation, Refused
from app.chat.desk import Desk
from app.chat.figures import ENDINGS, comparison, figures_value
from app.chat.read_view import chat_messages
from app.chat.settings_panel import SettingsPanel
from app.chat.sheet import READ, REDLINE, Sheet
from app.serving import choosing, zero_gpu
from app.serving.loading import LoadingRefused, LoadingState
from app.widgets.charts import rounds_value
from app.widgets.display import as_html
from app.widgets.events import AT_ONCE, PRIVATE, SIGN_OF_LIFE_EVERY, TICK
from app.widgets.masthead import loading_strip
from core.models.memory import gigabytes
from core.pairs.catalogue import Entry
from core.settings import SettingsError
from core.text.detokenise import PromptError

FIGURES_EVERY = 0.25
PLOT_EVERY = 1.0
REPLIES_AT_ONCE = 16  # they wait for the engine here, where they can be stopped and say that they wait

REPLY = {
    **PRIVATE,
    "concurrency_id": "reply",
    "concurrency_limit": REPLIES_AT_ONCE,
    # The page would otherwise swallow a message sent while the stopped reply's last update is on its way.
    "trigger_mode": "multiple",
}

COPY = """async (text) => {
  try { await navigator.clipboard.writeText(text); return; } catch (refused) { /* only secure pages may */ }
  const area = Object.assign(document.createElement('textarea'), {value: text});
  document.body.appendChild(area);
  area.select();
  document.execCommand('copy');
  area.remove();
}"""
# What was typed and not sent outlives a reload, as when the server was started anew.
KEEP_TYPED = """(text) => {
  try { sessionStorage.setItem('redline-message', text ?? ''); } catch (refused) { /* not kept, then */ }
}"""
TYPED = """() => {
  const typed = document.querySelector('#message textarea')?.value ?? '';
  try { return typed || (sessionStorage.getItem('redline-message') ?? ''); } catch (refused) { return typed; }
}"""
# Where the focus went with a button that is gone; never away from a token one is reading about, and not on
# a touch screen, where it would bring the keyboard up.
TO_MESSAGE = """() => {
  const lost = document.activeElement === document.body || document.activeElement?.id === 'new';
  if (lost && matchMedia('(pointer: fine)').matches) {
    document.querySelector('#message textarea')?.focus({preventScroll: true});
  }
}"""


class Chat(Sheet):
    """The sheet with its handlers. ``mount`` connects it, ``open_page`` is its load handler."""

    def __init__(self, desk: Desk, panel: SettingsPanel):
        super().__init__(desk)
        self.panel = panel
        self._connect()

    def _connect(self) -> None:
        everything = [
            self.session, self.browser, self.message, self.welcome, self.redline, self.read, self.view,
            self.comparison, self.status, self.regenerate, self.plainly, self.copy, self.send, self.stop,
            self.figures, self.chart, self.panel.system,
            self.record.notice, self.record.confirm, self.record.doomed,
        ]  # fmt: skip
        self.everything = everything
        asking = [self.message, self.session, self.browser, self.panel.system, *self.panel.inputs]
        sent = gr.on([self.message.submit, self.send.click], self.ask, asking, everything, **REPLY)
        sent.then(None, js=TO_MESSAGE, **AT_ONCE)
        for button, prompt in self.examples:
            button.click(lambda prompt=prompt: prompt, None, self.message, **AT_ONCE).then(
                self.ask, asking, everything, **REPLY
            )
        self.regenerate.click(self.answer_again, asking[1:], everything, **REPLY)
        self.plainly.click(
            self.answer_plainly, [self.session, self.browser, self.panel.record], everything, **REPLY
        )
        self.stop.click(self.stop_reply, self.session, None, **AT_ONCE)
        self.view.input(self.switch, [self.view, self.session], everything, **AT_ONCE)
        self.copy.click(self.last_text, self.session, self.clipboard, **AT_ONCE).then(
            None, self.clipboard, None, js=COPY, **AT_ONCE
        )
        self.new.click(self.begin_anew, self.session, everything, **PRIVATE).then(
            None, js=TO_MESSAGE, **AT_ONCE
        )
        # What may have changed the loader's state, for whoever shows it.
        self.changing = [
            self.retry.click(self.load_again, None, None, **AT_ONCE),
            self.dismiss.click(self.desk.loader.dismiss, None, None, **AT_ONCE),
        ]
        self.no_offer.click(lambda: gr.update(visible=False), None, self.offer, **AT_ONCE)
        self.record.connect(self.session)
        self.record.yes.click(self.erase, [self.record.doomed, self.session], everything, **PRIVATE)

    def mount(self, page: gr.Blocks) -> None:
        """Connect what begins when the page is opened: ``session`` is "" until it has been."""
        page.load(self.open_page, self.browser, self.everything, concurrency_limit=None, **PRIVATE)
        page.load(None, None, self.message, js=TYPED, **AT_ONCE)
        self.message.change(None, self.message, None, js=KEEP_TYPED, **AT_ONCE)

    # ------------------------------------------------------------------ loading

    @property
    def watching(self) -> list[gr.components.Component]:
        """What ``show_loading`` changes."""
        return [
            self.loading, self.loading_actions, self.dismiss, self.message, self.send,
            self.offer, self.offered,
        ]  # fmt: skip

    def show_loading(self, state: LoadingState) -> dict:
        """The chat's part of a new state of the loader."""
        ready = state.engine is not None
        entry = choosing.offer(state) if self.desk.personal else None
        waiting = "The models are loading." if state.loading else "No models are loaded."
        return {
            self.loading: loading_strip(state),
            self.loading_actions: gr.update(visible=state.failed and (ready or not zero_gpu.active())),
            self.dismiss: gr.update(visible=ready),
            self.message: gr.update(placeholder="Ask something" if ready else waiting),
            self.send: gr.update(interactive=ready),
            self.offer: gr.update(visible=entry is not None),
            self.offered: offer_text(entry) if entry else "",
        }

    # ------------------------------------------------------------------ the conversation as a whole

    def open_page(self, request: gr.Request | None, browser: object) -> Iterator[dict]:
        """The browser's last conversation, or an empty one.

        A reply that is being written, as when the page is reloaded, is followed to its end: that of the
        page that was left, or of another that is open.
        """
        conversation = self._conversation("", browser)
        conversation.view = READ if _kept(browser).get("view") == READ else REDLINE
        yield {
            **self._opened(conversation),
            self.view: conversation.view,
            self.panel.system: conversation.system,
        }
        if conversation.current is not None and not conversation.current.done.is_set():
            following = self._follow(conversation, conversation.current)
            yield from self._while_shown(_page(request), conversation, following)

    def begin_anew(self, request: gr.Request | None, session: str) -> dict:
        return self._opened(self._instead_of(self._conversation(session), _page(request)))

    def _instead_of(self, old: Conversation, page: str) -> Conversation:
        """An empty conversation, shown and instructed as ``old`` was, to which the page turns.

        If it has turned away already, what it shows.
        """
        now = self.desk.shown(page, old)
        if now is not old:
            return now
        new = self.desk.new()
        new.view, new.system = old.view, old.system
        self.desk.turn(page, old, new)
        return new

    def switch(self, request: gr.Request | None, view: str, session: str) -> dict:
        """Show replies the other way, up to date. A reply in progress goes on in the view shown."""
        conversation = self.desk.shown(_page(request), self._conversation(session))
        conversation.view = READ if view == READ else REDLINE
        return {**self._views(conversation), self.browser: remembered(conversation)}

    def erase(self, request: gr.Request | None, doomed: str, session: str) -> dict:
        conversation = self._conversation(session)
        if doomed == "all" and self.desk.personal:
            self.desk.forget_everything()
        elif doomed:
            self.desk.forget(conversation)
        new = self._instead_of(conversation, _page(request))
        return {**self._opened(new), **self.record.answered()}

    def last_text(self, session: str) -> str:
        """The newest reply, exactly as it was written."""
        answer = self._conversation(session).current
        return answer.text if answer else ""

    def load_again(self) -> None:
        """Try the load that failed once more. Two clicks are one. On ZeroGPU it would never reach a GPU."""
        state = self.desk.loader.state
        if zero_gpu.active():
            return
        if state.failed and (state.engine is None or self.desk.personal):
            with contextlib.suppress(LoadingRefused):
                self.desk.loader.start(state.spec)

    def stop_reply(self, session: str) -> None:
        self._conversation(session).stop()

    # ------------------------------------------------------------------ replies

    def ask(
        self,
        request: gr.Request | None,
        message: str,
        session: str,
        browser: object,
        system: str,
        *panel: object,
    ) -> Iterator[dict]:
        """Answer a message. One that is empty or only spaces calls no model, nor does one that comes before
        the page's conversation is known: what opens it would cover the reply."""
        if not is_known(session, browser) or not message or not message.strip():
            yield {self.browser: browser}
            return
        conversation = self._conversation(session, browser)

        def begin() -> Answer:
            choices = settings_panel.read_settings(*panel)
            self.desk.set_system(conversation, system)
            return self.desk.ask(conversation, message, *choices.of_reply)

        writing = self._write(conversation, browser, begin, {self.message: ""}, self._making(panel))
        yield from self._while_shown(_page(request), conversation, writing)

    def answer_again(
        self, request: gr.Request | None, session: str, browser: object, system: str, *panel: object
    ) -> Iterator[dict]:
        """Answer the last message once more, with the settings as they are now."""
        conversation = self._conversation(session, browser)

        def begin() -> Answer:
            choices = settings_panel.read_settings(*panel)
            self.desk.set_system(conversation, system)
            return self.desk.again(conversation, *choices.of_reply)

        writing = self._write(conversation, browser, begin, {}, self._making(panel))
        yield from self._while_shown(_page(request), conversation, writing)

    def answer_plainly(
        self, request: gr.Request | None, session: str, browser: object, record: bool
    ) -> Iterator[dict]:
        """Repeat the last reply with the target alone and compare the two speeds."""
        conversation = self._conversation(session, browser)
        writing = self._write(
            conversation, browser, lambda: self.desk.again_plainly(conversation, record), {}
        )
        yield from self._while_shown(_page(request), conversation, writing)

    def _while_shown(
        self, page: str, conversation: Conversation, updates: Generator[dict, None, None]
    ) -> Iterator[dict]:
        """``updates`` for as long as the page shows the conversation.

        An update may be on its way while the page turns to another conversation, and come after what shows
        that one: so what the page shows now comes last, behind all of them. A conversation that another page
        deleted is left, too.
        """

        def left() -> bool:
            return conversation.deleted or self.desk.shown(page, conversation) is not conversation

        with contextlib.closing(updates):
            while not left():
                try:
                    update = next(updates)
                except StopIteration:
                    break
                if not left():
                    yield update
        if left():
            yield self._opened(self._instead_of(conversation, page))

    def _write(
        self,
        conversation: Conversation,
        browser: object,
        begin: Callable[[], Answer],
        first: dict,
        making: bool = False,
    ) -> Generator[dict, None, None]:
        """Begin a reply and show it until it ends. If it cannot be begun, say why and change nothing.

        ``making``: a drafter has to be made before, which takes a moment and is said.
        What the browser keeps is in every update: Gradio would overwrite it with an update's absence.
        """
        try:
            conversation.claim()
        except Refused as error:
            gr.Warning(str(error))
            yield {self.browser: browser}
            return
        try:
            if making:
                yield {self.status: _said(MAKING), self.browser: browser}
            answer = begin()
            yield {**self._opened(conversation), **first}
            yield from self._follow(conversation, answer)
        except (Refused, SettingsError, PromptError) as error:
            gr.Warning(str(error))
            yield {self.browser: browser, self.status: self._status(conversation.current)}
        finally:  # also when the tab was closed
            conversation.release()

    def _making(self, panel: tuple) -> bool:
        return self.desk.has_to_make(panel[self.panel.inputs.index(self.panel.drafter)])

    def _follow(self, conversation: Conversation, answer: Answer) -> Generator[dict, None, None]:
        """What changes on the page until the reply has ended."""
        kept = {self.browser: remembered(conversation)}
        seen, said, figures_at, ended = 0, "", 0.0, False
        plot_at = yielded_at = time.monotonic()
        while not ended:
            ended = answer.done.wait(TICK)
            update: dict = {}
            rounds, now = len(answer.rounds), time.monotonic()
            if ended:
                update = self._everything(conversation)
            elif rounds > seen:
                update |= self._shown_view(conversation)
                seen = rounds
                if now - figures_at >= FIGURES_EVERY:
                    figures_at = now
                    update[self.figures] = figures_value(answer)
                if now - plot_at >= PLOT_EVERY:
                    plot_at = now
                    update[self.chart] = rounds_value(answer.rounds)
            status = self._status(answer)
            if status != said:
                update[self.status] = said = status
            if update or now - yielded_at >= SIGN_OF_LIFE_EVERY:
                yielded_at = now
                yield {**update, **kept}

    # ------------------------------------------------------------------ what is shown

    def _conversation(self, session: str, browser: object = None) -> Conversation:
        """The page's; where the server was started anew and knows no session, the one its browser keeps."""
        kept = _kept(browser).get("conversation")
        return self.desk.open(session) or self.desk.open(kept) or self.desk.new()

    def _opened(self, conversation: Conversation) -> dict:
        """The page turned to this conversation."""
        return {**self._everything(conversation), self.browser: remembered(conversation)}

    def _everything(self, conversation: Conversation) -> dict:
        """The whole page for this conversation, but for what its browser keeps."""
        answer = conversation.current
        writing = answer is not None and not answer.done.is_set()
        ended = answer is not None and not writing
        plain = ended and bool(conversation.last.kept and conversation.last.kept.drafted)
        return {
            self.session: conversation.key,
            **self._views(conversation),
            self.comparison: comparison(conversation.last),
            self.status: self._status(answer),
            self.regenerate: gr.update(interactive=ended),
            self.plainly: gr.update(interactive=plain),
            self.copy: gr.update(interactive=answer is not None),
            self.send: gr.update(visible=not writing),
            self.stop: gr.update(visible=writing),
            self.figures: figures_value(answer),
            self.chart: rounds_value(answer.rounds if answer else ()),
            **self.record.shown(),
        }

    def _views(self, conversation: Conversation) -> dict:
        """Both views and the welcome: one of the three is visible."""
        empty, reading = not conversation.turns, conversation.view == READ
        shown = self._shown_view(conversation) if conversation.turns else {self.redline: "", self.read: []}
        return {
            self.welcome: gr.update(visible=empty),
            self.redline: gr.update(
                visible=True if not empty and not reading else "hidden", **value_of(shown, self.redline)
            ),
            self.read: gr.update(
                visible=True if not empty and reading else "hidden", **value_of(shown, self.read)
            ),
        }

    def _shown_view(self, conversation: Conversation) -> dict:
        if conversation.view == REDLINE:
            return {self.redline: conversation.drawn()}
        return {self.read: chat_messages(conversation)}

    def _status(self, answer: Answer | None) -> str:
        return _said("" if answer is None else status(answer))


MAKING = "Making the drafter: once."


def offer_text(entry: Entry) -> str:
    """One line about a pair that this machine's card could run."""
    needed = gigabytes(entry.needed_bytes("cuda"))
    return (
        f"<p>This computer's card has room for {as_html(entry.title)}: {needed} of memory, "
        f"{gigabytes(entry.download_bytes)} to download.</p>"
    )


def _page(request: gr.Request | None) -> str:
    """Which page asks; "" where none does."""
    return (request and request.session_hash) or ""


def _kept(browser: object) -> dict:
    """What a browser kept (``remembered``); it may hold anything."""
    return browser if isinstance(browser, dict) else {}


def is_known(session: str, browser: object) -> bool:
    """Whether a page that sends these has a conversation, be it to be opened yet."""
    return bool(session or _kept(browser).get("conversation"))


def remembered(conversation: Conversation) -> dict:
    """What the browser keeps: the key of its conversation and how it likes to read."""
    return {"conversation": conversation.key, "view": conversation.view}


def value_of(shown: dict, component: Any) -> dict:
    return {"value": shown[component]} if component in shown else {}


def _said(sentence: str) -> str:
    return f"<p role='status'>{as_html(sentence)}</p>" if sentence else ""


def status(answer: Answer) -> str:
    """Where the reply stands, in one sentence."""
    if not answer.done.is_set():
        if answer.cancel.is_set():
            return "Stopping."
        if answer.rounds:
            return "Writing."
        if answer.measuring:
            return "Measuring what a pass with this drafter costs, to choose K by: once."
        if answer.had_to_wait and answer.reused_tokens is None:  # its turn has not come
            return "Waiting for another reply to end."
        return "Reading the prompt."
    if answer.error or (answer.reply and answer.reply.error):
        return answer.error or answer.reply.error
    sentences = []
    if answer.finish_reason in ("cancelled", "length", "interrupted"):
        sentences.append(f"Ended: {ENDINGS[answer.finish_reason]}.")
    prompt = answer.prompt
    if prompt and prompt.dropped_messages:
        sentences.append(
            f"The oldest {prompt.dropped_messages} messages no longer fit the context and were left out: "
            "the system prompt and the newest turns stay."
        )
    return " ".join((*sentences, *(prompt.notes if prompt else ())))
