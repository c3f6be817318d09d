"""What browser tests share: one Chromium a module, one port, and a page served with a scripted engine.

``tests.app.driver`` is imported by the fixtures that need it: it imports Gradio, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.app.toy import ToyEngine
from tests.browser import ARGS

if TYPE_CHECKING:
    from tests.app.driver import Served, Tab

PERMISSIONS = ["clipboard-read", "clipboard-write"]


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def port() -> int:
    """One port for all tests: at another address the browser would fetch Gradio's scripts anew."""
    from tests.app.driver import free_port

    return free_port()


@pytest.fixture
def serve(tmp_path: Path, port: int) -> Iterator[Callable[..., Served]]:
    from tests.app.driver import Served, free_port

    served: list[Served] = []

    def start(script="", *, load: Callable | None = None, personal: bool = True, **options) -> Served:
        engine = ToyEngine(script, **options)
        at = free_port() if served else port
        served.append(Served(load or (lambda spec, progress: engine), tmp_path / "record.db", personal, at))
        return served[-1]

    yield start
    for one in served:
        if one.engine and one.engine.gate:
            one.engine.gate.set()
        one.page.close(verbose=False)


@pytest.fixture(scope="module")
def usual(browser) -> Iterator[Any]:
    """The browser that most tests use: it keeps Gradio's scripts from one test to the next."""
    with browser.new_context(permissions=PERMISSIONS) as context:
        yield context


@pytest.fixture
def tab(browser, usual) -> Iterator[Callable[..., Tab]]:
    """Opens a browser: the usual one, emptied afterwards, and others for whoever comes beside it."""
    from tests.app.driver import Tab

    tabs: list[Tab] = []

    def open_tab(url: str, **options) -> Tab:
        own = tabs or options
        context = browser.new_context(permissions=PERMISSIONS, **options) if own else usual
        tabs.append(Tab(context, url))
        return tabs[-1]

    yield open_tab
    for one in tabs:
        if one.context is usual:
            for page in usual.pages:
                page.evaluate("localStorage.clear()")
                page.close()
        else:
            one.context.close()
        assert one.faults == []
