"""How every browser test starts Chromium, and how a process of its pages outlives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--process-per-site",  # pages of one context and address share a process: see keep_warm
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # blocking by route would switch caching off
]


def keep_warm(context: BrowserContext, url: str) -> Page:
    """Opens a page of the server at ``url`` that runs nothing, and stays open for as long as its context.

    Without it a page's process would end with the page, and the next one would compile all of Gradio's and
    Plotly's scripts anew, which takes most of a short test's time.
    """
    page = context.new_page()
    page.goto(f"{url}favicon.ico")
    return page
