"""What the chat is handed shows a text as it is: cases UI-01, UI-04, UI-05 and UI-06 without a browser.

``test_page_browser.py`` shows that the browser draws it so.
"""

from __future__ import annotations

import html
import re

import pytest

from app.widgets.display import as_html, markdown, show_question, show_reply


@pytest.mark.parametrize(
    "text",
    [
        "List<int> a; x < y && y > z",
        "<restate your answer here>",
        "<think>plan</think>done",
        "an unterminated <abc",
        "&lt; and &copy; stay as typed",
        "<style>*{display:none}</style>",
        "<img src=x onerror=alert(1)>",
    ],
)
def test_html_is_text(text):
    shown = markdown(text)
    assert "<" not in shown
    assert html.unescape(shown) == text


def test_code_is_left_as_it_stands():
    fenced = "```cpp\nList<int> a = b && c;\n```"
    assert markdown(fenced) == fenced
    assert markdown("use `a < b && c` here, but a < b there") == "use `a < b && c` here, but a &lt; b there"
    assert markdown("``a ` < b`` < c") == "``a ` < b`` &lt; c"
    assert markdown("    if a < b:\n        c") == "    if a < b:\n        c"


def test_a_backtick_alone_opens_no_code():
    assert markdown("5` < 6\n\nand ` < `") == "5` &lt; 6\n\nand ` < `"
    assert markdown(r"\`a < b`") == r"\`a &lt; b`"


def test_an_item_that_goes_on_is_no_code():
    assert markdown("- one\n\n    a < b") == "- one\n\n    a &lt; b"


def test_quotations_stay():
    assert markdown("> a > b\n>> c < d") == "> a &gt; b\n>> c &lt; d"
    assert markdown("`a` > b") == "`a` &gt; b"


def test_images_and_diagrams_stay_text():
    assert markdown("![pixel](https://example.org/p.png)") == "&#33;&#91;pixel](https://example.org/p.png)"
    assert markdown("```mermaid\ngraph TD\n```") == "```text\ngraph TD\n```"


def test_an_open_fence_is_closed_for_display_only():
    text = "```python\nimport pandas as pd"
    assert markdown(text) == text + "\n```"
    assert markdown("1. so:\n   ```\n   x") == "1. so:\n   ```\n   x\n   ```"
    assert markdown("~~~~\na\n~~~") == "~~~~\na\n~~~\n~~~~"


def test_a_closed_fence_without_a_line_break_is_closed():
    text = "```\nx = 1\n```"
    assert markdown(text) == text


def test_prices_are_left_to_stand():
    text = "The sum of $3000 and $3000 is $6000. Energy is $$e=mc^2$$, also \\(a+b\\)."
    assert markdown(text) == text


def test_indentation_is_kept_by_the_way_it_is_handed_over():
    text = "    indented\n        more\n\n    Hello\n"
    assert show_reply(text) == {"type": "text", "text": text}


@pytest.mark.parametrize(
    "text",
    [
        "1. not a list",
        "* a *",
        "  two  spaces\n\n\n\tand a tab",
        "[x](javascript:alert(1))",
        "# no, `code`?",
        "$$a$$",
    ],
)
def test_a_question_is_literal(text):
    shown = show_question(text)["text"]
    assert html.unescape(shown) == text
    assert not set(re.sub(r"&#\d+;", "", shown)) & set("*_`#<>[]()$\\\n\t~|!")
    assert not re.search(r"^\s|\s$|\s\s|^\d+[.)]", re.sub(r"&#\d+;", "x", shown))


def test_a_plain_question_stays_readable():
    text = "Write a letter, please. Thanks."
    assert show_question(text)["text"] == text


def test_html_that_a_template_would_run_is_inert():
    shown = as_html("${1+1} {{value}} <b> \" ' `")
    assert not set(shown) & set("${`<\"'")
    assert html.unescape(shown) == "${1+1} {{value}} <b> \" ' `"
