"""The record's part of the margin: exports, deletions, and what the database has to say.

Lays itself out in the current block. What is deleted also leaves the page, so the deletion's own handler is
the chat's; here it is only asked for and confirmed.
"""

from __future__ import annotations

from collections.abc import Callable

import gradio as gr

from app.chat.desk import Desk
from app.widgets.display import as_html
from app.widgets.events import AT_ONCE
from app.widgets.exports import Exports

TITLE = "<h2 class='margin-title'>The record</h2>"

EXPORTS = (
    ("sessions", "Session stats (CSV)"),
    ("replies", "Replies"),
    ("rounds", "Rounds"),
    ("tokens", "Tokens"),
)


class RecordPanel:
    """``doomed`` holds what the person is asked about, "one" or "all"; ``yes`` is the button that agrees."""

    def __init__(self, desk: Desk):
        self.desk = desk
        self._lay_out()

    def _lay_out(self) -> None:
        self.notice = gr.HTML(TITLE, elem_id="notice", apply_default_css=False)
        self.scope = gr.Radio(
            [("This conversation", "one"), ("Everything", "all")],
            value="one",
            label="What to export",
            show_label=False,
            container=False,
            visible=self.desk.personal,
            elem_id="export-scope",
            elem_classes="segmented",
        )
        with gr.Row(elem_id="exports"):
            self.exports = [
                (gr.Button(label, size="sm", elem_id=f"export-{what}", min_width=60), what)
                for what, label in EXPORTS
            ]
        self._files = Exports("export-file")
        with gr.Row(elem_id="deletions"):
            self.delete = gr.Button("Delete conversation", size="sm", elem_id="delete", min_width=60)
            self.delete_all = gr.Button(
                "Delete everything", size="sm", elem_id="delete-all", min_width=60, visible=self.desk.personal
            )
        self.doomed = gr.State("")
        with gr.Row(visible=False, elem_id="confirm") as self.confirm:
            self.question = gr.HTML("", apply_default_css=False)
            self.yes = gr.Button("Delete", variant="stop", size="sm", elem_id="confirm-yes", min_width=60)
            self.no = gr.Button("Keep", size="sm", elem_id="confirm-no", min_width=60)

    def connect(self, session: gr.State) -> None:
        """Connect all but the deletion itself. ``session`` holds the key of the page's conversation."""
        for button, what in self.exports:
            self._files.connect(button, self._exporter(what), [session, self.scope])
        asked = [self.doomed, self.question, self.confirm]
        self.delete.click(lambda: ask_to_delete("one"), None, asked, **AT_ONCE)
        self.delete_all.click(lambda: ask_to_delete("all"), None, asked, **AT_ONCE)
        self.no.click(lambda: ask_to_delete(""), None, asked, **AT_ONCE)

    def shown(self) -> dict:
        """The panel as it is to be now."""
        sentences = filter(None, (*self.desk.notices, self.desk.problem))
        said = (f"<p class='notice' role='status'>{as_html(sentence)}</p>" for sentence in sentences)
        return {self.notice: TITLE + "".join(said)}

    def answered(self) -> dict:
        """The question about a deletion, put away."""
        return {self.doomed: "", self.confirm: gr.update(visible=False)}

    def _exporter(self, what: str) -> Callable[[str, str, str], str]:
        def export(session: str, scope: str, form: str) -> str:
            conversation = self.desk.open(session)
            everything = scope == "all" and self.desk.personal
            if not everything and (conversation is None or not conversation.recorded):
                raise gr.Error("Nothing of this conversation is recorded yet.", print_exception=False)
            return self._files.write(self.desk.store, what, None if everything else conversation.key, form)

        return export


def ask_to_delete(what: str) -> tuple:
    """What is to be deleted, the question about it, and whether to ask it."""
    question = {
        "one": "Delete this conversation and its record?",
        "all": "Delete every conversation and the whole record?",
    }.get(what, "")
    return what, f"<p role='alert'>{question}</p>" if question else "", gr.update(visible=bool(question))
