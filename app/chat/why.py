"""Why a token stands where it stands, in one sentence.

Pure functions of the records: no page, no model.
"""

from __future__ import annotations

from collections.abc import Mapping

from core.records import Fate, Round, Token

UNDEFINED = "–"
_SIGNS = {"\n": "↵", "\t": "⇥", "\x7f": "␡"}
REASONS = {
    "fixed": "as set",
    "plain": "speculation is off",
    "length": "few tokens were still allowed",
    "context": "the target's context is nearly full",
    "draft_context": "past the draft's context",
    "draft_failed": "the draft gave no usable distribution",
    "no_match": "the drafter had less to propose",
    "auto": "chosen automatically",
}
_ENDINGS = {
    "eos_token": "with the end-of-text token",
    "stop_string": "at a stop string",
    "length": "at the length limit",
    "cancelled": "when it was stopped",
    "error": "with an error",
}


def readable(text: str) -> str:
    """``text`` on one line: line breaks, tabs and other control characters become visible signs."""
    return "".join(_SIGNS.get(c) or (chr(0x2400 + ord(c)) if ord(c) < 32 else c) for c in text)


def quote(text: str) -> str:
    """A token's text between curly quotes, control characters made visible."""
    return f"“{readable(text)}”"


def number(value: float | None, digits: int = 3) -> str:
    """A figure for people: ``digits`` significant digits, "–" where undefined.

    A figure that is neither 0 nor 1 is never shown as 0 or 1.
    """
    if value is None:
        return UNDEFINED
    if value == 0 or value == 1:
        return f"{value:g}"
    text = f"{value:.{digits}g}"
    while digits < 17 and text == "1":
        digits += 1
        text = f"{value:.{digits}g}"
    if "e" in text:
        mantissa, exponent = text.split("e")
        text = f"{mantissa}×10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
    return text


def _apart(a: float, b: float) -> tuple[str, str]:
    """Two different figures with as many digits as it takes to look different; equal ones look equal."""
    for digits in range(2, 18):
        texts = number(a, digits), number(b, digits)
        if (texts[0] == texts[1]) == (a == b):
            break
    return texts


def _test(token: Token) -> str | None:
    """The test in figures ("u·q = 0.31·0.62 = 0.19 < 0.41"); None where the record does not bear it out.

    Block verification's is "u = 0.31 < h = 0.41".
    """
    if token.h is not None and token.u is not None:
        left, right = _apart(token.u, token.h)
        return f"u = {left} {'<' if token.u < token.h else '≥'} h = {right}"
    if token.p is None or token.q is None or token.u is None:
        return None
    product = token.u * token.q
    kept = token.fate is Fate.ACCEPTED
    if (product < token.p) != kept:
        return None
    left, right = _apart(product, token.p)
    return f"u·q = {number(token.u, 2)}·{number(token.q, 2)} = {left} {'<' if kept else '≥'} {right}"


def name(token: Token) -> str:
    """What to call a token: its text in quotes, or its label where it adds no text."""
    return quote(token.text) if token.text or not token.label else token.label


def _best(token: Token, texts: Mapping[int, str]) -> str | None:
    """The target's most likely token, in quotes, where the record knows it."""
    if not token.top_p:
        return None
    best = token.top_p[0][0]
    if best == token.id:
        return name(token)
    return quote(texts[best]) if texts.get(best) else f"id {best}"


def _by_lossy_rule(token: Token, rule: str, threshold: float | None) -> str:
    """Of a token that a rule of ``core.verify.lossy`` kept or refused: its test in numbers, and its drift."""
    no, done = ("", "kept") if token.fate is Fate.ACCEPTED else ("not ", "struck out")
    p, q = f"p(x) = {number(token.p, 2)}", f"q(x) = {number(token.q, 2)}"
    bar = number(threshold)
    tests = {
        "greedy": f"{p} is {no}the highest that the target gives here ({q})",
        "threshold": f"{p} is {no}above the bar of {bar} ({q})",
        "draft-ratio": f"{q} is {no}at least {bar} times {p}",
        "target-ratio": f"{p} is {no}at least {bar} times {q}",
        "typical": f"{p} is {no}above the lesser of ε and √ε · exp(−H(p)), where ε = {bar} ({q})",
    }
    return (
        f"By the rule {rule}, which is not exact: {tests[rule]}, so {name(token)} was {done}, without a "
        "draw. At this position the rule's output differs from the target's by "
        f"{number(token.drift, 2)} in total variation."
    )


def elders(token: Token, round: Round) -> list[Token]:
    """In a tree: the siblings of ``token`` that were tried before it and refused."""
    return [
        other
        for other in round.tokens
        if other.fate is Fate.REJECTED and other.parent == token.parent and other.index < token.index
    ]


def _tried_before(token: Token, round: Round) -> str:
    """What was tried at the place of a tested draft before it, as a sentence; "" if nothing."""
    refused = " and ".join(f"{name(t)} ({_figures(t)})" for t in elders(token, round) if _test(t))
    return f" Tried before it and refused: {refused}; p is what they left." if refused else ""


def _accepted(token: Token, greedy: bool) -> str:
    if greedy:
        return f"The target's most likely token is {name(token)}; the draft proposed it, so it was kept."
    if token.p is None or token.q is None:
        return f"The draft proposed {name(token)}, and the target kept it."
    if token.h is not None:
        return _accepted_in_block(token)
    if token.q <= token.p:
        return (
            f"The draft gave {name(token)} {number(token.q, 2)} and the target no less, "
            f"{number(token.p, 2)}, so it was kept whatever the draw."
        )
    gave = f"The draft gave {name(token)} {number(token.q, 2)}, the target {number(token.p, 2)}"
    test = _test(token)
    return f"{gave}; {test}, so it was kept." if test else f"{gave}; it was kept."


def _accepted_in_block(token: Token) -> str:
    gave = (
        f"The draft gave {name(token)} {number(token.q, 2)}, the target {number(token.p, 2)}; {_test(token)}"
    )
    if token.u is not None and token.u < token.h:
        return f"{gave}, so the block was kept up to here at least."
    return f"{gave}, but a later draft of the block passed, and carried this one with it."


def _rejected(token: Token, round: Round, greedy: bool, texts: Mapping[int, str]) -> str:
    if greedy:
        best = _best(token, texts) or next(
            (name(t) for t in round.tokens if t.fate is Fate.RESAMPLED and t.position == token.position), None
        )
        if best is None or best == name(token):
            return f"{name(token)} is not the target's most likely token, so it was struck out."
        return (
            f"The target's most likely token is {best}; the draft proposed {name(token)} instead, "
            "so it was struck out."
        )
    if token.p is None or token.q is None:
        return f"The draft proposed {name(token)}, and the target did not keep it."
    gave = f"The draft gave {name(token)} {number(token.q, 2)}, the target "
    if token.h is not None:
        return (
            f"{gave}{number(token.p, 2)}; {_test(token)}, and no later draft of the block passed, "
            "so it was struck out."
        )
    if token.p == 0:
        return f"{gave}0: the target would never write it here, so it was struck out."
    gave += f"only {number(token.p, 2)}"
    test = _test(token)
    return f"{gave}; {test}, so it was struck out." if test else f"{gave}; it was struck out."


def _resampled(token: Token, round: Round, greedy: bool) -> str:
    struck = [t for t in round.tokens if t.fate is Fate.REJECTED and t.position == token.position]
    struck = struck or [t for t in round.tokens if t.fate is Fate.REJECTED]
    if greedy:
        other = f"; the draft proposed {name(struck[-1])} instead" if struck else ""
        return f"The target's most likely token is {name(token)}{other}. It took the draft's place."
    if any(t.drift is not None for t in struck):
        return f"The rule, which is not exact, struck {name(struck[0])} out, and this token was drawn from p."
    source = "this token was drawn from what the target wanted and the draft did not (the residual)"
    if len(struck) > 1:
        return f"All {len(struck)} drafts for this place were rejected, and {source}."
    if not struck:
        return f"The draft was rejected, and {source}."
    test = _test(struck[0])
    why = f" ({_figures(struck[0])})" if test else ""
    return f"The draft's {name(struck[0])} was rejected{why}, and {source}."


def _figures(token: Token) -> str:
    """The short form of a failed test: "u·q = 0.55 ≥ p = 0.12"."""
    if token.h is not None:
        return _test(token)
    left, right = _apart(token.u * token.q, token.p)
    return f"u·q = {left} ≥ p = {right}"


def _bonus(round: Round, greedy: bool) -> str:
    kept = round.count(Fate.ACCEPTED)
    if kept == 1 and round.drafted == 1:
        drafts = "The one draft was accepted"
    elif kept == round.drafted:
        drafts = f"All {kept} drafts were accepted"
    else:  # a tree: one whole path was accepted, its siblings were not needed
        drafts = f"A whole path of {kept} drafts was accepted"
    most_likely = ", its most likely one," if greedy else ""
    return f"{drafts}, so the target's own next token{most_likely} came free (bonus)."


def _plain(token: Token, round: Round, greedy: bool) -> str:
    reasons = {
        "plain": "Speculation is off (K = 0)",
        "length": "No room for a draft was left under the length limit",
        "context": "No room for a draft was left in the target's context",
        "draft_context": "The text is longer than the draft can read",
        "draft_failed": "The draft gave no usable distribution",
        "no_match": "The drafter had nothing to propose",
        "auto": "The automatic draft length was 0",
    }
    why = reasons.get(round.num_draft_tokens_reason)
    short = round.num_draft_tokens_reason in ("draft_failed", "no_match")
    if why is None or (round.num_draft_tokens > 0 and not short):
        why = "Nothing was drafted in this round"
    if greedy:
        return f"{why}: the target wrote its most likely token alone."
    gave = "" if token.p is None else f", giving it {number(token.p, 2)}"
    return f"{why}: the target wrote this token alone{gave}."


def _discarded(token: Token, round: Round, greedy: bool) -> str:
    struck = next((t for t in round.tokens if t.fate is Fate.REJECTED), None)
    if struck is not None and struck.h is not None and not greedy:
        return (
            f"Judged with its block: neither {name(struck)}, earlier in this round, nor any draft behind it "
            "passed, so they fell together."
        )
    beside = _kept_beside(token, round)
    if beside is not None:
        return f"Never tested: its sibling {name(beside)} was accepted first, and this branch was not needed."
    if struck is not None:
        return (
            f"Never tested: {name(struck)}, earlier in this round, was rejected, "
            "and what the draft wrote after it fell with it."
        )
    if round.finish_reason:
        ending = _ENDINGS.get(round.finish_reason, "there")
        return f"Never tested: the reply ended {ending}, earlier in this round."
    return "Never tested: the round ended before it."


def _kept_beside(token: Token, round: Round) -> Token | None:
    """In a tree: the accepted sibling of ``token`` or of a draft that it follows."""
    by_index = {t.index: t for t in round.tokens if t.drafted}
    at: Token | None = token
    while at is not None:
        for other in by_index.values():
            if other.fate is Fate.ACCEPTED and other.parent == at.parent and other.index != at.index:
                return other
        at = by_index.get(at.parent) if at.parent is not None else None
    return None


def explain(
    token: Token,
    round: Round,
    temperature: float,
    texts: Mapping[int, str],
    rule: str = "token",
    threshold: float | None = None,
) -> str:
    """Why ``token`` of ``round`` stands there (or does not), in a sentence or two.

    ``texts`` maps token ids to their text; it may lack ids. ``rule`` and ``threshold`` are ``verifier`` and
    ``acceptance_threshold`` of the reply's settings. Figures that are None are left out of the sentence.
    """
    greedy = temperature == 0
    if token.drift is not None:
        return _by_lossy_rule(token, rule, threshold)
    if token.fate is Fate.ACCEPTED:
        return _accepted(token, greedy) + _tried_before(token, round)
    if token.fate is Fate.REJECTED:
        return _rejected(token, round, greedy, texts) + _tried_before(token, round)
    if token.fate is Fate.RESAMPLED:
        return _resampled(token, round, greedy)
    if token.fate is Fate.BONUS:
        return _bonus(round, greedy)
    if token.fate is Fate.PLAIN:
        return _plain(token, round, greedy)
    return _discarded(token, round, greedy)
