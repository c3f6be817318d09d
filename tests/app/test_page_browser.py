"""The whole page in a real browser with a scripted engine: UI-01, 03 to 06, and everything one can press.

No test here waits for a time to pass: gates hold a reply or a loader where the test wants to look.
"""

from __future__ import annotations

import csv
import dataclasses
import re
import threading

import pytest

from core.engine import calibration
from core.figures.costs import Costs
from core.models.errors import LoadError
from tests.app.toy import PAIR, ToyEngine

expect = pytest.importorskip("playwright.sync_api").expect

from tests.app.driver import DRAWN  # noqa: E402  (after the skip: it imports playwright)

LONG = " ".join(f"word{n}" for n in range(60)) + "."

ANGLES = (
    "List<int> a; x < y && y > z\n\n<restate your answer here>\n\n<think>plan</think>done\n\nan open <abc"
)
HOSTILE = (
    "<img src=x onerror=alert(1)>\n\n<style>*{display:none}</style>\n\n[x](javascript:alert(1))\n\n"
    '<script>alert(2)</script>\n\n${alert(3)} {{value}} " onmouseover=alert(4) x="\n\n'
    "![pixel](http://192.0.2.1/pixel.png)"
)


def shown(locator) -> str:
    """What a person reads: the text as laid out."""
    return locator.inner_text().replace("\u00a0", " ")


def test_a_reply_in_both_views_with_figures_plot_and_exact_copy(serve, tab):
    text = "    indented\n        more\n\n   Hello  there\n"  # UI-06
    served = serve(text)
    page = tab(served.url).ready()
    expect(page.page.locator("#welcome")).to_be_visible()
    page.ask("Say hello.")
    expect(page.page.locator("#welcome")).to_be_hidden()
    assert page.drawn() == text
    expect(page.page.locator("#read")).to_be_hidden()
    expect(page.page.locator("[data-figure=finish]")).to_have_text("end of text")
    expect(page.page.locator("[data-figure=context]")).to_contain_text("of 2,048")
    expect(page.page.locator("#chart .plot svg").first).to_be_visible()
    numbers = page.page.locator("#chart .xtick text").all_text_contents()
    assert len(numbers) == len(set(numbers)) > 0
    page.view("Read")
    expect(page.page.locator("#redline")).to_be_hidden()
    assert page.bot().locator("code").first.text_content().startswith("indented\n    more")
    page.page.click("#copy")
    page.page.wait_for_function("text => navigator.clipboard.readText().then(t => t === text)", arg=text)
    assert served.desk.store.conversation(list(served.desk._conversations)[-1]).messages[1].content == text


def test_the_plot_keeps_its_height_when_the_window_changes(serve, tab):
    page = tab(serve(lambda question: LONG if question == "Long." else "Two words.").url).ready()
    page.page.set_viewport_size({"width": 390, "height": 900})
    bars = page.page.locator("#chart .barlayer .point")
    page.ask("Short.")
    expect(bars.first).to_be_attached()
    few = bars.count()
    page.ask("Long.")  # drawn again: Plotly takes the height it has then for one that is given
    expect(bars.nth(few)).to_be_attached()
    plot, fits = page.page.locator("#chart .js-plotly-plot"), "plot => [plot.clientWidth, plot.clientHeight]"
    for width in (1280, 390):
        before = plot.evaluate(fits)[0]
        page.page.set_viewport_size({"width": width, "height": 900})
        page.page.wait_for_function(
            """before => {
              const plot = document.querySelector('#chart .js-plotly-plot'), wide = plot.clientWidth;
              return wide !== before && plot.querySelector('.main-svg').getAttribute('width') == wide;
            }""",
            arg=before,
        )
        assert plot.evaluate(fits)[1] == 200
        assert plot.locator(".main-svg").first.evaluate("svg => svg.getBoundingClientRect().height") == 200


def test_a_plot_out_of_sight_stays_out_of_a_resize(serve, tab):
    page = tab(serve(LONG).url).ready()
    page.page.set_viewport_size({"width": 390, "height": 900})
    page.ask("Long.")
    expect(page.page.locator("#chart .barlayer .point").first).to_be_attached()
    page.page.click("#new")
    expect(page.page.locator("#chart .js-plotly-plot")).to_be_hidden()
    wide = page.page.evaluate("chart.clientWidth")
    page.page.set_viewport_size({"width": 1280, "height": 900})
    page.page.wait_for_function("wide => chart.clientWidth !== wide", arg=wide)
    # Plotly rejects the resize of a hidden plot, within the frame: `tab` then fails this test.
    page.page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done)))")


@pytest.mark.parametrize("text", [ANGLES, HOSTILE], ids=["angles", "hostile"])  # UI-01, UI-03
def test_what_looks_like_html_is_shown_and_never_run(serve, tab, text):
    info = dataclasses.replace(PAIR, target="<img src=x onerror=alert(5)>${alert(6)}{{value}}")
    served = serve(text, info=info)
    page = tab(served.url).ready()
    page.page.click("#open-settings")
    page.page.fill("#system textarea", text)
    page.page.click("#settings .toggle-button")
    page.ask(text)
    assert page.drawn() == text
    expect(page.page.locator(".masthead .pair")).to_contain_text(info.target)
    page.view("Read")
    assert shown(page.user()).strip() == text
    said = shown(page.bot())
    for line in filter(None, text.split("\n")):
        if line.startswith("[x]"):
            assert page.bot().locator("a", has_text="x").first.get_attribute("href") is None
        else:
            assert line in said
    assert page.bot().locator("img, style, script").count() == 0
    page.page.locator("#read").hover()
    page.page.reload()  # what the record gives back is as harmless
    expect(page.bot()).to_have_count(1)
    assert shown(page.user()).strip() == text
    page.view("Redline")
    assert page.drawn() == text


def test_prices_are_no_maths(serve, tab):  # UI-04
    text = "The sum of $3000 and $3000 is $6000. Energy is $$e=mc^2$$, also \\(a+b\\)."
    served = serve(text)
    page = tab(served.url).ready()
    page.ask("How much?")
    assert page.drawn() == text
    page.view("Read")
    expect(page.bot().locator(".katex").first).to_be_visible()
    assert "The sum of $3000 and $3000 is $6000. Energy is" in shown(page.bot())
    assert page.bot().locator(".katex").count() == 2


def test_a_fence_left_open_by_stop_swallows_nothing(serve, tab):  # UI-05
    gate = threading.Event()
    code = "```python\nimport pandas as pd\n" + "x = 1\n" * 40
    served = serve(lambda question: code if question == "Code." else "Plain *words*.", gate=gate)
    page = tab(served.url).ready()
    page.view_radio = page.page.locator("#view label", has_text="Read").click()
    page.send("Code.")
    expect(page.bot().locator("pre")).to_contain_text("import")
    page.page.click("#stop")
    page.ended()
    expect(page.page.locator("#status")).to_have_text("Ended: stopped.")
    assert page.bot().locator("pre").count() == 1 and "Ended" not in shown(page.bot())
    gate.set()
    page.ask("Words.")  # at once after Stop
    expect(page.bot()).to_have_count(2)
    expect(page.bot().nth(1).locator("em")).to_have_text("words")
    assert page.bot().nth(1).locator("pre").count() == 0
    key = list(served.desk._conversations)[-1]
    stored = served.desk.store.conversation(key).messages[1].content
    assert code.startswith(stored) and stored.count("```") == 1


def test_a_fence_closed_by_the_last_characters(serve, tab):  # UI-05
    served = serve("```\nx = 1\n```")
    page = tab(served.url).ready()
    page.ask("Code.")
    page.view("Read")
    assert page.bot().locator("pre").text_content().strip() == "x = 1"
    assert "`" not in shown(page.bot())


def test_the_view_can_be_switched_while_a_reply_streams(serve, tab):
    gate = threading.Event()
    served = serve(LONG, gate=gate)
    page = tab(served.url).ready()
    page.send("Go.")
    page.page.locator("#redline .rl-accepted").first.wait_for()
    expect(page.page.locator("#stop")).to_be_visible()
    half = page.drawn()
    assert half and LONG.startswith(half) and half != LONG
    page.view("Read")
    expect(page.bot()).to_contain_text(half)
    page.view("Redline")
    assert page.drawn() == half
    page.view("Read")
    gate.set()
    page.ended()
    expect(page.bot()).to_have_text(LONG)
    page.view("Redline")
    page.page.wait_for_function(f"text => ({DRAWN})() === text", arg=LONG)
    assert page.page.locator(".rl-end, #status").all_inner_texts()


def test_stop_regenerate_and_answer_again_plainly(serve, tab):
    served = serve(LONG)
    page = tab(served.url).ready()
    page.ask("Go.")
    answers = served.desk.open(list(served.desk._conversations)[-1]).last.answers
    page.page.click("#regenerate")
    for _ in range(400):  # until the second reply has ended: the page still shows the end of the first
        if len(answers) == 2 and answers[1].done.is_set():
            break
        page.page.wait_for_timeout(50)
    page.ended()
    page.page.click("#plainly")
    expect(page.page.locator(".comparison")).to_contain_text("the plain speed")
    assert [answer.kind for answer in answers] == ["first", "regenerated", "plain"]
    ratio = answers[1].figures().tokens_per_second / answers[2].figures().tokens_per_second
    expect(page.page.locator(".comparison")).to_contain_text(f"{ratio:.2f}×")
    assert page.drawn() == LONG + LONG  # the reply and its plain repetition
    page.view("Read")
    expect(page.bot()).to_have_text([LONG, "Once more, plainly: the target alone", LONG])
    expect(page.page.locator(".comparison")).to_be_visible()


def test_empty_messages_call_no_model_and_bad_settings_lose_nothing(serve, tab):
    served = serve(LONG)
    page = tab(served.url).ready()
    for text in ("", "   ", "\n"):
        page.page.fill("#message textarea", text)
        page.page.click("#send")
    page.page.click("#open-settings")
    page.page.fill("#top-p input, #top-p textarea", "2")
    page.page.click("#settings .toggle-button")
    page.send("Keep me.")
    expect(page.page.get_by_text("Top-p must be a number from 0 to 1, not '2'.")).to_be_visible()
    expect(page.page.locator("#message textarea")).to_have_value("Keep me.")
    expect(page.page.locator("#welcome")).to_be_visible()
    assert served.engine.prompts == []
    page.page.click("#open-settings")
    page.page.fill("#top-p input, #top-p textarea", "0.9")
    page.page.fill("#seed input, #seed textarea", "42")
    page.page.click("#settings .toggle-button")
    page.page.click("#send")
    page.ended()
    expect(page.page.locator("[data-figure=seed]")).to_have_text("42")


def test_a_second_message_during_a_reply_stays_in_the_box(serve, tab):
    gate = threading.Event()
    served = serve(LONG, gate=gate)
    page = tab(served.url).ready()
    page.send("First.")
    page.page.locator("#redline .rl-accepted").first.wait_for()
    page.send("Second.")
    expect(page.page.get_by_text("A reply is still being written")).to_be_visible()
    expect(page.page.locator("#message textarea")).to_have_value("Second.")
    gate.set()
    page.ended()
    expect(page.page.locator("#message textarea")).to_have_value("Second.")


def test_a_reload_brings_the_conversation_back_to_its_browser_only(serve, tab):
    served = serve(LONG)
    page = tab(served.url).ready()
    page.ask("Go.")
    rate = page.page.locator("[data-figure=rate]").inner_text()
    page.page.reload()
    page.page.wait_for_function(f"text => ({DRAWN})() === text", arg=LONG)
    expect(page.page.locator("[data-figure=rate]")).to_have_text(rate)
    expect(page.page.locator("#plainly")).to_be_enabled()
    page.view("Read")
    page.page.reload()
    expect(page.bot()).to_have_text(LONG)  # the view is remembered, too
    other = tab(served.url).ready()
    expect(other.page.locator("#welcome")).to_be_visible()
    assert "word1" not in other.page.content()
    page.page.click("#new")
    expect(page.page.locator("#welcome")).to_be_visible()
    page.page.reload()
    page.ready()
    expect(page.page.locator("#welcome")).to_be_visible()


def test_what_was_typed_and_not_sent_outlives_a_reload(serve, tab):
    page = tab(serve(LONG).url).ready()
    page.page.fill("#message textarea", "Half a thou")
    page.page.wait_for_function("sessionStorage.getItem('redline-message') === 'Half a thou'")
    page.page.reload()
    page.ready()
    expect(page.page.locator("#message textarea")).to_have_value("Half a thou")
    page.ask("Whole.")
    # A reload before the question has left would be one of a page that has sent nothing.
    page.page.wait_for_function(f"() => ({DRAWN})().length > 0")
    page.page.reload()
    page.page.wait_for_function(f"text => ({DRAWN})() === text", arg=LONG)
    expect(page.page.locator("#message textarea")).to_have_value("")


def test_new_in_another_tab_ends_the_reply_on_both(serve, tab):
    gate = threading.Event()
    served = serve(LONG, gate=gate)
    page = tab(served.url).ready()
    page.send("Go.")
    page.page.locator("#redline .rl-accepted").first.wait_for()
    other = page.page.context.new_page()
    other.goto(served.url)
    other.locator("#redline .rl-accepted").first.wait_for()  # the same conversation
    other.click("#new")
    expect(other.locator("#welcome")).to_be_visible()
    gate.set()
    page.ended()
    expect(page.page.locator("#status")).to_contain_text("Ended: stopped")
    expect(page.page.locator("#send")).to_be_visible()
    expect(other.locator("#welcome")).to_be_visible()
    expect(other.locator("#status")).to_have_text("")


def test_a_reload_in_the_middle_of_a_reply_keeps_what_was_said(serve, tab):
    served = serve(LONG, gate=threading.Event())
    page = tab(served.url).ready()
    page.send("Go.")
    page.page.locator("#redline .rl-accepted").first.wait_for()
    expect(page.page.locator("[data-figure=rounds]")).to_have_text("2")  # where the gate holds the reply
    half = page.drawn()
    page.page.reload()
    page.page.wait_for_function(f"text => ({DRAWN})() === text", arg=half)
    page.ended()
    expect(page.page.locator("#status")).to_have_text("Ended: stopped.")
    expect(page.page.locator("#send")).to_be_visible()


def test_nothing_can_be_asked_before_the_page_is_open(serve, tab):
    """What opens it, late on a slow machine, would put the welcome over the reply."""
    served, opening = serve(LONG), threading.Event()
    desk_open = served.desk.open
    served.desk.open = lambda key: (opening.wait(20), desk_open(key))[1]
    page = tab(served.url)
    expect(page.page.locator("#send")).to_be_disabled()
    page.send("Too soon.")
    page.page.wait_for_timeout(1500)  # several looks at the loader
    assert not served.desk._answers
    expect(page.page.locator("#send")).to_be_disabled()
    opening.set()
    page.ready().ask("Go.")
    expect(page.page.locator("#redline")).to_be_visible()
    assert page.drawn() == LONG


def test_a_new_conversation_in_the_middle_of_a_reply_stays_new(serve, tab):
    gate = threading.Event()
    served = serve(LONG, gate=gate)
    page = tab(served.url).ready()
    page.send("Go.")
    page.page.locator("#redline .rl-accepted").first.wait_for()
    old = next(iter(served.desk._answers.values()))
    page.page.click("#new")
    expect(page.page.locator("#welcome")).to_be_visible()
    assert old.done.wait(20) and old.finish_reason == "cancelled"
    gate.set()
    page.ask("Again.")
    assert page.drawn() == LONG
    assert "Go." not in served.engine.prompts[1]


def test_two_browsers_take_turns_and_the_waiting_one_says_so(serve, tab):
    gate = threading.Event()
    served = serve(lambda question: f"You said {question} " + LONG, gate=gate)
    one, two = tab(served.url).ready(), tab(served.url).ready()
    one.send("My word is APPLE.")
    one.page.locator("#redline .rl-accepted").first.wait_for()
    two.send("My word is PEAR.")
    expect(two.page.locator("#status")).to_have_text("Waiting for another reply to end.")
    gate.set()
    one.ended()
    two.ended()
    assert "PEAR" not in one.page.content() and "APPLE" not in two.page.content()
    assert "APPLE" not in served.engine.prompts[1]


def test_a_closed_tab_ends_its_reply_and_frees_the_engine(serve, tab):
    served = serve(LONG, gate=threading.Event())
    page = tab(served.url).ready()
    page.send("Go.")
    page.page.locator("#redline .rl-accepted").first.wait_for()
    answer = served.desk.open(list(served.desk._conversations)[-1]).current
    page.page.close()
    assert answer.done.wait(30)
    assert answer.finish_reason == "cancelled"
    served.engine.gate.set()
    assert served.engine.lock.acquire(timeout=10)


def test_exports_are_files_and_deleting_asks_first(serve, tab, tmp_path):
    served = serve(LONG)
    page = tab(served.url).ready()
    page.page.click("#export-sessions")
    expect(page.page.get_by_text("Nothing of this conversation is recorded yet.")).to_be_visible()
    page.ask("Go.")
    figures = served.desk.open(list(served.desk._conversations)[-1]).current.figures()
    for what in ("sessions", "replies", "rounds", "tokens"):
        with page.page.expect_download() as download:
            page.page.click(f"#export-{what}")
        assert download.value.suggested_filename.startswith(f"redline-{what}-")
        path = tmp_path / f"{what}.csv"
        download.value.save_as(path)
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
        if what == "replies":
            assert [int(row["drafted"]) for row in rows] == [figures.drafted]
        if what == "rounds":
            assert len(rows) == figures.rounds
    page.page.click("#delete")
    expect(page.page.locator("#confirm")).to_contain_text("Delete this conversation and its record?")
    page.page.click("#confirm-no")
    expect(page.page.locator("#confirm")).to_be_hidden()
    assert len(served.desk.store.list_conversations()) == 1
    page.page.click("#delete")
    page.page.click("#confirm-yes")
    expect(page.page.locator("#welcome")).to_be_visible()
    assert served.desk.store.list_conversations() == ()


def test_recording_can_be_switched_off(serve, tab):
    served = serve(LONG)
    page = tab(served.url).ready()
    page.page.click("#open-settings")
    page.page.uncheck("#record input")
    page.page.click("#settings .toggle-button")
    page.ask("Go.")
    assert served.desk.store.list_conversations() == ()


def test_where_others_reach_the_page_only_ones_own_record_is_on_offer(serve, tab):
    page = tab(serve(LONG, personal=False).url).ready()
    expect(page.page.locator("#delete-all")).to_have_count(0)
    expect(page.page.locator("#export-scope")).to_have_count(0)


def test_a_database_that_cannot_be_written_is_a_notice_and_no_more(serve, tab, tmp_path):
    (tmp_path / "record.db").mkdir()  # a folder stands where the file should be
    page = tab(serve(LONG).url).ready()
    expect(page.page.locator("#notice .notice")).to_contain_text("Not recorded:")
    page.ask("Go.")
    assert page.drawn() == LONG


def test_the_page_is_up_while_the_pair_loads_and_a_failure_can_be_retried(serve, tab):
    gate, attempts = threading.Event(), []

    def load(spec, progress):
        attempts.append(1)
        progress("Fetching the model (37 of 93 MB).", 0.4)
        assert gate.wait(20)
        gate.clear()
        if len(attempts) == 1:
            raise LoadError("There is no network: connect once, then press Retry.")
        return ToyEngine(LONG)

    page = tab(serve(load=load).url)
    expect(page.page.locator("#loading")).to_contain_text("Fetching the model (37 of 93 MB).")
    expect(page.page.locator("#loading progress")).to_have_attribute("value", "0.400")
    expect(page.page.locator("#message textarea")).to_have_attribute("placeholder", "The models are loading.")
    expect(page.page.locator("#send")).to_be_disabled()
    page.send("Too early.")
    expect(page.page.get_by_text("The models are not loaded yet.")).to_be_visible()
    expect(page.page.locator("#message textarea")).to_have_value("Too early.")
    gate.set()
    expect(page.page.locator("#loading")).to_contain_text("There is no network")
    page.page.click("#retry")
    expect(page.page.locator("#loading progress")).to_be_visible()
    gate.set()
    page.ready()
    expect(page.page.locator("#retry")).to_be_hidden()
    page.page.click("#send")
    page.ended()
    assert page.drawn() == LONG


def test_an_example_is_asked_at_a_press(serve, tab):
    served = serve(LONG)
    page = tab(served.url).ready()
    page.page.click("#example-code")
    page.page.locator("#redline .rl-accepted").first.wait_for()
    page.ended()
    assert "prime numbers" in served.engine.prompts[0]


def test_nothing_sticks_out_on_a_phone_and_a_wide_window_has_it_in_the_middle(serve, tab):
    page = tab(serve(LONG).url, viewport={"width": 390, "height": 844}).ready()
    page.ask("Go.")
    wide = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.page.evaluate(wide) <= 0
    page.page.evaluate("scrollTo(0, 0)")
    expect(page.page.locator("#send")).to_be_in_viewport(ratio=1)
    page.page.click("#open-settings")
    expect(page.page.locator("#num-draft-tokens")).to_be_in_viewport()
    page.page.click("#settings .toggle-button")
    expect(page.page.locator("#num-draft-tokens")).not_to_be_in_viewport()
    page.view("Read")
    assert page.page.evaluate(wide) <= 0
    for name, part in (("Models", "#runs"), ("Domains", "#domains")):
        page.page.get_by_role("tab", name=name).click()
        expect(page.page.locator(part)).to_be_visible()
        assert page.page.evaluate(wide) <= 0
    # In a wide window it stands in the middle, not at the right where a margin of Gradio's puts it.
    gutters = """() => {
      const place = document.querySelector('main.contain').getBoundingClientRect();
      return [place.left, document.documentElement.clientWidth - place.right];
    }"""
    for width in (1400, 1920, 2560):
        page.page.set_viewport_size({"width": width, "height": 900})
        left, right = page.page.evaluate(gutters)
        assert abs(left - right) <= 1 and left > 0, (width, left, right)


def test_thoughts_are_folded_in_read_and_shown_token_by_token_in_redline(serve, tab):
    text = "<think>First a plan.</think>Then *words*."
    page = tab(serve(text).url).ready()
    page.ask("Go.")
    assert page.drawn() == text
    page.view("Read")
    expect(page.bot().last.locator("em")).to_have_text("words")
    thoughts = page.page.get_by_role("button", name="Thoughts")
    expect(thoughts).to_be_visible()
    expect(page.page.locator("#read p", has_text="First a plan.")).to_be_hidden()
    thoughts.click()
    expect(page.page.locator("#read p", has_text="First a plan.")).to_be_visible()


def test_another_pair_is_loaded_while_the_chat_goes_on_and_every_browser_learns_of_it(
    serve, tab, monkeypatch
):
    gate = threading.Event()
    gate.set()

    def load(spec, progress):
        progress("Fetching the weights.", 0.4)
        assert gate.wait(20)
        engine = ToyEngine(LONG, info=dataclasses.replace(PAIR, target=spec.target if spec else "Toy-135M"))
        engine.pair.suggested = {"temperature": 0.6, "top_k": 20} if spec else {}
        return engine

    monkeypatch.setattr("app.serving.choosing.bytes_to_download", lambda pair: 5_600_000_000)
    monkeypatch.setattr("app.page.WATCH_SECONDS", 0.5)
    served = serve(load=load)
    one, two = tab(served.url).ready(), tab(served.url).ready()
    one.page.get_by_role("tab", name="Models").click()
    expect(one.page.locator("#runs h3").first).to_have_text("Toy-135M")
    one.page.get_by_text("SmolLM2 1.7B + 135M").click()
    expect(one.page.locator("#pair-facts")).to_contain_text("Apache-2.0, not gated")
    one.page.click("#load-pair")
    expect(one.page.locator("#confirm-load")).to_contain_text("This downloads 5.6 GB.")
    one.page.click("#load-no")
    expect(one.page.locator("#confirm-load")).to_be_hidden()
    one.page.click("#load-pair")
    gate.clear()
    one.page.click("#load-yes")
    expect(one.page.locator("#models-loading progress")).to_have_attribute("value", "0.400")
    expect(two.page.locator("#loading")).to_contain_text("The chat goes on with Toy-135M meanwhile.")
    two.ask("Go.")
    gate.set()
    for page in (one, two):
        expect(page.page.locator(".masthead .pair")).to_contain_text("SmolLM2-1.7B-Instruct")
        expect(page.page.locator("#loading .loading")).to_have_count(0)
    two.page.click("#open-settings")
    two.page.click("#use-suggested")
    expect(two.page.locator("#top-k input, #top-k textarea")).to_have_value("20")
    one.page.click("#unload")
    expect(two.page.locator("#message textarea")).to_have_attribute("placeholder", "No models are loaded.")


def test_on_a_card_k_is_automatic_and_a_choice_of_ones_own_stays(serve, tab):
    served = serve(LONG, info=dataclasses.replace(PAIR, device="cuda"))
    page = tab(served.url).ready()
    auto = page.page.locator("#auto-draft-tokens input")
    k = page.page.locator("#num-draft-tokens input").first
    page.page.click("#open-settings")
    expect(auto).to_be_checked()
    expect(k).to_have_value("8")
    page.page.click("#settings .toggle-button")
    page.ask("Go.")
    expect(page.page.locator("[data-figure=drafting]")).to_contain_text("K auto")
    expect(page.page.locator("[data-figure=speedup]")).to_have_text(
        re.compile(r"^predicted \d\.\d\d×, measured \d+\.\d\d×$")
    )
    page.page.click("#open-settings")
    auto.uncheck()
    expect(k).to_have_value("3")
    served.engine.pair.notes = ("Looked at again.",)
    served.desk.loader.renew()  # as when another pair was loaded
    page.page.get_by_role("tab", name="Models").click()
    expect(page.page.locator("#runs")).to_contain_text("Looked at again.")
    expect(auto).not_to_be_checked()
    expect(k).to_have_value("3")


def test_k_is_chosen_automatically_where_costs_are_known_and_drafts_may_be_judged_in_blocks(
    serve, tab, monkeypatch
):
    served = serve(LONG)
    page = tab(served.url).ready()
    auto = page.page.locator("#auto-draft-tokens input")
    k = page.page.locator("#num-draft-tokens input").first
    page.page.click("#open-settings")
    k.fill("2")
    auto.check()
    expect(k).to_have_value("8")
    page.page.locator("#verifier label", has_text="Block").click()
    page.page.click("#settings .toggle-button")
    page.ask("Go.")
    drafting = page.page.locator("[data-figure=drafting]")
    expect(drafting).to_have_text(re.compile(r"^model, K auto, mean \d\.\d, by block$"))
    expect(page.page.locator("#chart .legendtext", has_text=re.compile("^K$"))).to_have_count(1)
    page.page.click("#plainly")
    expect(page.page.locator("#comparison")).to_contain_text("predicted")
    monkeypatch.setattr(calibration, "measure_again", lambda pair, say: Costs(draft=0.5, verify=(1.0, 2.0)))
    page.page.get_by_role("tab", name="Models").click()
    page.page.click("#measure")
    expect(page.page.locator("#runs")).to_contain_text("1000.0 ms")
    served.engine.pair.costs = None
    served.desk.loader.renew()
    page.page.click("#open-settings")
    expect(auto).to_be_disabled()
    expect(page.page.locator("#auto-draft-tokens")).to_contain_text("measure it under Models")
    expect(k).to_have_value("2")
