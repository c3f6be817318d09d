"""The app as a person runs it: ``python app.py`` in a process of its own, the embedded pair, a browser.

Outside requests are blocked by the browser's resolver and, in the app's process, at the socket; both
say what was attempted, and nothing may be.
"""

from __future__ import annotations

import csv
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.record.store import Store
from core.records import Settings
from tests.app.test_launch import busy_port
from tests.browser import ARGS

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect

ROOT = Path(__file__).resolve().parents[2]
SLOWLY = 180_000  # ms: an upper bound for a busy machine; nothing waits that long when it is done

# Put before the app in its own process: refuses every address but this machine's, and says so.
GUARD = """
import ipaddress, runpy, socket, sys

def refuse(host):
    if host in (None, "", "localhost"):
        return
    try:
        local = ipaddress.ip_address(str(host)).is_loopback or ipaddress.ip_address(str(host)).is_unspecified
    except ValueError:
        local = False
    if not local:
        print(f"OUTSIDE {host}", file=sys.stderr, flush=True)
        raise OSError(f"outside network is closed: {host}")

def guarded(name):
    original = getattr(socket.socket, name)
    def method(self, *arguments):
        if self.family in (socket.AF_INET, socket.AF_INET6):
            refuse(arguments[-1][0])
        return original(self, *arguments)
    setattr(socket.socket, name, method)

for name in ("connect", "connect_ex", "sendto"):
    guarded(name)
lookup = socket.getaddrinfo
def guarded_lookup(host, *arguments, **named):
    refuse(host)
    return lookup(host, *arguments, **named)
socket.getaddrinfo = guarded_lookup
sys.argv = ["app.py", *sys.argv[1:]]
sys.path.insert(0, "")
runpy.run_path("app.py", run_name="__main__")
"""


class App:
    """The running app: where it is, its database, and what it has printed."""

    def __init__(self, url: str, db: Path, log: Path):
        self.url, self.db, self.log = url, db, log

    def query(self, sql: str, *values: object) -> list[tuple]:
        with sqlite3.connect(self.db) as connection:
            return connection.execute(sql, values).fetchall()


@pytest.fixture
def app(tmp_path: Path, embedded_home: Path, embedded_folder: Path) -> Iterator[App]:
    db, log = tmp_path / "redline.db", tmp_path / "app.log"
    with busy_port() as port:
        pass
    environment = {**os.environ, "REDLINE_HOME": str(embedded_home), "HTTP_PROXY": "http://127.0.0.1:9"}
    for name in ("NO_PROXY", "no_proxy", "GRADIO_SERVER_PORT", "GRADIO_SERVER_NAME"):
        environment.pop(name, None)
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", GUARD, "--port", str(port), "--db", str(db)],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 120
        while "Redline is at" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield App(f"http://127.0.0.1:{port}/", db, log)
    finally:
        process.terminate()
        process.wait(20)
    assert "OUTSIDE" not in log.read_text(), log.read_text()
    assert "Traceback" not in log.read_text(), log.read_text()


@pytest.fixture
def context(chromium: str) -> Iterator[sync_api.BrowserContext]:
    outside: list[str] = []

    def watch(request) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:")):
            outside.append(request.url)

    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGS)
        context = browser.new_context()
        context.set_default_timeout(SLOWLY)
        context.on("request", watch)
        yield context
        browser.close()
    assert outside == []


def open_page(context: sync_api.BrowserContext, url: str) -> sync_api.Page:
    """The page, as soon as the server that was just started answers."""
    page = context.new_page()
    for _ in range(600):
        try:
            page.goto(url)
            return page
        except sync_api.Error as error:
            assert "ERR_CONNECTION_REFUSED" in str(error)
            time.sleep(0.2)
    raise AssertionError("the server never answered")


def test_a_person_uses_redline(app: App, context: sync_api.BrowserContext, tmp_path: Path):
    expect.set_options(timeout=SLOWLY)
    page = open_page(context, app.url)
    message = page.locator("#message textarea")
    # The page is up before the pair is loaded, and says so until it is.
    expect(message).to_have_attribute("placeholder", re.compile("loading|Ask"))
    expect(message).to_have_attribute("placeholder", "Ask something")
    expect(page.locator(".masthead .pair")).to_contain_text("SmolLM2-135M-Instruct")
    page.click("#open-settings")
    page.fill("#max-new-tokens :is(input, textarea)", "96")
    page.fill("#seed :is(input, textarea)", "3")
    page.click("#settings .toggle-button")

    # Ask for a Python function and see tokens appear while it is written.
    message.fill("Write a Python function that adds two numbers.")
    message.press("Enter")
    tokens = page.locator("#redline .rl-view .rl-t")
    tokens.first.wait_for()
    expect(page.locator("#stop")).to_be_visible()
    early = tokens.count()
    expect(page.locator("#regenerate")).to_be_enabled()
    assert tokens.count() > early > 0
    (emitted,) = app.query("SELECT emitted FROM replies")[0]
    assert emitted <= 96

    # Open a token's card with the keyboard alone.
    view = page.locator("#redline .rl-view")
    view.focus()
    page.keyboard.press("ArrowRight")
    card = page.locator(".rl-card")
    expect(card.locator(".rl-why")).to_be_visible()
    expect(card.locator(".rl-figures")).to_contain_text("overlap")
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()

    # Stop a second reply: what was said is kept.
    page.click("#open-settings")
    page.fill("#max-new-tokens :is(input, textarea)", "2000")
    page.click("#settings .toggle-button")
    message.fill("Write a very long story about a lighthouse.")
    message.press("Enter")
    page.locator("#redline .rl-reply").nth(1).locator(".rl-t").first.wait_for()
    page.click("#stop")
    expect(page.locator("[data-figure=finish]")).to_have_text("stopped")
    (text, reason) = app.query("SELECT text, finish_reason FROM replies ORDER BY created")[1]
    assert text and reason == "cancelled"

    # Ask again at once.
    page.click("#open-settings")
    page.fill("#max-new-tokens :is(input, textarea)", "48")
    page.click("#settings .toggle-button")
    message.fill("Say hello.")
    message.press("Enter")
    page.locator("#redline .rl-reply").nth(2).locator(".rl-t").first.wait_for()
    expect(page.locator("#regenerate")).to_be_enabled()

    # The same once more, plainly: the measured speeds stand side by side.
    page.click("#plainly")
    expect(page.locator(".comparison")).to_contain_text("tokens/s")
    kinds = app.query("SELECT kind, num_draft_tokens, seed, tokens_per_second FROM replies ORDER BY created")
    assert [kind for kind, *_ in kinds] == ["first", "first", "first", "plain"]
    (_, k, seed, speculative), (_, plain_k, plain_seed, plain) = kinds[2:]
    assert (k, plain_k) == (Settings().num_draft_tokens, 0) and seed == plain_seed == 3
    expect(page.locator(".comparison")).to_contain_text(f"{speculative / plain:.2f}×")

    # After a reload everything is there again.
    drawn, rounds = tokens.count(), page.locator("[data-figure=rounds]").inner_text()
    page.reload()
    expect(tokens).to_have_count(drawn)
    expect(page.locator("[data-figure=rounds]")).to_have_text(rounds)

    # The session's figures as a file, and their identities against the database.
    with page.expect_download() as download:
        page.click("#export-sessions")
    path = tmp_path / "sessions.csv"
    download.value.save_as(path)
    check_export(path, app)


def check_export(path: Path, app: App) -> None:
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    counts = (
        "drafted",
        "accepted",
        "rejected",
        "discarded",
        "emitted",
        "resampled",
        "bonus",
        "plain",
        "rounds",
    )
    for row in rows:
        n = {name: int(row[name]) for name in counts}
        assert n["drafted"] == n["accepted"] + n["rejected"] + n["discarded"]
        assert n["emitted"] == n["accepted"] + n["resampled"] + n["bonus"] + n["plain"]
    fates = dict(app.query("SELECT fate, count(*) FROM tokens GROUP BY fate"))
    (session,) = [row for row in rows if row["row"] == "session"]
    for fate in ("accepted", "rejected", "discarded", "resampled", "bonus", "plain"):
        assert int(session[fate]) == fates.get(fate, 0)
    assert int(session["rounds"]) == app.query("SELECT count(*) FROM rounds")[0][0]
    assert len([row for row in rows if row["row"] == "reply"]) == 4
    # What was written is what can be read back: the ids' texts join to the reply's text.
    for (conversation,) in app.query("SELECT id FROM conversations"):
        for message in Store(app.db).conversation(conversation).messages:
            for reply in message.replies:
                pieces = [token.text for round in reply.rounds for token in round.tokens if token.emitted]
                assert "".join(pieces) + reply.tail == reply.text
