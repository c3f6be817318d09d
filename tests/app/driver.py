"""A served page and a browser's tab in it, for the tests that need both. The fixtures are in ``conftest``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import BrowserContext, ViewportSize, expect

from app.chat.desk import Desk
from app.page import build, launch
from app.serving.loading import Loader
from core.record.store import Store
from tests.app.test_launch import busy_port
from tests.app.toy import ToyEngine

SLOWLY = 20_000  # ms: an upper bound for a busy machine; nothing waits that long when it is done
expect.set_options(timeout=SLOWLY)

# The text of the emitted tokens, without the chips that name tokens of no text.
DRAWN = """() => {
  const kept = '#redline .rl-view :is(.rl-accepted, .rl-resampled, .rl-bonus, .rl-plain)';
  return [...document.querySelectorAll(kept)].map(token => {
    const copy = token.cloneNode(true);
    copy.querySelectorAll('.rl-chip').forEach(chip => chip.remove());
    return copy.textContent;
  }).join('');
}"""


class Served:
    """A served page: its address, its desk, and the engine that answers."""

    def __init__(self, load: Callable, db: Path, personal: bool, port: int):
        loader = Loader(load)
        loader.start()
        self.desk = Desk(loader, Store(db), personal)
        self.page = build(self.desk)
        launch(self.page, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{port}/"

    @property
    def engine(self) -> ToyEngine:
        return self.desk.engine


def free_port() -> int:
    with busy_port() as port:
        pass  # free again, and nobody else's for a while
    return port


class Tab:
    """A browser of one tab; ``faults`` collects what must not be: dialogs, errors, outside requests."""

    def __init__(self, context: BrowserContext, url: str, viewport: ViewportSize | None = None):
        self.faults: list[str] = []
        self.context = context
        self.page = self.context.new_page()
        self.page.set_default_timeout(SLOWLY)
        if viewport:
            self.page.set_viewport_size(viewport)
        self.page.on("dialog", lambda dialog: (self.faults.append(dialog.message), dialog.dismiss()))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", self._request)
        self.page.goto(url)

    def _request(self, request) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:")):
            self.faults.append(request.url)

    def ready(self) -> Tab:
        expect(self.page.locator("#message textarea")).to_have_attribute("placeholder", "Ask something")
        return self

    def send(self, text: str) -> None:
        self.page.fill("#message textarea", text)
        self.page.keyboard.press("Enter")

    def ask(self, text: str) -> None:
        self.send(text)
        expect(self.page.locator("#message textarea")).to_have_value("")
        self.ended()

    def ended(self) -> None:
        expect(self.page.locator("#regenerate")).to_be_enabled()

    def view(self, name: str) -> None:
        self.page.locator("#view label", has_text=name).click()
        expect(self.page.locator("#read" if name == "Read" else "#redline")).to_be_visible()

    def drawn(self) -> str:
        return self.page.evaluate(DRAWN)

    def bot(self):
        return self.page.locator('#read [data-testid="bot"]')

    def user(self):
        return self.page.locator('#read [data-testid="user"]')
