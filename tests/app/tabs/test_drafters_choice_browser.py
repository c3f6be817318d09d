"""Choosing how drafts are made and judged on the page, in a real browser with a scripted engine."""

from __future__ import annotations

import re

import pytest

expect = pytest.importorskip("playwright.sync_api").expect

TEXT = " ".join(f"word{n}" for n in range(40)) + "."


def choose(page, field: str, option: str) -> None:
    """Take an option of a dropdown of the settings, which are open."""
    page.page.click(f"#{field} input")
    page.page.get_by_role("option", name=option).click()


def figure(page, name: str):
    return page.page.locator(f"[data-figure={name}]")


def settings(page) -> None:
    page.page.click("#open-settings")


def close(page) -> None:
    page.page.click("#settings .toggle-button")


def drafters(served) -> list[str]:
    """Of all replies on record, oldest first."""
    (stored,) = [served.desk.store.conversation(c.id) for c in served.desk.store.list_conversations()]
    return [reply.pair.drafter for m in stored.messages if m.role == "assistant" for reply in m.replies]


def test_another_drafter_writes_the_next_reply_and_the_figures_change(serve, tab):
    served = serve(TEXT)
    page = tab(served.url).ready()
    page.ask("Count.")
    expect(figure(page, "drafting")).to_have_text("model, K = 3, by token")
    per_pass = figure(page, "per_pass").text_content()
    settings(page)
    expect(page.page.locator("#tree-width")).to_be_hidden()
    choose(page, "drafter", "N-gram")
    close(page)
    page.ask("Count again.")
    expect(figure(page, "drafting")).to_have_text("ngram, K = 3, by token")
    expect(figure(page, "per_pass")).not_to_have_text(per_pass)
    settings(page)
    choose(page, "drafter", "Token recycling")
    expect(page.page.locator("#tree-width")).to_be_visible()
    page.page.fill("#tree-width input[type=number]", "2")
    page.page.keyboard.press("Tab")
    close(page)
    page.page.click("#regenerate")
    expect(figure(page, "drafting")).to_have_text("recycling, K = 3, tree of 2, by token")
    page.ended()
    assert page.drawn().endswith(TEXT)
    assert drafters(served) == ["model", "ngram", "recycling"]
    branch = page.page.locator("#redline .rl-branch")
    expect(branch.first).to_be_hidden()
    page.page.locator("#redline .rl-switch", has_text="branches").click()
    expect(branch.first).to_be_visible()


def test_a_rule_that_is_not_exact_is_marked_wherever_its_reply_is_spoken_of(serve, tab):
    served = serve(TEXT)
    page = tab(served.url).ready()
    settings(page)
    page.page.click("#not-exact button")
    expect(page.page.locator("#acceptance-threshold")).to_be_hidden()
    choose(page, "lossy-rule", "Draft ratio")
    expect(page.page.locator("#acceptance-threshold textarea")).to_have_value("0.9")
    page.page.fill("#acceptance-threshold textarea", "0.5")
    close(page)
    page.send("Count.")
    expect(page.page.locator(".toast-body")).to_contain_text("draft-ratio must be a number from 0.7 to 0.99")
    settings(page)
    page.page.fill("#acceptance-threshold textarea", "0.8")
    close(page)
    page.ask("Count.")
    expect(figure(page, "drafting")).to_contain_text("not exact: draft-ratio 0.8")
    expect(figure(page, "drift")).to_have_text("0.120")
    marks = "nodes => nodes.map(node => getComputedStyle(node, '::after').content)"
    every = page.page.eval_on_selector_all("#figures dt", marks)
    assert set(every) == {'"not exact"'} and len(every) > 8
    expect(page.page.locator("#redline .rl-note")).to_have_text("not exact: draft-ratio 0.8")
    page.page.locator("#redline .rl-view .rl-rejected").first.click()
    card = page.page.locator("#redline .rl-card")
    expect(card).to_contain_text("By the rule draft-ratio, which is not exact")
    expect(card).to_contain_text(re.compile(r"differs from the target's by 0\.12 in total variation"))
    assert "u" not in card.locator("dt").all_text_contents()
    page.page.click("#plainly")
    expect(page.page.locator("#comparison")).to_contain_text("not exact: draft-ratio 0.8")
    expect(figure(page, "drift")).to_have_text("0, exact")
    assert set(page.page.eval_on_selector_all("#figures dt", marks)) == {"none"}
    page.page.reload()  # from memory as from the record
    expect(page.page.locator("#redline .rl-note").first).to_contain_text("not exact: draft-ratio 0.8")
