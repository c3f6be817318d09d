"""Drafters compared in a browser: two on two prompts, a run cancelled half-way, two browsers at once."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.core.test_compare import engine


def load(spec, progress):
    toy = engine()
    toy.gate = None  # that of the scripted engine, which these replies do not wait at
    return toy


def drafters(tab, url: str):
    one = tab(url)
    one.page.get_by_role("tab", name="Drafters").click()
    one.page.get_by_label("N-gram: repeats of the text so far").wait_for()
    return one.page


def choose(page, *, prompts: int, tokens: int = 64) -> None:
    """Two of the four drafters, so many prompts of code and of prose."""
    for label in ("Token recycling", "N-gram where it matches"):
        page.get_by_label(label).uncheck()
    page.locator("#compare-prompts input[type=number]").fill(str(prompts))
    page.locator("#compare-tokens input[type=number]").fill(str(tokens))
    page.keyboard.press("Tab")


def test_two_drafters_on_two_prompts_and_the_next_run_cancelled_half_way(serve, tab):
    served = serve(load=load)
    page = drafters(tab, served.url)
    choose(page, prompts=1)
    page.click("#compare-start")
    expect(page.locator("#compare-progress")).to_contain_text("6 of 6 replies: done")
    tables = page.locator(".compare-table")
    expect(tables).to_have_count(2)  # code and prose
    expect(tables.first.locator("tbody th")).to_have_text(["plain", "model", "ngram"])
    expect(tables.first.locator(".speed.base b")).to_have_text("1×")

    choose(page, prompts=10, tokens=256)
    page.click("#compare-start")
    expect(page.locator("#compare-progress")).to_contain_text("of 60 replies")
    expect(page.locator("#compare-result")).to_contain_text("not complete")  # a first reply is shown at once
    page.click("#compare-cancel")
    expect(page.locator("#compare-progress")).to_contain_text("cancelled")
    expect(page.locator("#compare-start")).to_be_enabled()
    first, second = reversed(served.desk.store.comparisons())
    assert first.complete and not second.complete and 0 < len(second.replies) < 60

    page.locator("#compare-list input").click()
    page.get_by_role("option").nth(1).click()
    expect(page.locator("#compare-result")).not_to_contain_text("not complete")
    with page.expect_download() as download:
        page.click("#export-comparisons")
    assert download.value.suggested_filename.startswith("redline-comparisons-")
    page.click("#compare-delete")
    expect(page.locator("#compare-result")).to_contain_text("not complete")
    assert served.desk.store.comparisons() == [second]


def test_two_browsers_of_a_shared_page_do_not_mix(serve, tab):
    served = serve(load=load, personal=False)
    ann, ben = drafters(tab, served.url), drafters(tab, served.url)
    choose(ann, prompts=10, tokens=256)
    ann.click("#compare-start")
    expect(ann.locator(".compare-table").first).to_be_visible()
    expect(ben.locator("#compare-progress")).to_contain_text("Somebody else's comparison is running")
    expect(ben.locator("#compare-start")).to_be_disabled()
    expect(ben.locator(".compare-table")).to_have_count(0)
    ann.close()
    expect(ben.locator("#compare-start")).to_be_enabled()  # it ended with its page
    expect(ben.locator("#compare-progress")).to_have_text("")
    assert not served.desk.store.comparisons()[0].complete
