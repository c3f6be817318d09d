"""Domains of tokens, read as they stream."""

import pytest

from core.text.domains import CHOICES, DomainTracker

CODE, PROSE, MATHS = ("code", True), ("prose", False), ("maths", False)
STRUCTURED, STRUCTURED_FENCE = ("structured", False), ("structured", True)


def labels(pieces, choice="auto"):
    tracker = DomainTracker(choice)
    return [tracker.push(piece) for piece in pieces]


def by_character(text):
    """Each character's label when every token is one character: what delimiters look like before they end."""
    return list(zip(text, labels(text), strict=True))


def domain_at(text, needle):
    """The label of ``needle`` as one token after the text before it."""
    tracker = DomainTracker()
    before, found, _ = text.partition(needle)
    tracker.push(before)
    return tracker.push(found)


def test_fence_lines_and_their_content_are_code():
    pieces = ["Here:", "\n", "```", "python", "\n", "x", " = 1", "\n", "```", "\n", "\n", "Done"]
    assert labels(pieces) == [PROSE] * 2 + [CODE] * 8 + [PROSE] * 2


def test_a_fence_that_comes_a_character_at_a_time():
    found = by_character("~~~\nx\n~~~\ny")
    assert [label for _, label in found] == [
        PROSE,
        PROSE,
        CODE,
        CODE,
        CODE,
        CODE,
        CODE,
        CODE,
        CODE,
        CODE,
        PROSE,
    ]


@pytest.mark.parametrize("language", ["json", "YAML", "xml", "csv", "html", "toml", "json5 a=x", "{.json}"])
def test_a_fence_of_data_is_structured_inside_and_code_on_its_fence_lines(language):
    pieces = ["```", language, "\n", '{"a"', ": 1}", "\n", "```", "\n", "after"]
    assert labels(pieces) == [CODE] * 3 + [STRUCTURED_FENCE] * 3 + [CODE] * 2 + [PROSE]


def test_a_closing_fence_in_data_is_code_once_it_is_long_enough():
    assert labels(["```json\n", "1\n", "``", "`", "\n", "x"]) == [
        CODE, STRUCTURED_FENCE, STRUCTURED_FENCE, CODE, CODE, PROSE,
    ]  # fmt: skip


def test_longer_fences_hold_shorter_ones():
    text = "````md\n```python\nx\n```\ninside\n````\nafter"
    assert domain_at(text, "inside") == CODE
    assert domain_at(text, "after") == PROSE


def test_tildes_and_backticks_do_not_close_each_other():
    text = "~~~\n```\ninside\n~~~\nafter"
    assert domain_at(text, "inside") == CODE
    assert domain_at(text, "after") == PROSE


def test_indented_fences_as_in_lists():
    text = "1. Do this:\n\n      ```bash\n      ls\n      ```\n\n2. after"
    assert domain_at(text, "ls") == CODE
    assert domain_at(text, "2. after") == PROSE


def test_a_closing_fence_has_no_info_string():
    assert domain_at("```\na\n```python\nstill\n```\nafter", "still") == CODE
    assert domain_at("```\na\n```python\nstill\n```\nafter", "after") == PROSE


def test_a_closing_fence_may_be_followed_by_white_space_and_crlf():
    assert domain_at("```\r\na\r\n``` \t\r\nafter", "after") == PROSE


def test_a_reply_whose_last_characters_are_the_closing_fence():
    assert labels(["```python\nimport pandas as pd\n", "```", ""])[1:] == [CODE, CODE]


def test_a_fence_in_the_middle_of_a_line_is_a_code_span():
    text = "Use ```pip install``` now. "
    assert domain_at(text, "pip") == CODE
    assert domain_at(text, "now") == PROSE
    assert domain_at("```one line``` now", "now") == PROSE


def test_code_spans_are_code_and_end_with_a_run_of_the_same_length():
    assert labels(["Call ", "`", "f(x)", "`", " twice"]) == [PROSE, CODE, CODE, CODE, PROSE]
    assert labels(["``", "a ` b", "``", " c"]) == [CODE, CODE, CODE, PROSE]


def test_an_unclosed_code_span_ends_with_its_line():
    assert labels(["the ", "`", " key", "\n", "next"]) == [PROSE, CODE, CODE, CODE, PROSE]


def test_an_escaped_backtick_opens_nothing():
    assert labels(["a \\` b", " c"]) == [PROSE, PROSE]
    assert labels(["a \\\\` b", " c"]) == [PROSE, CODE]


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("$$", "$$"),
        ("\\(", "\\)"),
        ("\\[", "\\]"),
        ("\\begin{align*}", "\\end{align*}"),
        ("\\begin{pmatrix}", "\\end{pmatrix}"),
    ],
)
def test_maths_from_delimiter_to_delimiter(opening, closing):
    pieces = ["Energy is ", opening, "e=mc^2", closing, ", also"]
    assert labels(pieces) == [PROSE, MATHS, MATHS, MATHS, PROSE]
    tracker = DomainTracker()
    for char in "Energy is " + opening + "e":
        last = tracker.push(char)
    assert last == MATHS
    for char in closing + ",":
        last = tracker.push(char)
    assert last == PROSE


def test_the_prices_and_formulas_of_ui_04():
    text = "The sum of $3000 and $3000 is $6000. Energy is $$e=mc^2$$, also \\(a+b\\)."
    maths = "".join(char for char, label in by_character(text) if label == MATHS)
    # One character at a time, the first half of an opening delimiter is not known to be one yet.
    assert maths == "$e=mc^2$$(a+b\\)"
    assert domain_at(text, "$3000 and $3000 is $6000") == PROSE


def test_three_dollars_and_escaped_dollars_are_money():
    assert labels(["It costs ", "$$$", " here"]) == [PROSE] * 3
    assert labels(["\\$", "\\$", "5"]) == [PROSE] * 3


def test_delimiters_of_another_kind_do_not_close_maths():
    assert domain_at("\\[ a $$ b \\) still \\] after", "still") == MATHS
    assert domain_at("\\[ a $$ b \\) still \\] after", "after") == PROSE


def test_unclosed_maths_ends_at_a_blank_line_or_a_fence():
    assert labels(["$$", "x\n", "\n", "after"]) == [MATHS, MATHS, MATHS, PROSE]
    assert domain_at("\\[ x\n```\ncode\n```\nafter", "code") == CODE
    assert domain_at("\\[ x\n```\ncode\n```\nafter", "after") == PROSE


def test_text_environments_are_prose():
    assert domain_at("\\begin{itemize} after", "after") == PROSE


def test_nothing_in_a_fence_is_maths():
    assert domain_at("```\n$$ x \\( y\n```", "y") == CODE
    assert domain_at("```\n$$ x \\( y\n```\nafter", "after") == PROSE


def test_table_rows_are_structured_and_spans_in_them_code():
    pieces = ["Rows:\n\n", "|", " a ", "|", " `b` ", "|", "\n", "|---|---|\n", "\n", "after | not"]
    assert labels(pieces) == [PROSE] + [STRUCTURED] * 3 + [CODE] + [STRUCTURED] * 3 + [PROSE] * 2


def test_a_bare_object_is_structured_until_its_braces_balance():
    pieces = ["{", '\n  "a": {', '"b": 1}', "\n", "}", "\n", "after"]
    assert labels(pieces) == [STRUCTURED] * 5 + [PROSE] * 2
    assert labels(["a {", "b"]) == [PROSE, PROSE]
    assert labels(["{ open\n", "\n", "after"])[-1] == PROSE


def test_straddling_tokens_belong_where_their_first_visible_character_stands():
    assert labels(["(`x", "y"]) == [PROSE, CODE]
    assert labels(["`x", "`. "]) == [CODE, CODE]
    assert labels(["text", "\n```"]) == [PROSE, CODE]
    assert labels(["```\nx", "\n```\n\nAnd", " so"]) == [CODE, CODE, PROSE]


def test_pieces_of_any_size_leave_the_same_state():
    text = 'a `b` $$c$$\n```json\n{"d": 1}\n```\n| e |\n\\(f\\) \\begin{align}g\\end{align} h'
    for size in (1, 2, 3, 5, 8):
        tracker, whole = DomainTracker(), ""
        for start in range(0, len(text), size):
            piece = text[start : start + size]
            tracker.push(piece)
            whole += piece
            at_once = DomainTracker()
            at_once.push(whole)
            ahead = ["z", "`", "\n", "z"]
            assert tracker.peek(ahead) == at_once.peek(ahead), whole


def test_peek_reads_on_without_advancing():
    tracker = DomainTracker()
    tracker.push("a ")
    assert tracker.peek(["`", "b", "`", " c"]) == [CODE, CODE, CODE, PROSE]
    assert tracker.peek(["$$", "x"]) == [MATHS, MATHS]
    assert tracker.push("d") == PROSE


def test_peek_and_push_agree():
    pieces = ["Say ", "`x`", "\n```", "json", "\n1\n", "```", "\n", "$$", "y", "$$", " end"]
    assert DomainTracker().peek(pieces) == labels(pieces)


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if choice != "auto"])
def test_a_picked_domain_holds_everywhere_and_monospace_still_follows_fences(choice):
    assert labels(["a ", "$$x$$", " `b`", "\n```\n", "c"], choice) == [
        (choice, False), (choice, False), (choice, True), (choice, True), (choice, True),
    ]  # fmt: skip


def test_an_unknown_choice_is_refused_in_words():
    with pytest.raises(ValueError, match="Domain must be one of auto, code, .* not 'poetry'"):
        DomainTracker("poetry")
