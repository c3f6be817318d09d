"""A page with nothing but the tab of domains, over a record of invented replies: to work on its looks.

``python -m tests.app.domains_page [PORT]`` serves it on 127.0.0.1.
"""

from __future__ import annotations

import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import gradio as gr

from app.chat.desk import Desk
from app.page import ASSETS, theme
from app.serving.loading import Loader
from app.tabs.domains_tab import DomainsTab
from app.widgets.charts import PLOTLY_SCRIPT
from core.record.store import Store
from core.records import Round, Settings
from tests.core.builders import PAIR, record, round_of

RATES = {"code": 0.82, "prose": 0.55, "maths": 0.7, "structured": 0.88}
TOY = replace(PAIR, target="Toy-135M", draft="Toy-draft")


def invented_rounds(
    rng: random.Random, domain: str, count: int, k: int, index: int, emitted: int
) -> list[Round]:
    """Rounds whose drafts are kept at a rate of the domain, which differs a little from reply to reply."""
    rate, rounds = min(0.97, max(0.05, rng.gauss(RATES[domain], 0.08))), []
    for _ in range(count):
        kept = next((n for n in range(k) if rng.random() > rate), k)
        letters = "a" * kept + ("b" if kept == k else "x" + "d" * (k - kept - 1) + "r") if k else "p"
        made = round_of(
            letters,
            index + len(rounds),
            emitted,
            domain=domain,
            draft_seconds=0.006 * k * rng.uniform(0.9, 1.1),
            target_seconds=0.05 * rng.uniform(0.9, 1.1),
            overhead_seconds=0.002,
        )
        overlaps = [t.overlap and min(1.0, max(0.0, rng.gauss(rate, 0.1))) for t in made.tokens]
        tokens = zip(made.tokens, overlaps, strict=True)
        rounds.append(replace(made, tokens=tuple(replace(t, overlap=overlap) for t, overlap in tokens)))
        emitted += made.emitted
    return rounds


def fill(store: Store, replies: int = 16, seed: int = 1) -> None:
    """Replies of prose and one other domain each, with K = 3 and, half as many, plainly."""
    rng = random.Random(seed)
    for number in range(replies):
        for k in (3, 0)[: 2 if number % 2 else 1]:
            other = ("code", "maths", "code", "structured")[number % 4] if number % 9 else "code"
            first = invented_rounds(rng, "prose", rng.randrange(4, 30), k, 0, 0)
            emitted = sum(made.emitted for made in first)
            rest = invented_rounds(rng, other, rng.randrange(6, 40), k, len(first), emitted)
            settings = Settings(seed=number, num_draft_tokens=k, top_p=0.95 if number % 3 else 1.0)
            record(store, rounds=first + rest, settings=settings, pair=TOY)


def page(desk: Desk) -> gr.Blocks:
    """The tab alone; call it where ``launch`` follows."""
    with gr.Blocks(title="Domains", analytics_enabled=False) as blocks:
        with gr.Tabs():
            with gr.Tab("First"):
                gr.HTML("<p>The comparison is in the other tab.</p>")
            with gr.Tab("Domains"):
                tab = DomainsTab(desk)
        tab.mount(blocks)
    return blocks


def launch(blocks: gr.Blocks, port: int | None, *, wait: bool = False) -> str:
    """Serves it as the page is served; returns its address."""
    gr.set_static_paths([PLOTLY_SCRIPT])
    _, url, _ = blocks.queue().launch(
        server_name="127.0.0.1",
        server_port=port,
        prevent_thread_lock=not wait,
        quiet=not wait,
        run_history=False,
        footer_links=[],
        theme=theme(),
        css_paths=[ASSETS / "page.css", ASSETS / "domains.css"],
    )
    return url


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "record.db")
        fill(store)
        port = int(sys.argv[1]) if sys.argv[1:] else None
        launch(page(Desk(Loader(lambda progress: None), store)), port, wait=True)
