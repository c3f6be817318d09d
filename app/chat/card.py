"""The card of a token: its figures, its place among its siblings, and the sentence of ``app.chat.why``.

Pure functions from the records to plain data. The module knows no page and computes no probability:
it only reads what the engine recorded, and writes "–" for whatever is undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from app.chat.why import REASONS, elders, explain, name, number
from core.records import Round, Token


def siblings(token: Token, round: Round) -> list[list[str]]:
    """The other candidates a tree had for the place of ``token``, in the order tried; none in a chain."""
    if not is_tree(round):
        return []
    return [
        [name(other), other.fate.value, number(other.p, 2), number(other.q, 2)]
        for other in round.tokens
        if other.drafted and other.parent == token.parent and other.index != token.index
    ]


def is_tree(round: Round) -> bool:
    """Whether the round had several candidates for one position."""
    positions = [token.position for token in round.tokens if token.drafted]
    return len(set(positions)) < len(positions)


def locate(rounds: Sequence[Round], i: int) -> tuple[Round, int]:
    """The round and the index in it of token ``i``, counting every token of every round from 0.

    Raises IndexError where the reply has no such token.
    """
    if i >= 0:
        for round in rounds:
            if i < len(round.tokens):
                return round, i
            i -= len(round.tokens)
    raise IndexError("The reply has no such token.")


def token_details(
    round: Round,
    token_index: int,
    temperature: float,
    decode: Callable[[list[int]], list[str]],
    rule: str = "token",
    threshold: float | None = None,
) -> dict:
    """All that the card of one token shows, as plain data for the page.

    ``token_index`` is the token's place in ``round.tokens``; ``decode`` gives one text for each id of a list;
    ``rule`` and ``threshold`` as in ``explain``.
    Keys: ``fate``, ``sentence``, ``round``, ``siblings`` (what else a tree proposed at this place: lists of
    [text, fate, written p, written q]), ``figures`` (a list of [name, value, meaning], values already
    written for people), ``titles`` (of the two lists that follow), ``top_p`` and ``top_q`` (lists of [text,
    probability, written probability, is this token]; an id without text is told as "id 7").
    """
    token = round.tokens[token_index]
    ids = list(dict.fromkeys(id for id, _ in (*token.top_p, *token.top_q)))
    texts = dict(zip(ids, decode(ids), strict=True)) if ids else {}
    ratio = token.p / token.q if token.p is not None and token.q else None
    reason = REASONS.get(round.num_draft_tokens_reason, round.num_draft_tokens_reason)
    figures = [
        ["p", number(token.p), "the target's probability of this token"],
        ["q", number(token.q), "the draft's probability of this token"],
        ["p / q", number(ratio), "kept with this probability, at most 1"],
        ["u", number(token.u), "the uniform draw: kept if u·q < p"],
        ["overlap", number(token.overlap), "Σ min(p, q): the chance that a draft is kept here"],
        ["position", str(token.position + 1), "place in the round's block, counted from 1"],
        ["entropy of p", number(token.entropy_p), "how undecided the target was, in nats"],
        ["entropy of q", number(token.entropy_q), "how undecided the draft was, in nats"],
    ]
    if token.h is not None:
        figures[2] = ["p / q", number(ratio), "multiplied along the block, never above 1: what h is made of"]
        figures[3] = ["u", number(token.u), "the uniform draw of block verification: passes if u < h"]
        figures.insert(4, ["h", number(token.h), "how likely the block is kept at least up to here"])
    if token.drift is not None:
        figures[2] = ["p / q", number(ratio), "what the exact rule would keep it with, at most 1"]
        figures[3] = ["drift", number(token.drift), "how far the rule moves this position's token from p"]
    if token.drafted and elders(token, round):
        figures[0][2] = "the target's probability of this token, of what its refused siblings left"
    if temperature == 0:
        meaning = "the target's probability at temperature 1, with no filter"
        figures.insert(1, ["p_raw", number(token.p_raw), meaning])

    def top(pairs: tuple[tuple[int, float], ...]) -> list[list]:
        return [[texts[id] or f"id {id}", p, number(p, 2), id == token.id] for id, p in pairs]

    return {
        "fate": token.fate.value,
        "sentence": explain(token, round, temperature, texts, rule, threshold),
        "round": f"round {round.index + 1}, K = {round.num_draft_tokens} ({reason})"
        + (f", a tree of {round.drafted} drafts" if is_tree(round) else "")
        + (f", drafts by {round.drafter}" if round.drafter else "")
        + f", token id {token.id}",
        "siblings": siblings(token, round),
        "figures": figures,
        "titles": ["target, p", "draft, q"]
        if temperature
        else ["target at temperature 1", "draft at temperature 1"],
        "top_p": top(token.top_p),
        "top_q": top(token.top_q),
    }
