"""Puts the page together and serves it. Knows the parts by name and where they go, nothing of what they do.

Nothing on the page is fetched from elsewhere: fonts are the system's, scripts are this process's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import gradio as gr

from app.charts import PLOTLY_SCRIPT
from app.chat import Chat
from app.conversation import Desk
from app.loading import Loader, Progress
from core.store import Store

if TYPE_CHECKING:
    from app.launch import Options

ASSETS = Path(__file__).resolve().parent.parent / "assets"

SERIF = [
    "Charter",
    "Iowan Old Style",
    "Palatino Linotype",
    "Source Serif 4",
    "Georgia",
    "DejaVu Serif",
    "serif",
]
SANS = ["ui-sans-serif", "system-ui", "Segoe UI", "Helvetica Neue", "Arial", "sans-serif"]
MONO = ["ui-monospace", "SF Mono", "Cascadia Mono", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"]

PAPER = gr.themes.Color(
    name="paper",
    c50="#fdfbf7", c100="#f6f2e9", c200="#e9e3d5", c300="#d6cebc", c400="#a79f8e", c500="#7c7566",
    c600="#5e584c", c700="#453f36", c800="#2c2822", c900="#201d19", c950="#161412",
)  # fmt: skip
RED = gr.themes.Color(
    name="red-pencil",
    c50="#fdf3f1", c100="#fbe2de", c200="#f5c3bc", c300="#ec9a90", c400="#df6a5e", c500="#c8322b",
    c600="#b32720", c700="#931f1a", c800="#771c18", c900="#5f1a17", c950="#340b09",
)  # fmt: skip


def theme() -> gr.themes.Base:
    """An editor's desk: paper, ink and a red pencil."""
    return gr.themes.Base(
        primary_hue=RED,
        secondary_hue=PAPER,
        neutral_hue=PAPER,
        font=SANS,
        font_mono=MONO,
        radius_size=gr.themes.sizes.radius_sm,
        spacing_size=gr.themes.sizes.spacing_sm,
    ).set(
        body_background_fill="*neutral_100",
        body_background_fill_dark="*neutral_950",
        body_text_color="*neutral_900",
        body_text_color_dark="*neutral_100",
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_400",
        block_background_fill="transparent",
        block_background_fill_dark="transparent",
        block_border_width="0px",
        block_label_background_fill="transparent",
        block_label_background_fill_dark="transparent",
        block_title_text_weight="600",
        block_title_text_color="*neutral_900",
        block_title_text_color_dark="*neutral_100",
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_400",
        panel_background_fill="transparent",
        panel_background_fill_dark="transparent",
        input_background_fill="*neutral_50",
        input_background_fill_dark="*neutral_900",
        input_border_width="1px",
        input_border_color="*neutral_300",
        input_border_color_dark="*neutral_700",
        input_border_color_focus="*primary_500",
        input_border_color_focus_dark="*primary_400",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_400",
        button_primary_background_fill="*primary_500",
        button_primary_background_fill_hover="*primary_600",
        button_primary_background_fill_dark="*primary_600",
        button_primary_background_fill_hover_dark="*primary_500",
        button_primary_text_color="#ffffff",
        button_secondary_background_fill="*neutral_50",
        button_secondary_background_fill_hover="*neutral_50",
        button_secondary_background_fill_dark="*neutral_800",
        button_secondary_background_fill_hover_dark="*neutral_700",
        button_secondary_border_color="*neutral_300",
        button_secondary_border_color_hover="*neutral_500",
        button_secondary_border_color_hover_dark="*neutral_500",
        button_secondary_border_color_dark="*neutral_700",
        button_border_width="1px",
        slider_color="*primary_500",
        slider_color_dark="*primary_400",
        checkbox_background_color_selected="*primary_500",
        checkbox_background_color_selected_dark="*primary_500",
        checkbox_border_color_selected="*primary_500",
        checkbox_border_color_selected_dark="*primary_500",
    )


def build(desk: Desk) -> gr.Blocks:
    """The whole page for this desk."""
    with gr.Blocks(
        title="Redline", analytics_enabled=False, fill_width=True, delete_cache=(3600, 24 * 3600)
    ) as page:
        chat = Chat(desk)
        chat.mount(page)
    return page


def launch(page: gr.Blocks, host: str, port: int, *, share: bool = False, wait: bool = True) -> None:
    """Serve the page; returns when it is closed, or at once if not told to ``wait``.

    Raises OSError if the port was taken since it was chosen.
    """
    gr.set_static_paths([PLOTLY_SCRIPT])
    page.queue(max_size=64, api_open=False).launch(
        server_name=host,
        server_port=port,
        share=share,
        quiet=True,
        prevent_thread_lock=not wait,
        run_history=False,
        footer_links=[],
        favicon_path=ASSETS / "logo.svg",
        theme=theme(),
        css_paths=[ASSETS / "page.css"],
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
    )


def serve(options: Options, port: int) -> None:
    """Open the page and load the pair behind it."""
    loader = Loader(load_engine)
    loader.start()
    desk = Desk(loader, Store(options.db), options.personal)
    page = build(desk)
    shown = "127.0.0.1" if options.host == "0.0.0.0" else options.host
    print(f"Redline is at http://{shown}:{port}", flush=True)
    try:
        launch(page, options.host, port, share=options.share)
    except OSError:
        sys.exit(f"Port {port} was taken while Redline started: start it again.")


def load_engine(progress: Progress) -> object:
    """The embedded pair's engine. torch is imported here, in the loading thread: the page is up sooner."""
    progress("Starting PyTorch.", None)
    from core.engine import Engine
    from core.models.embedded import load_embedded

    return Engine(load_embedded(progress))
