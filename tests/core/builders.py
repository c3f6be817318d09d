"""Small helpers that build rounds for tests from a line of letters, one per token.

``a`` accepted, ``x`` rejected, ``d`` discarded, ``r`` resampled, ``b`` bonus, ``p`` plain:
``round_of("aaxdr")`` is a round that drafted four tokens, kept two, rejected one, never tested one and put
its own token in.
"""

from __future__ import annotations

from core.records import Fate, PairInfo, Reply, Round, Settings, Token

FATES = {
    "a": Fate.ACCEPTED,
    "x": Fate.REJECTED,
    "d": Fate.DISCARDED,
    "r": Fate.RESAMPLED,
    "b": Fate.BONUS,
    "p": Fate.PLAIN,
}

PAIR = PairInfo(
    pair="toy",
    target="toy-target",
    draft="toy-draft",
    target_fingerprint="ab" * 32,
    draft_fingerprint="cd" * 32,
    quantization="int8",
    draft_quantization="float32",
    device="cpu",
    drafter="model",
    context_length=8192,
    draft_context_length=2048,
    dtype="bfloat16",
    draft_dtype="float32",
    exactness_note=None,
)


def token(letter: str, index: int, position: int, emitted_index: int | None = None, **changes) -> Token:
    """One token with the figures a token of its fate has; all figures differ, so that a mix-up shows."""
    fate = FATES[letter]
    figures: dict = {}
    if fate is not Fate.DISCARDED:
        figures.update(p=0.5 + index / 64, entropy_p=1.5 + index / 8, p_raw=0.25 + index / 64)
        figures["top_p"] = ((1000 + index, 0.5), (7, 0.25))
    if fate in (Fate.ACCEPTED, Fate.REJECTED):
        figures.update(h=0.5 + index / 128)
        figures.update(q=0.125 + index / 64, u=0.3 + index / 1000, overlap=0.75, entropy_q=1.25 + index / 8)
        figures["top_q"] = ((1000 + index, 0.125),)
    values = dict(
        index=index,
        id=1000 + index,
        text=f" {letter}{index}",
        fate=fate,
        position=position,
        emitted_index=emitted_index,
        domain="prose",
    )
    return Token(**{**values, **figures, **changes})


def round_of(letters: str, index: int = 0, emitted: int = 0, **changes) -> Round:
    """The round that ``letters`` spells; ``emitted`` counts the tokens emitted before it.

    ``changes`` replace fields of the round; ``domain`` goes to all its tokens.
    """
    extra = {"domain": changes.pop("domain")} if "domain" in changes else {}
    tokens, kept = [], emitted
    for i, letter in enumerate(letters):
        emits = letter in "arbp"
        # The target's correction has the position of the token it replaces.
        position = letters.index("x") if letter == "r" else i
        tokens.append(token(letter, i, position, kept if emits else None, **extra))
        kept += emits
    drafted = sum(letter in "axd" for letter in letters)
    values = dict(
        index=index,
        num_draft_tokens=drafted,
        num_draft_tokens_reason="fixed" if drafted else "plain",
        tokens=tuple(tokens),
        text="".join(t.text for t in tokens if t.emitted),
        context_tokens=10 + kept,
        draft_seconds=0.25 if drafted else 0.0,
        target_seconds=0.5,
        overhead_seconds=0.125,
    )
    return Round(**{**values, **changes})


def rounds_of(*words: str, **changes) -> list[Round]:
    """Rounds in order, numbered and counted through; the last one carries no finish reason."""
    rounds: list[Round] = []
    emitted = 0
    for index, letters in enumerate(words):
        rounds.append(round_of(letters, index, emitted, **changes))
        emitted += rounds[-1].emitted
    return rounds


def reply_of(rounds: list[Round], **changes) -> Reply:
    """The finished reply that these rounds make up."""
    emitted = [t for r in rounds for t in r.tokens if t.emitted]
    text = "".join(t.text for t in emitted)
    seconds = sum(r.seconds for r in rounds)
    values = dict(
        token_ids=tuple(t.id for t in emitted),
        text=text,
        visible_chars=len(text),
        tail="",
        finish_reason="eos_token",
        error=None,
        settings=Settings(seed=1),
        pair=PAIR,
        prompt_tokens=10,
        prefill_seconds=0.0625,
        ttft_seconds=0.0625 + rounds[0].seconds if rounds else None,
        seconds=0.0625 + seconds,
        num_rounds=len(rounds),
        reused_tokens=4,
    )
    return Reply(**{**values, **changes})


def assert_identities(row) -> None:
    """What holds of every round, reply, session and domain; ``row`` maps names to counts."""
    assert row["drafted"] == row["accepted"] + row["rejected"] + row["discarded"]
    assert row["emitted"] == row["accepted"] + row["resampled"] + row["bonus"] + row["plain"]


def record(
    store, *words: str, question: str = "Hello?", finish: bool = True, **changes
) -> tuple[str, str, str]:
    """A conversation with one question and one reply of these rounds, stored; returns their three ids."""
    conversation = store.new_conversation("Be brief.")
    message = store.add_message(conversation, "user", question)
    return conversation, message, answer(store, conversation, message, *words, finish=finish, **changes)


def answer(store, conversation: str, question: str, *words: str, finish: bool = True, **changes) -> str:
    """One more stored reply to a question; returns its id. ``changes`` are of the Reply."""
    kind, domain = changes.pop("kind", None), changes.pop("domain", "auto")
    opening = changes.pop("opening", "")
    rounds = changes.pop("rounds", None) or rounds_of(*words)
    reply = reply_of(rounds, **changes)
    reply_id = store.begin_reply(
        conversation,
        question,
        reply.settings,
        reply.pair,
        domain,
        reply.prompt_tokens,
        kind=kind,
        opening=opening,
    )
    for round_ in rounds:
        store.add_round(reply_id, round_)
    if finish:
        store.finish_reply(reply_id, reply)
    return reply_id
