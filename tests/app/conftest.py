"""What browser tests share: one Chromium a module, one port, and a page served with a scripted engine.

``tests.app.driver`` is imported by the fixtures that need it: it imports Gradio, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.app.toy import ToyEngine
from tests.browser import ARGS, keep_warm

if TYPE_CHECKING:
    from tests.app.driver import Served, Tab

PERMISSIONS = ["clipboard-read", "clipboard-write"]


@pytest.fixture(scope="session", autouse=True)
def routes_once() -> Iterator[None]:
    """Gradio makes a page's routes four times, 0.2 s each, and serves the last ones: only those are made."""
    from gradio.routes import App

    make = App.create_app

    def create_app(blocks, *arguments, **options):
        if not arguments and options == {"mcp_server": False}:  # by __init__, __exit__ or queue
            return None
        return make(blocks, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(App, "create_app", staticmethod(create_app))
        yield


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
def kept(browser) -> Iterator[list[tuple[Any, Any]]]:
    """Browsers that outlive their tests, with Gradio's scripts, and the page that keeps each one warm.

    The first is of the test that needs one; the second is for who comes beside it.
    """
    made: list[tuple[Any, Any]] = []
    yield made
    for context, _ in made:
        context.close()


@pytest.fixture
def tab(browser, kept) -> Iterator[Callable[..., Tab]]:
    """Opens a browser of its own each time it is called; all are emptied afterwards."""
    from tests.app.driver import Tab

    tabs: list[Tab] = []

    def open_tab(url: str, **options) -> Tab:
        if len(tabs) == len(kept):
            context = browser.new_context(permissions=PERMISSIONS)
            kept.append((context, keep_warm(context, url)))
        context, _ = kept[len(tabs)]
        tabs.append(Tab(context, url, **options))
        return tabs[-1]

    yield open_tab
    for _, (context, warm) in zip(tabs, kept, strict=False):
        for page in context.pages:
            page.evaluate("localStorage.clear()")  # of the page's own address
            if page is not warm:
                page.close()
    for one in tabs:
        assert one.faults == []
