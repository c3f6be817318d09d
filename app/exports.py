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

from app.events import AT_ONCE, PRIVATE
from core.export import ExportError, write_csv
from core.store import Store


class Exports:
    """Lays out the hidden button ``elem_id``. Its files lie in a folder that goes when the process ends."""

    def __init__(self, elem_id: str):
        self._folder = tempfile.TemporaryDirectory(prefix="redline-exports-")
        find = "document.querySelector('#{}')".format
        self._click = f"() => {{ ({find(elem_id + ' a')} || {find(elem_id)}).click(); }}"
        self._file = gr.DownloadButton("File", visible="hidden", elem_id=elem_id)

    def connect(
        self, button: gr.Button, make: Callable[..., str], inputs: Sequence[gr.components.Component] = ()
    ) -> None:
        """At a press of ``button`` the browser downloads the file whose path ``make(*inputs)`` returns."""
        button.click(make, list(inputs), self._file, **PRIVATE).success(None, js=self._click, **AT_ONCE)

    def write(self, store: Store, what: str, conversation: str | None = None) -> str:
        """The path of one of ``core.export.COLUMNS``, of one conversation or of all.

        Raises gradio.Error with one sentence, and leaves nothing behind then.
        """
        folder = Path(self._folder.name) / uuid.uuid4().hex
        folder.mkdir()
        path = folder / f"redline-{what}-{time.strftime('%Y%m%d-%H%M%S')}.csv"
        try:
            write_csv(store, what, path, conversation)
        except ExportError as error:
            with contextlib.suppress(OSError):
                folder.rmdir()
            raise gr.Error(str(error), print_exception=False) from None
        return str(path)
