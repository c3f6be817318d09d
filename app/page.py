"""Puts the page together and serves it. Knows the parts by name and where they go, nothing of what they do.

Nothing on the page is fetched from elsewhere: fonts are the system's, scripts are this process's.
"""

from __future__ import annotations

import os
from pathlib import Path

import gradio as gr

from app import api
from app.chat.chat import Chat, is_known
from app.chat.desk import Desk
from app.chat.settings_panel import SettingsPanel
from app.serving.choosing import offer
from app.serving.loading import Loader
from app.serving.options import Options
from app.serving.place import place_of_record
from app.tabs.domains_tab import DomainsTab
from app.tabs.drafters_tab import DraftersTab
from app.tabs.models_tab import ModelsTab
from app.widgets.charts import PLOTLY_SCRIPT
from app.widgets.events import AT_ONCE
from app.widgets.masthead import masthead
from core.record.store import Store

ASSETS = Path(__file__).resolve().parent.parent / "assets"
WATCH_SECONDS, LOADING_SECONDS = 3.0, 0.4  # between looks at the loader, idle and while it loads
TOGGLE_SETTINGS = "() => { document.querySelector('#settings .toggle-button')?.click(); }"

# How much of the window stands above the chat, so that the composer is always in it.
MEASURE = """() => {
  const above = [document.querySelector('#top'), document.querySelector('#tabs > .tab-wrapper')];
  const measure = () => document.documentElement.style.setProperty(
    '--above', `${Math.ceil(above[1].getBoundingClientRect().bottom + scrollY)}px`);
  const watcher = new ResizeObserver(measure);
  for (const part of above) watcher.observe(part);
}"""

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
        with gr.Sidebar(position="left", width=320, open=False, elem_id="settings", label="Settings"):
            panel = SettingsPanel(desk.loader)
        with gr.Row(elem_id="top"):
            header = gr.HTML(masthead(None), elem_id="header", apply_default_css=False)
            settings = gr.Button("Settings", size="sm", elem_id="open-settings", min_width=80)
        settings.click(None, js=TOGGLE_SETTINGS, **AT_ONCE)
        with gr.Tabs(elem_id="tabs") as tabs:
            with gr.Tab("Chat", id="chat"):
                chat = Chat(desk, panel)
            with gr.Tab("Models", id="models") as tab:
                models = ModelsTab(desk, tab)
            with gr.Tab("Domains", id="domains"):
                domains = DomainsTab(desk)
            with gr.Tab("Drafters", id="drafters"):
                drafters = DraftersTab(desk)
        api.add(desk)
        page.load(None, js=MEASURE, **AT_ONCE)
        chat.mount(page)
        domains.mount(page)
        drafters.mount(page)
        _watch_loading(desk, header, (chat, models, panel, drafters))
        _follow_offer(desk.loader, tabs, chat, models)
    return page


def _watch_loading(
    desk: Desk,
    header: gr.HTML,
    parts: tuple[Chat, ModelsTab, SettingsPanel, DraftersTab],
) -> None:
    """Keep every open page told of what is loaded and how far loading is, whoever began it."""
    chat, models, panel, drafters = parts
    seen, timer = gr.State(0), gr.Timer(LOADING_SECONDS)
    watching = [component for part in parts for component in part.watching]

    def look(seen_number: int, session: str, browser: object, chosen: bool) -> dict:
        state = desk.loading
        # Before the conversation is known nothing can be asked: what opens it would cover the reply.
        if state.number == seen_number or not is_known(session, browser):
            return {seen: seen_number}
        info = state.engine.pair.info if state.engine is not None else None
        update = {seen: state.number, header: masthead(info)}
        update[timer] = gr.Timer(LOADING_SECONDS if state.loading else WATCH_SECONDS)
        for part in (chat, models, drafters):
            update |= part.show_loading(state)
        return update | panel.show_loading(state, chosen)

    shown = [seen, timer, header, *watching]
    looked = [seen, chat.session, chat.browser, panel.chosen]
    gr.on([chat.session.change, timer.tick], look, looked, shown, **AT_ONCE)
    for event in (*chat.changing, *models.changing):
        event.then(look, looked, shown, **AT_ONCE)


def _follow_offer(loader: Loader, tabs: gr.Tabs, chat: Chat, models: ModelsTab) -> None:
    """The chat's offer leads to the picker, where the offered pair is chosen already."""

    def see() -> dict:
        entry = offer(loader.state)
        return {tabs: gr.Tabs(selected="models"), **(models.look_at(entry) if entry else {})}

    chat.see_offer.click(see, None, [tabs, *models.choice], **AT_ONCE)


def launch(page: gr.Blocks, host: str, port: int, *, share: bool = False) -> None:
    """Begin to serve the page; returns once it answers. Raises OSError if the port was taken meanwhile."""
    gr.set_static_paths([PLOTLY_SCRIPT])
    page.queue(max_size=64, api_open=False).launch(
        server_name=f"[{host}]" if ":" in host else host,  # which it puts into an address as it is
        server_port=port,
        share=share,
        quiet=True,
        prevent_thread_lock=True,
        run_history=False,
        footer_links=[],
        favicon_path=ASSETS / "logo.svg",
        theme=theme(),
        css_paths=[ASSETS / name for name in ("page.css", "domains.css", "drafters.css")],
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
    )


def serve(options: Options, port: int, loader: Loader) -> None:
    """Serve the page over what ``loader`` loads until it is interrupted. Raises OSError as ``launch``."""
    path, notices = place_of_record(options.db, os.environ)
    store = Store(path)
    page = build(Desk(loader, store, options.personal, notices))
    try:
        launch(page, options.host, port, share=options.share)
        print("\n".join((*notices, f"Redline is at http://{options.url_host}:{port}")), flush=True)
        page.block_thread()
    finally:
        store.close()
