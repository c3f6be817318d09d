"""The tab of domains: what it says of a record, whom it says it to, and once in a real browser."""

from __future__ import annotations

import contextlib
import csv
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gradio as gr
import pytest

from app.chat.desk import Desk
from app.serving.loading import Loader
from app.tabs.domains_tab import AXES, NOT_ALONE, NOTHING_YET, DomainsTab, axis_values, narrow, pair_labels
from app.tabs.domains_view import FEW_MARK
from core.record.domain_table import choices, default_choice, domain_table
from core.record.store import Store
from core.record.stored import reading
from core.records import Settings
from tests.app.domains_page import TOY, fill, launch, page
from tests.core.builders import PAIR, record, rounds_of

PLAIN = Settings(seed=1, num_draft_tokens=0)
NO_WISH = (None,) * len(AXES)
HOSTILE = "<img src=x onerror=alert(1)>${alert(2)}{{value}}"


def nothing(*_: object) -> None:
    """Loads no engine: the tab needs none."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with contextlib.closing(Store(tmp_path / "record.db")) as opened:
        yield opened


def tab_of(store: Store, personal: bool = True) -> DomainsTab:
    with gr.Blocks(analytics_enabled=False):
        return DomainsTab(Desk(Loader(nothing), store, personal))


def shown(tab: DomainsTab, wish=NO_WISH, metric: str = "draft_acceptance_rate") -> dict:
    return tab.show(*wish, metric)


def words(html: str) -> str:
    """The text of markup, one space between pieces."""
    return " ".join(re.sub("<[^>]*>", " ", html).split())


def found(store: Store):
    with reading(store.path) as connection:
        return choices(connection)


# --- Before there is anything to compare


def test_an_empty_record_says_what_to_do(store):
    tab = tab_of(store)
    update = shown(tab)
    assert words(update[tab.notice]) == words(NOTHING_YET)
    assert update[tab.content]["visible"] is False and update[tab.table] == ""


def test_no_record_at_all_says_the_same(tmp_path):
    tab = tab_of(Store(tmp_path / "none.db", recording=False))
    assert words(shown(tab)[tab.notice]) == words(NOTHING_YET)
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_cannot_be_read_says_why(tmp_path):
    (tmp_path / "record.db").write_text("no database " * 100)
    tab = tab_of(Store(tmp_path / "record.db"))
    assert "the file is not an SQLite database" in words(shown(tab)[tab.notice])


def test_a_shared_page_tells_nobody_of_the_others_replies(store):
    fill(store, 4)
    tab = tab_of(store, personal=False)
    update = shown(tab)
    assert words(update[tab.notice]) == words(NOT_ALONE.replace("'", "&#x27;"))
    assert (update[tab.table], update[tab.chart]) == ("", "{}") and update[tab.content]["visible"] is False
    with pytest.raises(gr.Error, match="yours alone"):
        tab.write()


# --- The table


def test_the_table_has_the_figures_of_the_comparison(store):
    fill(store, 12)
    tab = tab_of(store)
    html = shown(tab)[tab.table]
    with reading(store.path) as connection:
        table = domain_table(connection, default_choice(choices(connection)).combination)
    lines = [words(line) for line in re.findall("<tr>.*?</tr>", html)]
    assert [line.split()[0] for line in lines] == ["Text", "Code", "Prose", "Maths", "Structured", "All"]
    code, rate = lines[1], table.rows[0].measures["draft_acceptance_rate"]
    low, high = rate.interval
    assert f"{rate.value:.1%} {low * 100:.1f} – {high:.1%}" in code
    assert f"{table.rows[0].speedup.value:.2f}×" in code
    assert code.endswith(f" {table.rows[0].sums.emitted}")
    assert "Not on record with these settings: other." in words(html)
    assert "Pools 2 different settings of top-k" in words(html)


def test_an_interval_from_few_replies_is_marked(store):
    fill(store, 11)
    tab = tab_of(store)
    lines = re.findall("<tr>.*?</tr>", shown(tab)[tab.table])
    marked = {words(line).split()[0]: FEW_MARK in line.split("<td")[1] for line in lines[1:]}
    assert marked == {"Code": True, "Prose": False, "Maths": True, "Structured": True, "All": False}


def test_one_reply_has_figures_and_no_interval(store):
    record(store, "aab", "xr")
    tab = tab_of(store)
    html = shown(tab)[tab.table]
    assert "66.7% – 0.750 – 2.00 –" in words(html)
    assert "One reply has no interval" in html and FEW_MARK not in html
    assert html.count("<tr>") == 2, "one domain needs no line over all of them"


def test_what_is_undefined_is_a_dash_and_the_chart_says_why(store):
    record(store, rounds=rounds_of("p", "p"), settings=PLAIN)
    tab = tab_of(store)
    update = shown(tab)
    assert words(update[tab.table]).split("Prose ")[1].startswith("– – 1.00 – 1.6 – 1 2 0 2")
    assert "Speed-up" not in update[tab.table]
    measures = json.loads(update[tab.chart])["measures"]
    assert measures["draft_acceptance_rate"]["domains"] == []
    assert "Nothing was drafted" in measures["alpha"]["note"]
    assert measures["tokens_per_second"]["domains"][0]["values"] == [pytest.approx(1.6)]


def test_the_chart_has_a_value_a_reply_and_the_plain_speed(store):
    for letters in ("aab", "xr", "xr"):
        record(store, letters)
    record(store, "p", settings=PLAIN)
    tab = tab_of(store)
    value = json.loads(shown(tab, metric="alpha")[tab.chart])
    assert value["metric"] == "alpha"
    (acceptance,) = value["measures"]["draft_acceptance_rate"]["domains"]
    assert (acceptance["values"], acceptance["count"]) == ([1.0, 0.0, 0.0], "3 replies")
    assert acceptance["texts"][0] == "100.0% in 1 round" and acceptance["value"] == 0.5
    assert acceptance["interval"] == [0.0, 1.0] and "95% interval 0.0 – 100.0%" in acceptance["text"]
    assert acceptance["plain"] is None
    (speed,) = value["measures"]["tokens_per_second"]["domains"]
    assert speed["plain"] == pytest.approx(1.6)


# --- What is held fixed


def test_a_choice_is_kept_as_far_as_it_is_on_record(store):
    for k, temperature in ((2, 0.7), (2, 0.7), (4, 0.0), (4, 1.0)):
        record(store, "aab", settings=Settings(num_draft_tokens=k, temperature=temperature))
    record(store, "aab", pair=replace(PAIR, target="another"), settings=Settings(num_draft_tokens=4))
    every = found(store)
    chosen, offered = narrow(every, NO_WISH)
    pair, drafter, k, temperature, verifier = axis_values(chosen.combination)
    assert (k, temperature, chosen.replies) == (2, 0.7, 2)
    assert [len(options) for options in offered] == [2, 1, 2, 1, 1]
    chosen, offered = narrow(every, (pair, drafter, 4, temperature, verifier))  # 0.7 is not on record with 4
    assert axis_values(chosen.combination)[2:4] == (4, 1.0)  # the newest of equals
    assert offered[3] == [("0 (greedy)", 0.0), ("1", 1.0)]
    other = next(value for label, value in offered[0] if "another" in label)
    chosen, _ = narrow(every, (other, drafter, 4, 1.0, verifier))
    assert axis_values(chosen.combination)[:4] == (other, "model", 4, 0.7)
    chosen, _ = narrow(every, ("gone", "gone", 99, 99.0, "gone"))
    assert axis_values(chosen.combination)[2] == 2


def test_widths_of_trees_and_rules_that_are_not_exact_are_told_apart(store):
    record(store, "aab", settings=Settings(num_draft_tokens=2))
    record(store, "aab", settings=Settings(num_draft_tokens=2, tree_width=3))
    rule = Settings(num_draft_tokens=2, verifier="typical", acceptance_threshold=0.09)
    record(store, "aab", settings=rule)
    chosen, offered = narrow(found(store), (None, "model", None, None, "typical 0.09"))
    assert {label for label, _ in offered[1]} == {"A draft model", "model ×3"}
    assert {label for label, _ in offered[4]} == {"Exact, by token", "Not exact: typical 0.09"}
    assert chosen.combination.acceptance_threshold == 0.09 and not chosen.combination.exact
    chosen, _ = narrow(found(store), (None, "model ×3", None, None, None))
    assert chosen.combination.tree_width == 3 and chosen.combination.exact


def test_k_that_was_chosen_automatically_stands_apart_behind_the_fixed_ones(store):
    for most, auto in ((8, True), (8, False), (16, False), (4, True)):
        settings = Settings(num_draft_tokens=most, auto_draft_tokens=auto)
        record(store, "aab", settings=settings)
    record(store, "p", settings=PLAIN)
    every = found(store)
    chosen, offered = narrow(every, (None, None, "auto 8", None, None))
    assert chosen.combination.auto_draft_tokens and chosen.combination.num_draft_tokens == 8
    assert [label for label, _ in offered[2]] == ["0 (plain)", "8", "16", "auto (≤ 4)", "auto (≤ 8)"]
    chosen, _ = narrow(every, (None, None, 8, None, None))
    assert not chosen.combination.auto_draft_tokens and chosen.replies == 1


def test_pairs_are_named_by_what_tells_them_apart(store):
    record(store, "aab")
    record(store, "p", pair=replace(PAIR, draft="", draft_fingerprint="", drafter="plain"), settings=PLAIN)
    names = sorted(pair_labels([choice.combination for choice in found(store)]).values())
    assert names == ["toy-target alone · int8 · cpu", "toy-target ← toy-draft · int8 · cpu"]
    record(store, "aab", pair=replace(PAIR, target_fingerprint="ef" * 32))
    names = pair_labels([choice.combination for choice in found(store)]).values()
    assert "toy-target ← toy-draft · int8 · cpu · target fingerprint efefefefefef" in names
    assert len(set(names)) == 3


# --- Files and the browser


def test_the_file_has_every_combination(store):
    fill(store, 4)
    tab = tab_of(store)
    with open(tab.write(), encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["num_draft_tokens"] for row in rows} == {"0", "3"}
    assert all(row["draft_acceptance_rate"] for row in rows if row["num_draft_tokens"] == "3")


@pytest.fixture
def url(store) -> Iterator[str]:
    record(store, "aab", pair=replace(TOY, target=HOSTILE))
    fill(store, 6)
    blocks = page(Desk(Loader(nothing), store))
    yield launch(blocks, None)
    blocks.close(verbose=False)


def test_in_a_browser(url, tab):
    from playwright.sync_api import expect

    opened = tab(url, viewport={"width": 390, "height": 844}).page
    opened.get_by_role("tab", name="Domains").click()
    axis, slow = opened.locator("#domains-chart .ytitle"), {"timeout": 20_000}
    expect(axis).to_contain_text("draft acceptance rate", **slow)
    assert opened.locator("#domains-chart .boxlayer .point").count() >= 12  # a reply has two domains
    assert opened.evaluate("document.documentElement.scrollWidth") == 390
    assert opened.locator(".domains-scroll").evaluate("box => box.scrollWidth > box.clientWidth")
    opened.locator("#domains-metric label", has_text="Tokens/s").click()
    expect(axis).to_contain_text("tokens per second", **slow)
    expect(opened.locator("#domains-chart .legendtext").last).to_have_text("the target alone", **slow)
    opened.locator("#domains-num-draft-tokens input").click()
    opened.get_by_role("option", name="0 (plain)").click()
    expect(opened.locator("table.domains tbody tr").first).to_contain_text("–", **slow)
    expect(opened.locator("#domains-chart .legendtext", has_text="alone")).to_have_count(0, **slow)
    expect(axis).to_contain_text("tokens per second", **slow)
    opened.locator("#domains-pair input").click()
    opened.get_by_role("option", name=HOSTILE).click()
    expect(opened.locator(".domains-remarks")).to_contain_text("One reply has no interval", **slow)
    with opened.expect_download() as download:
        opened.click("#export-domains")
    assert download.value.suggested_filename.startswith("redline-domains-")
    assert Path(download.value.path()).read_bytes().startswith(b"\xef\xbb\xbfpair,target,")
