"""CSV files of the record, handed to the browser: a hidden button that takes each file, and a script's click.

Knows the record's exports by name; which of them may be asked for, and by whom, is their buttons' matter.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import gradio as gr

from app.widgets.events import AT_ONCE, PRIVATE
from core.export import ExportError, write_csv
from core.record.store import Store

# How a file may be written: what stands between cells and in decimals (``core.record.cells``).
FORMS = {
    "Commas, 0.5": ("comma", "point"),
    "Semicolons, 0,5": ("semicolon", "comma"),
    "Semicolons, 0.5": ("semicolon", "point"),
    "Tabs, 0.5": ("tab", "point"),
    "Tabs, 0,5": ("tab", "comma"),
}
USUAL, *_ = FORMS


class Exports:
    """Lays out the choice of a form and the hidden button ``elem_id``.

    Its files lie in a folder that goes when the process ends.
    """

    def __init__(self, elem_id: str):
        self._folder = tempfile.TemporaryDirectory(prefix="redline-exports-")
        find = "document.querySelector('#{}')".format
        self._click = f"() => {{ ({find(elem_id + ' a')} || {find(elem_id)}).click(); }}"
        self.form = gr.Dropdown(
            list(FORMS),
            value=USUAL,
            label="CSV with",
            info="Choose what your spreadsheet expects.",
            filterable=False,
            scale=0,
            min_width=160,
            elem_id=f"{elem_id}-form",
        )
        self._file = gr.DownloadButton("File", visible="hidden", elem_id=elem_id)

    def connect(
        self, button: gr.Button, make: Callable[..., str], inputs: Sequence[gr.components.Component] = ()
    ) -> None:
        """At a press of ``button`` the browser downloads the file that ``make(*inputs, form)`` names."""
        button.click(make, [*inputs, self.form], self._file, **PRIVATE).success(
            None, js=self._click, **AT_ONCE
        )

    def write(self, store: Store, what: str, conversation: str | None = None, form: str = USUAL) -> str:
        """The path of one of ``core.export.COLUMNS``, of one conversation or of all, in one of ``FORMS``.

        Raises gradio.Error with one sentence, and leaves nothing behind then.
        """
        folder = Path(self._folder.name) / uuid.uuid4().hex
        folder.mkdir()
        delimiter, decimal = FORMS[form]
        end = "tsv" if delimiter == "tab" else "csv"
        path = folder / f"redline-{what}-{time.strftime('%Y%m%d-%H%M%S')}.{end}"
        try:
            write_csv(store, what, path, conversation, delimiter=delimiter, decimal=decimal)
        except ExportError as error:
            with contextlib.suppress(OSError):
                folder.rmdir()
            raise gr.Error(str(error), print_exception=False) from None
        return str(path)
