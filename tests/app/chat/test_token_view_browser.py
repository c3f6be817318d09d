"""The redline view in a real browser: what is drawn, what a card says, and what hostile text cannot do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import gradio as gr
import pytest

from app.chat.card import locate, token_details
from app.chat.token_view import RedlineView, encode_reply_end, encode_reply_start, encode_round, encode_user
from core.records import Fate, Round, Token
from tests.app.scripted import scripted_pieces, scripted_rounds
from tests.browser import keep_warm

sync_api = pytest.importorskip("playwright.sync_api")

KEPT = ".rl-view :is(.rl-accepted, .rl-resampled, .rl-bonus, .rl-plain)"
HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "<style>*{display:none}</style>",
    "<script>window.hacked = 1</script>",
    "[x](javascript:alert(1))",
    '" onmouseover=alert(1) x="',
    "${window.hacked = 1}${1+1}",
    "{{v}}{{#each value}}",
    "</script></div></span><b>bold</b>",
    "List<int> a; x < y && y > z <abc",
    "$3000 and $$e=mc^2$$ \\(a+b\\)",
]


def make_rounds(*rounds: str, text: str | None = None, mono: bool = False) -> list[Round]:
    """Rounds from fate letters ("aars": accepted twice, rejected, resampled)."""
    fates = {str(fate)[0] if fate is not Fate.RESAMPLED else "s": fate for fate in Fate}
    made, n = [], 0
    for index, letters in enumerate(rounds):
        tokens = []
        for letter in letters:
            fate = fates[letter]
            words = f" w{n}" if text is None else text
            tokens.append(
                Token(
                    index=len(tokens), id=n, text=words, fate=fate, position=len(tokens), monospaced=mono,
                    p=0.41, q=0.62, u=0.31, top_p=((n, 0.41),), top_q=((n, 0.62),),
                )
            )  # fmt: skip
            n += 1
        made.append(Round(index, 4, "fixed", tuple(tokens), "", n, 0.0, 0.0, 0.0))
    return made


def of_texts(texts: list[str], fate: Fate = Fate.PLAIN, mono: bool = False) -> list[Round]:
    """One round a text, each of one token."""
    return [
        Round(i, 0, "plain", (Token(0, i, text, fate, 0, monospaced=mono),), "", i, 0.0, 0.0, 0.0)
        for i, text in enumerate(texts)
    ]


@dataclass
class Stage:
    """A page with nothing but the view, and what it is to show: every entry of ``values`` is a yield."""

    url: str = ""
    values: list[str] = field(default_factory=list)
    rounds: dict[str, list[Round]] = field(default_factory=dict)
    asked: list[tuple[str, int]] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)

    def details(self, key: str, i: int) -> dict:
        self.asked.append((key, i))
        return token_details(
            *locate(self.rounds[key], i), 0.7, lambda ids: [self.texts.get(id, "") for id in ids]
        )

    def play(self) -> Iterator[str]:
        for value in self.values:
            yield value
            time.sleep(0.05)

    def reply(
        self, rounds: list[Round], key: str = "k", end: str = "", user: str = "hi", note: str = ""
    ) -> list[str]:
        """The values of a question and its streamed reply, one yield a round."""
        self.rounds[key] = rounds
        value = encode_user(user) + encode_reply_start(key, 0.7, note)
        values = [value]
        for round in rounds:
            values.append(values[-1] + encode_round(round))
        return [*values, values[-1] + (end or encode_reply_end(finish_reason="eos_token"))]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    stage = Stage()
    with gr.Blocks(analytics_enabled=False) as blocks:
        view = RedlineView(details=stage.details)
        played = gr.Number(0, elem_id="played")
        gr.Button("Play", elem_id="play").click(stage.play, None, view, show_progress="hidden").then(
            lambda n: n + 1, played, played, show_progress="hidden"
        )
    _, stage.url, _ = blocks.queue().launch(
        server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, run_history=False
    )
    yield stage
    blocks.close()


@pytest.fixture(scope="module")
def desktop(browser: sync_api.Browser, stage: Stage) -> Iterator[sync_api.BrowserContext]:
    context = browser.new_context()
    keep_warm(context, stage.url)
    yield context
    context.close()


@pytest.fixture
def open_page(stage: Stage, browser: sync_api.Browser, desktop: sync_api.BrowserContext):
    """Opens the stage's page; afterwards asserts that nothing ran, failed or asked for the outside."""
    stage.values, stage.rounds, stage.asked, stage.texts = [], {}, [], {}
    opened, troubles = [], []

    def watch_request(request: sync_api.Request) -> None:
        if not request.url.startswith((stage.url, "data:", "blob:")):
            troubles.append(f"outside: {request.url}")

    def open_page(
        query: str = "", width: int = 1000, height: int = 800, touch: bool = False
    ) -> sync_api.Page:
        page = browser.new_page(has_touch=True) if touch else desktop.new_page()
        opened.append(page)
        page.set_viewport_size({"width": width, "height": height})
        page.on("request", watch_request)
        page.on("dialog", lambda dialog: (troubles.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        # Gradio catches what a component's script throws, and writes it to the console.
        page.on("console", lambda said: said.type == "error" and troubles.append(f"console: {said.text}"))
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.goto(stage.url + query)
        for part in (".rl-view", "#play", "#played input"):  # Gradio mounts each in its own time
            page.wait_for_selector(part, state="attached")
        return page

    yield open_page
    for page in opened:
        page.close()
    assert troubles == []


def play(page: sync_api.Page, stage: Stage, values: list[str]) -> None:
    """Streams ``values`` and waits for the end: the button takes no second click before."""
    stage.values = values
    before = page.input_value("#played input")
    # By script, because a real click scrolls to the button, which stands below the text.
    page.evaluate("document.querySelector('#play').click()")
    page.wait_for_function("before => document.querySelector('#played input').value !== before", arg=before)


def texts(page: sync_api.Page, selector: str) -> list[str]:
    return page.eval_on_selector_all(selector, "nodes => nodes.map(node => node.textContent)")


def test_an_empty_conversation_shows_nothing(open_page, stage: Stage) -> None:
    page = open_page()
    assert not page.is_visible(".rl-legend")
    assert page.inner_text(".rl").strip() == ""


def test_every_fate_has_its_own_marks_and_the_counts_are_right(open_page, stage: Stage) -> None:
    page = open_page()
    rounds = make_rounds("aaars", "aaaab", "rdds")  # SD-16
    play(page, stage, stage.reply(rounds))
    for fate in Fate:
        assert page.locator(f".rl-view .rl-{fate}").count() == sum(r.count(fate) for r in rounds)
    kept = page.eval_on_selector_all(
        KEPT, "nodes => nodes.map(node => node.className.split('-').slice(-1)[0])"
    )
    drawn = page.eval_on_selector_all(
        ".rl-view .rl-t", "nodes => nodes.map(n => /rl-t rl-(.)/.exec(n.className)[1])"
    )
    assert len(kept) == 10
    # Discarded drafts last: a rejected token stands directly before the one that replaced it.
    assert "".join(drawn) == "aaarraaaabrrdd"
    lines = page.eval_on_selector_all(
        ".rl-view .rl-ink",
        """nodes => nodes.map(n => getComputedStyle(n))
                         .map(style => `${style.textDecorationLine} ${style.textDecorationStyle}`)""",
    )
    assert dict(zip([*"aaarsaaaabrsdd"], lines, strict=True)) == {
        "a": "underline dotted",
        "r": "line-through solid",
        "s": "underline solid",
        "b": "none solid",
        "d": "underline dashed",
    }
    assert (
        page.eval_on_selector(".rl-view .rl-bonus .rl-ink", "n => getComputedStyle(n, '::after').content")
        == '"+"'
    )


def test_branches_of_a_tree_stand_beside_the_text_only_when_asked_for(open_page, stage: Stage) -> None:
    page = open_page()
    fates = (" cat", Fate.REJECTED, None, 0), (" dog", Fate.ACCEPTED, None, 0), (" sat", Fate.DISCARDED, 0, 1)
    tokens = [
        Token(i, i, text, fate, position, parent=parent, p=0.2, q=0.4, u=0.8 - 0.5 * i)
        for i, (text, fate, parent, position) in enumerate(fates)
    ]
    tokens.append(Token(3, 3, " ran", Fate.BONUS, 1, parent=1, p=0.3))
    tree = Round(0, 2, "fixed", tuple(tokens), "", 9, 0.0, 0.0, 0.0, drafter="eagle")
    play(page, stage, stage.reply(make_rounds("aab")))
    switch = page.locator(".rl-switch", has_text="branches")
    assert not switch.is_visible()  # chains have none
    play(page, stage, stage.reply([tree], key="t"))
    branch = page.locator(".rl-view .rl-branch")
    assert branch.count() == 1 and not branch.is_visible()
    assert texts(page, KEPT) == [" dog", " ran"]
    switch.click()
    assert branch.is_visible() and branch.text_content() == " sat"
    switch.click()
    assert not branch.is_visible()
    page.locator(".rl-view .rl-accepted").hover()
    page.wait_for_selector(".rl-card .rl-siblings")
    card = page.inner_text(".rl-card")
    assert "Tried before it and refused: “ cat” (u·q = 0.32 ≥ p = 0.2); p is what they left." in card
    assert "“ cat” rejected, p 0.2, q 0.4" in card and "a tree of 3 drafts, drafts by eagle" in card


def test_rounds_are_ticked_but_not_between_single_tokens(open_page, stage: Stage) -> None:
    page = open_page()
    play(page, stage, stage.reply(make_rounds("aaars", "p", "p", "p", "aab")))
    first = page.eval_on_selector_all(
        ".rl-view .rl-seg", "nodes => nodes.map(n => n.classList.contains('rl-first'))"
    )
    assert first == [True, True, False, False, True]


def test_hostile_text_is_text(open_page, stage: Stage) -> None:
    page = open_page()
    pieces = [part for text in HOSTILE for part in (text, text[:3], text[3:7], text[7:])]
    stage.texts = dict(enumerate(pieces))
    rounds = [
        Round(
            i, 4, "fixed",
            (
                Token(0, i, piece, Fate.ACCEPTED, 0, p=0.5, q=0.5, top_p=((i, 0.5),), top_q=((i, 0.5),)),
                Token(1, i, piece, Fate.REJECTED, 1),
                Token(2, i, "", Fate.RESAMPLED, 1, label=piece),
            ),
            "", 0, 0.0, 0.0, 0.0,
        )
        for i, piece in enumerate(pieces)
    ]  # fmt: skip
    users = "".join(encode_user(text) for text in HOSTILE)
    end = encode_reply_end(None, "error", HOSTILE[0], HOSTILE[1])
    play(
        page,
        stage,
        [users + value for value in stage.reply(rounds, user=HOSTILE[0], note=HOSTILE[1], end=end)],
    )

    assert texts(page, ".rl-user") == [*HOSTILE, HOSTILE[0]]
    assert "".join(texts(page, ".rl-view .rl-accepted")) == "".join(pieces)
    assert texts(page, ".rl-view .rl-rejected") == pieces
    assert texts(page, ".rl-view .rl-resampled .rl-chip") == pieces
    assert texts(page, ".rl-note") == [HOSTILE[1]] and HOSTILE[1] in texts(page, ".rl-end")[0]
    page.focus(".rl-view")
    for i in range(len(HOSTILE)):  # cards show the same strings
        page.keyboard.press("Home" if i == 0 else "ArrowDown")
        page.wait_for_function(
            "text => document.querySelector('.rl-card .rl-tops .rl-this')?.textContent.startsWith(text)",
            arg=pieces[i].replace(" ", "·"),
        )
    assert page.evaluate("getComputedStyle(document.body).display") != "none"
    assert page.evaluate("window.hacked") is None
    allowed = {"DIV", "SPAN", "BUTTON", "DL", "DT", "DD", "P", "OL", "LI", "H4", "I"}
    assert set(page.eval_on_selector_all(".rl *", "nodes => nodes.map(n => n.tagName)")) <= allowed
    attributes = page.eval_on_selector_all(
        ".rl, .rl *", "nodes => nodes.flatMap(n => [...n.attributes].map(a => [a.name, a.value]))"
    )
    names = {name for name, _ in attributes}
    assert names <= {
        "class", "role", "id", "tabindex", "type", "title", "style", "popover", "hidden", "aria-label",
        "aria-pressed", "aria-disabled", "aria-selected", "aria-description", "aria-activedescendant",
        "aria-describedby",
    }  # fmt: skip
    assert not [
        value
        for _, value in attributes
        if "alert" in value or "hacked" in value or "<" in value.replace("u·q < p", "")
    ]


def test_spaces_and_line_breaks_stay(open_page, stage: Stage) -> None:
    page = open_page()
    pieces = ["    indented", "\n", "        more", "\n\n", "   ", " Hello", "\n", "\tTab\r\n"]  # UI-06
    play(page, stage, stage.reply(of_texts(pieces, Fate.ACCEPTED)))
    assert texts(page, KEPT) == pieces
    left = page.eval_on_selector_all(
        ".rl-view .rl-ink", "nodes => nodes.map(n => n.getBoundingClientRect().left)"
    )
    top = page.eval_on_selector_all(
        ".rl-view .rl-ink", "nodes => nodes.map(n => n.getBoundingClientRect().top)"
    )
    assert left[1] > left[0] + 5, "eight spaces stand further in than four"
    assert top[1] > top[0] and top[2] > top[1] + 1.5 * (top[1] - top[0]), "the blank line is there"
    assert page.eval_on_selector_all(".rl-view .rl-t", "nodes => nodes.every(n => n.getClientRects().length)")


def test_line_breaks_that_were_not_kept_break_no_line(open_page, stage: Stage) -> None:
    page = open_page()
    rounds = make_rounds("ardds", text="\n")
    play(page, stage, stage.reply(rounds))
    assert texts(page, ".rl-view .rl-rejected, .rl-view .rl-discarded") == ["↵"] * 3
    assert "".join(texts(page, KEPT)) == "\n\n"


def test_code_becomes_a_block_once_it_spans_lines(open_page, stage: Stage) -> None:
    page = open_page()
    rounds = of_texts(["Use "]) + of_texts(["`x`"], mono=True) + of_texts([":\n\n"])
    rounds += of_texts(["```", "py"], mono=True) + of_texts(
        ["\n", "def", " f():\n", "    pass\n", "```"], mono=True
    )
    rounds += of_texts(["\n\n", "Done."])
    play(page, stage, stage.reply(rounds))
    assert "".join(texts(page, KEPT)) == "Use `x`:\n\n```py\ndef f():\n    pass\n```\n\nDone."
    assert texts(page, ".rl-code") == ["```py\ndef f():\n    pass\n```"]
    families = page.eval_on_selector_all(
        ".rl-view .rl-t", "nodes => nodes.map(n => getComputedStyle(n).fontFamily)"
    )
    assert families[1] == families[3] != families[0] == families[-1]


def test_text_behind_a_stop_string_is_faint_and_explained(open_page, stage: Stage) -> None:
    page = open_page()
    rounds = of_texts(["Hi 😀", " yoSTOP", "more"], Fate.ACCEPTED)
    play(page, stage, stage.reply(rounds, end=encode_reply_end(7, "stop_string")))
    assert texts(page, ".rl-view .rl-beyond") == ["STOP", "more"]
    assert "".join(texts(page, KEPT)) == "Hi 😀 yoSTOPmore"
    assert "no part of the reply" in page.inner_text(".rl-end")


def test_tokens_without_text_show_their_label(open_page, stage: Stage) -> None:
    page = open_page()
    tokens = (Token(0, 1, "", Fate.ACCEPTED, 0, "⟨F0 9F⟩"), Token(1, 2, "🙂", Fate.RESAMPLED, 1))
    play(page, stage, stage.reply([Round(0, 2, "fixed", tokens, "", 0, 0.0, 0.0, 0.0)]))
    assert texts(page, ".rl-view .rl-chip") == ["⟨F0 9F⟩"]


def test_the_card_by_keyboard(open_page, stage: Stage) -> None:
    page = open_page()
    stage.texts = {0: " w0"}
    play(page, stage, stage.reply(make_rounds("aars", "aab", "p")))
    page.focus(".rl-view")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".rl-card .rl-why")
    assert page.inner_text(".rl-why") == (
        "The draft gave “ w0” 0.62, the target 0.41; u·q = 0.31·0.62 = 0.19 < 0.41, so it was kept."
    )
    figures = dict(zip(texts(page, ".rl-figures dt"), texts(page, ".rl-figures dd"), strict=True))
    assert figures["p"] == "0.41" and figures["q"] == "0.62" and figures["overlap"] == "–"
    assert texts(page, ".rl-tops .rl-word") == ["·w0", "·w0"]

    def current() -> int:
        return page.evaluate(
            "[...document.querySelectorAll('.rl-view .rl-t')].findIndex(n => n.matches('.rl-current'))"
        )

    def press(key: str) -> int:
        page.keyboard.press(key)
        return current()

    assert current() == 0
    active = page.get_attribute(".rl-view", "aria-activedescendant")
    assert page.evaluate("id => document.getElementById(id).textContent", active) == " w0"
    moves = {"ArrowRight": 1, "ArrowDown": 4, "End": 7, "ArrowUp": 4, "ArrowLeft": 3, "Home": 0}
    assert {key: press(key) for key in moves} == moves
    page.wait_for_selector(".rl-card[role=tooltip]")
    page.keyboard.press("Enter")
    page.wait_for_selector(".rl-card[role=dialog]")
    page.mouse.move(500, 700)
    assert page.is_visible(".rl-card")
    page.keyboard.press("Escape")
    assert not page.is_visible(".rl-card") and current() == -1
    assert page.evaluate("document.activeElement.className") == "rl-view"
    assert page.eval_on_selector_all(".rl [tabindex='0']", "nodes => nodes.length") == 1


def test_hovering_lights_the_round_and_opens_the_card(open_page, stage: Stage) -> None:
    page = open_page()
    play(page, stage, stage.reply(make_rounds("aars", "aab")))
    page.hover(".rl-view .rl-t:nth-child(2)")
    page.wait_for_selector(".rl-card .rl-why")
    assert texts(page, ".rl-lit") == [" w0 w1 w2 w3"]
    page.mouse.move(5, 700)
    page.wait_for_selector(".rl-card", state="hidden")
    assert page.locator(".rl-lit").count() == 0


def test_hiding_what_was_struck_and_never_tested(open_page, stage: Stage) -> None:
    page = open_page()
    play(page, stage, stage.reply(make_rounds("ardds", "aab")))
    page.get_by_role("button", name="Show discarded").press("Space")
    assert not page.is_visible(".rl-view .rl-discarded") and page.is_visible(".rl-view .rl-rejected")
    page.get_by_role("button", name="Show rejected").click()
    assert not page.is_visible(".rl-view .rl-rejected")
    page.focus(".rl-view")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")  # steps over what is hidden
    assert page.inner_text(".rl-current").strip() == "w4"
    page.get_by_role("button", name="Show rounds").click()
    assert page.get_by_role("button", name="Show rounds").get_attribute("aria-pressed") == "false"
    first = page.locator(".rl-view .rl-first").nth(1)
    assert first.evaluate("n => getComputedStyle(n).borderLeftWidth") == "0px"
    play(page, stage, stage.reply(make_rounds("rds")))  # a new conversation keeps the choices
    assert not page.is_visible(".rl-view .rl-rejected")


def test_a_replaced_value_is_drawn_anew(open_page, stage: Stage) -> None:
    page = open_page()
    play(page, stage, stage.reply(make_rounds("aars", "aab")))
    first = texts(page, ".rl-view .rl-t")
    play(page, stage, stage.reply(make_rounds("ppp", text="x"), user="again", note="plain, K = 0"))
    assert texts(page, ".rl-view .rl-t") == ["x"] * 3 != first
    assert texts(page, ".rl-user") == ["again"] and texts(page, ".rl-note") == ["plain, K = 0"]
    stage.rounds = {}
    play(page, stage, [""])
    assert not page.is_visible(".rl-legend")


def test_a_long_stream_ends_complete_and_is_followed_unless_the_reader_went_up(
    open_page, stage: Stage
) -> None:
    page = open_page()
    rounds = make_rounds(*["aaards", "aaaab"] * 90)
    tokens = sum(len(r.tokens) for r in rounds)
    assert tokens >= 990
    values = stage.reply(rounds)
    values = values[:1] + values[2:-1:9] + values[-1:]  # some fifty tokens a yield, twenty yields a second
    play(page, stage, values)
    assert len(texts(page, ".rl-view .rl-t")) == tokens
    assert "".join(texts(page, KEPT)) == "".join(t.text for r in rounds for t in r.tokens if t.emitted)
    assert page.evaluate("scrollY") > 0
    bottom = page.evaluate("document.querySelector('.rl').getBoundingClientRect().bottom - innerHeight")
    assert bottom <= 1, "the end of the text is in sight"
    page.mouse.wheel(0, -100000)
    page.wait_for_function("scrollY === 0")
    stage.rounds["k2"] = make_rounds("aaaab")
    more = values[-1] + encode_reply_start("k2", 0.7) + encode_round(stage.rounds["k2"][0])
    play(page, stage, [more])
    assert page.locator(".rl-view .rl-t").count() == tokens + 5
    assert page.evaluate("scrollY") == 0


def test_a_phone_gets_a_sheet_that_stays_inside(open_page, stage: Stage) -> None:
    page = open_page(width=390, height=700, touch=True)
    play(page, stage, stage.reply(make_rounds("aars", "aab")))
    page.tap(".rl-view .rl-rejected")
    page.wait_for_selector(".rl-card[role=dialog] .rl-why")
    box = page.locator(".rl-card").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    assert box["y"] > 0 and box["y"] + box["height"] == pytest.approx(700, abs=1)
    page.tap(".rl-close")
    assert not page.is_visible(".rl-card")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("size", [(1000, 800), (700, 420)])
def test_the_card_stays_inside_the_window(open_page, stage: Stage, size: tuple[int, int]) -> None:
    page = open_page(width=size[0], height=size[1])
    play(page, stage, stage.reply(make_rounds(*["aars"] * 40)))
    page.focus(".rl-view")
    for key in ("Home", "End", "ArrowUp"):
        page.keyboard.press(key)
        page.wait_for_selector(".rl-card .rl-why")
        box = page.locator(".rl-card").bounding_box()
        assert box["x"] >= 0 and box["y"] >= 0
        assert box["x"] + box["width"] <= size[0] and box["y"] + box["height"] <= size[1]


CONTRAST = """() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const over = colours => {  // paints one over the other, as the page does
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b]
    .map(c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const nodes = document.querySelectorAll('.rl-t .rl-ink, .rl-chip, .rl-user, .rl-note, .rl-end, .rl-entry');
  return [...nodes].map(node => {
    const layers = ['white'];
    for (let up = node; up; up = up.parentElement) layers.splice(1, 0, getComputedStyle(up).backgroundColor);
    const both = [light(over(layers)), light(over([...layers, getComputedStyle(node).color]))];
    const ratio = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
    return [`${node.parentElement.className} ${node.textContent}`, ratio];
  });
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast_is_enough_in_light_and_dark(open_page, stage: Stage, theme: str) -> None:
    page = open_page(f"?__theme={theme}")
    rounds = make_rounds("aardds", "aab", "p") + make_rounds("aardds", "aab", "p", text="x\n", mono=True)
    play(page, stage, stage.reply(rounds, note="plain", end=encode_reply_end(30, "stop_string")))
    assert page.evaluate("document.body.classList.contains('dark')") == (theme == "dark")
    measured = page.evaluate(CONTRAST)
    assert len(measured) > 20
    assert [pair for pair in measured if pair[1] < 4.5] == []


def test_the_scripted_stream_shows_all_of_its_text(open_page, stage: Stage) -> None:
    page = open_page()
    pieces = scripted_pieces()
    rounds = list(scripted_rounds(pieces, seed=2, temperature=0.7))
    play(page, stage, stage.reply(rounds)[-1:])
    want = "".join(t.text for r in rounds for t in r.tokens if t.emitted)
    without_chips = """nodes => nodes.map(n => n.querySelector('.rl-chip') ? '' : n.textContent).join('')"""
    assert page.eval_on_selector_all(KEPT, without_chips) == want
    assert page.locator(".rl-view .rl-chip").count() >= 2
