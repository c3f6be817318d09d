"""The chat's components and where they stand: the sheet on which one reads and writes, and its margin.

Lays out and connects nothing: the handlers are in ``app.chat.chat``.
"""

from __future__ import annotations

import gradio as gr

from app.chat.desk import Desk
from app.chat.figures import FiguresPanel
from app.chat.record_panel import RecordPanel
from app.chat.token_view import RedlineView
from app.serving import zero_gpu
from app.widgets.charts import RoundsChart
from app.widgets.display import LATEX_DELIMITERS

READ, REDLINE = "read", "redline"

EXAMPLES = (
    ("code", "Write a Python function that returns the first n prime numbers."),
    ("prose", "Write a short letter from a lighthouse keeper to a friend on land."),
    ("maths", "Explain step by step how to solve x² − 5x + 6 = 0."),
)

WELCOME = """<div class="welcome-text">
<p class="welcome-lead">A small model writes ahead. A big one edits.</p>
<p>Ask something and read the manuscript with its corrections: which words were drafted and kept, which were
struck out, and what the editor wrote instead. Unless you choose a rule marked as not exact, what remains is
distributed exactly as if the big model had written alone.</p>
</div>"""


class Sheet:
    """The components, laid out in the current block."""

    def __init__(self, desk: Desk):
        self.desk = desk
        self._lay_out()

    def _lay_out(self) -> None:
        self.session = gr.State("")
        # The secret only has to be the same after a restart: the key it hides is the browser's own.
        self.browser = gr.BrowserState({}, storage_key="redline", secret="redline-conversation")
        with gr.Row(elem_id="desk"):
            with gr.Column(elem_id="sheet-column", min_width=320, scale=3):
                self._lay_out_sheet()
            with gr.Column(elem_id="margin-column", min_width=260, scale=1):
                self._lay_out_margin()

    def _lay_out_sheet(self) -> None:
        with gr.Column(elem_id="sheet"):
            with gr.Row(elem_id="sheet-head"):
                self.new = gr.Button("New conversation", size="sm", elem_id="new", min_width=80)
                self.view = gr.Radio(
                    [("Read", READ), ("Redline", REDLINE)],
                    value=REDLINE,
                    label="How replies are shown",
                    show_label=False,
                    container=False,
                    elem_id="view",
                    elem_classes="segmented",
                    min_width=80,
                )
            with gr.Column(elem_id="welcome") as self.welcome:
                gr.HTML(WELCOME, apply_default_css=False)
                with gr.Row(elem_id="examples"):
                    self.examples = [
                        (
                            gr.Button(
                                prompt, elem_id=f"example-{name}", elem_classes="example", min_width=150
                            ),
                            prompt,
                        )
                        for name, prompt in EXAMPLES
                    ]
            self.redline = RedlineView(details=self.desk.details, elem_id="redline", visible="hidden")
            self.read = gr.Chatbot(
                elem_id="read",
                show_label=False,
                container=False,
                layout="panel",
                height="100%",
                buttons=[],
                feedback_options=None,
                latex_delimiters=LATEX_DELIMITERS,
                sanitize_html=True,
                allow_tags=False,
                group_consecutive_messages=False,
                allow_file_downloads=False,
                visible="hidden",
            )
        self.comparison = gr.HTML("", elem_id="comparison", apply_default_css=False)
        with gr.Row(elem_id="actions"):
            self.status = gr.HTML("", elem_id="status", apply_default_css=False)
            self.regenerate = gr.Button(
                "Regenerate", size="sm", interactive=False, elem_id="regenerate", min_width=60
            )
            self.plainly = gr.Button(
                "Answer again plainly", size="sm", interactive=False, elem_id="plainly", min_width=60
            )
            self.copy = gr.Button("Copy", size="sm", interactive=False, elem_id="copy", min_width=60)
            self.clipboard = gr.Textbox(visible="hidden", elem_id="clipboard", label="Text to copy")
        self.loading = gr.HTML("", elem_id="loading", apply_default_css=False)
        with gr.Row(visible=False, elem_id="loading-actions") as self.loading_actions:
            self.retry = gr.Button(
                "Retry", size="sm", elem_id="retry", min_width=60, visible=not zero_gpu.active()
            )
            self.dismiss = gr.Button("Dismiss", size="sm", elem_id="dismiss", min_width=60)
        with gr.Row(visible=False, elem_id="offer") as self.offer:
            self.offered = gr.HTML("", apply_default_css=False)
            self.see_offer = gr.Button("See it under Models", size="sm", elem_id="see-offer", min_width=60)
            self.no_offer = gr.Button("Not now", size="sm", elem_id="no-offer", min_width=60)
        with gr.Row(elem_id="composer", equal_height=True):
            self.message = gr.Textbox(
                label="Message",
                show_label=False,
                container=False,
                placeholder="The models are loading.",
                lines=1,
                max_lines=8,
                autofocus=True,
                elem_id="message",
                scale=8,
            )
            self.send = gr.Button(
                "Send", variant="primary", interactive=False, elem_id="send", min_width=84, scale=0
            )
            self.stop = gr.Button(
                "Stop", variant="stop", visible=False, elem_id="stop", min_width=84, scale=0
            )

    def _lay_out_margin(self) -> None:
        self.figures = FiguresPanel(elem_id="figures")
        self.chart = RoundsChart(elem_id="chart")
        self.record = RecordPanel(self.desk)
