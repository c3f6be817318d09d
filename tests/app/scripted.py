"""A scripted pair whose arithmetic is real and whose two models are invented: to work on the redline view.

``scripted_rounds`` yields rounds over a fixed text with all figures a card shows. Knows no engine and no page
but its own: ``python -m tests.app.scripted`` streams it into the view on 127.0.0.1.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

import gradio as gr

from app.chat.card import locate, token_details
from app.chat.token_view import RedlineView, encode_reply_end, encode_reply_start, encode_round, encode_user
from core.records import Fate, Round, Token

_SCRIPT = (  # (text, monospaced)
    (
        "Speculative decoding lets a small model write ahead and a big one edit, as an editor redlines a "
        "manuscript. The draft proposes a few tokens; the target reads them all in one pass, keeps what it "
        "would have written itself, and corrects the first word it does not agree with. Nothing is lost: "
        "what remains is distributed exactly as the target alone would have written it 🙂.\n\nIn Python, ",
        False,
    ),
    ("`u * q < p`", True),
    (" is the whole of the test:\n\n", False),
    (
        "```python\ndef keep(p: float, q: float, u: float) -> bool:\n"
        '    """Whether a drafted token stands."""\n'
        "    if q == 0:\n        return False\n    return u * q < p\n```",
        True,
    ),
    (
        "\n\nTwo things follow. A draft that agrees often makes the reply faster; a draft that never agrees "
        "makes it slower, but it cannot make it worse. That is why the colours matter: they show, word by "
        "word, whether this draft pays off with this target, on this kind of text.",
        False,
    ),
)


@dataclass(frozen=True)
class Piece:
    """What the script has at one place, and what else could stand there."""

    text: str
    label: str | None = None
    monospaced: bool = False


def scripted_pieces(script: tuple[tuple[str, bool], ...] = _SCRIPT) -> list[Piece]:
    """The script cut into tokens, its last one the end of the text; a token may end inside an emoji."""
    pieces = []
    for text, monospaced in script:
        for part in re.findall(r"\s?[A-Za-z]{1,9}|\n+|\s+(?=\s)|\s?[^\sA-Za-z]|\s", text):
            if ord(part[-1]) > 0xFFFF:
                pieces.append(Piece("", "⟨F0 9F⟩", monospaced))
            pieces.append(Piece(part, None, monospaced))
    return [*pieces, Piece("", "<|im_end|>")]


def scripted_rounds(
    pieces: list[Piece], seed: int = 1, k: int = 4, temperature: float = 0.7
) -> Iterator[Round]:
    """Rounds over ``pieces``, ids being places in it: the arithmetic is real, the two models are invented.

    At each place both have a distribution, most of it on the script's own piece.
    """
    rng = random.Random(seed)
    words = {p.text: i for i, p in enumerate(pieces) if re.fullmatch(" [A-Za-z]+", p.text)}
    end = len(pieces) - 1

    def distributions(place: int) -> tuple[dict[int, float], dict[int, float], float]:
        others = rng.sample(list(words.values()), 11)
        raw = []
        for own in (rng.uniform(8, 60), rng.uniform(0.05, 25)):
            weights = {other: rng.random() ** 5 for other in others} | {place: own}
            raw.append({id: weight / sum(weights.values()) for id, weight in weights.items()})
        p_raw, cooled = raw[0], []
        for weights in raw:
            if temperature == 0:
                best = max(weights, key=weights.get)
                cooled.append({id: float(id == best) for id in weights})
            else:
                powers = {id: weight ** (1 / temperature) for id, weight in weights.items()}
                cooled.append({id: power / sum(powers.values()) for id, power in powers.items()})
        return cooled[0], cooled[1], p_raw

    def draw(weights: dict[int, float]) -> int:
        return rng.choices(list(weights), list(weights.values()))[0]

    def entropy(weights: dict[int, float]) -> float:
        return -sum(w * math.log(w) for w in weights.values() if w > 0)

    def top(weights: dict[int, float]) -> tuple[tuple[int, float], ...]:
        return tuple(sorted(weights.items(), key=lambda pair: -pair[1])[:10])

    place = emitted = 0
    for index in itertools.count():
        count = min(k, end - place)
        models = [distributions(place + j) for j in range(count + 1)]
        tokens: list[Token] = []

        def put(
            id: int, position: int, fate: Fate, *, u: float | None = None, tested: bool = True,
            q: bool = True, place: int = place, models: list = models, tokens: list[Token] = tokens,
        ) -> None:  # fmt: skip
            nonlocal emitted
            p, draft, p_raw = models[position]
            kept = fate not in (Fate.REJECTED, Fate.DISCARDED)
            tokens.append(
                Token(
                    index=len(tokens), id=id, text=pieces[id].text, label=pieces[id].label, fate=fate,
                    position=position, monospaced=pieces[place + position].monospaced,
                    emitted_index=emitted if kept else None,
                    p=p.get(id, 0.0) if tested else None, p_raw=p_raw.get(id, 0.0) if tested else None,
                    entropy_p=entropy(p) if tested else None, top_p=top(p) if tested else (),
                    q=draft.get(id, 0.0) if q else None, entropy_q=entropy(draft) if q else None,
                    top_q=top(draft) if q else (), u=u,
                    overlap=sum(min(p[i], draft.get(i, 0.0)) for i in p) if tested and q else None,
                )
            )  # fmt: skip
            emitted += kept

        drafts = [draw(models[j][1]) for j in range(count)]
        accepted, stopped = 0, False
        for j, id in enumerate(drafts):
            u = None if temperature == 0 else rng.random()
            p, q, _ = models[j]
            if stopped:
                put(id, j, Fate.DISCARDED, tested=False)
            elif p.get(id, 0.0) > (0 if u is None else u * q[id]):
                put(id, j, Fate.ACCEPTED, u=u)
                accepted, stopped = accepted + 1, id == end
            else:
                put(id, j, Fate.REJECTED, u=u)
                stopped = True
        if drafts and accepted < count and tokens[accepted].fate is Fate.REJECTED:
            p, q, _ = models[accepted]
            put(draw({i: max(0.0, w - q.get(i, 0.0)) for i, w in p.items()}), accepted, Fate.RESAMPLED)
        elif not stopped:
            put(draw(models[count][0]), count, Fate.BONUS if drafts else Fate.PLAIN, q=False)
        place += sum(token.emitted for token in tokens)
        done = place > end or any(token.emitted and token.id == end for token in tokens)
        yield Round(
            index=index, num_draft_tokens=k, num_draft_tokens_reason="fixed" if k else "plain",
            tokens=tuple(tokens), text="".join(token.text for token in tokens if token.emitted),
            context_tokens=emitted, draft_seconds=0.0, target_seconds=0.0, overhead_seconds=0.0,
            finish_reason="eos_token" if done else None,
        )  # fmt: skip
        if done:
            return


def demo() -> gr.Blocks:
    """A page with the view and buttons that stream a scripted reply into it."""
    pieces, kept = scripted_pieces(), {}

    def details(key: str, i: int) -> dict:
        rounds, temperature = kept[key]
        texts = [piece.text or piece.label for piece in pieces]
        return token_details(*locate(rounds, i), temperature, lambda ids: [texts[id] for id in ids])

    def stream(value: str, k: float, temperature: float) -> Iterator[str]:
        key = f"reply-{len(kept)}"
        rounds, _ = kept[key] = [], temperature
        value += encode_user("Explain speculative decoding to me, with the test in Python.")
        value += encode_reply_start(key, temperature, "" if k else "plain, K = 0")
        for round in scripted_rounds(pieces, seed=len(kept), k=int(k), temperature=temperature):
            rounds.append(round)
            value += encode_round(round)
            yield value
            time.sleep(0.05)
        yield value + encode_reply_end(finish_reason="eos_token")

    with gr.Blocks(title="Redline view", analytics_enabled=False) as page:
        view = RedlineView(details=details, elem_id="redline")
        with gr.Row():
            k = gr.Slider(0, 8, 4, step=1, label="K")
            temperature = gr.Slider(0, 2, 0.7, step=0.1, label="Temperature")
            start, clear = gr.Button("Stream", elem_id="stream"), gr.Button("Clear", elem_id="clear")
        start.click(stream, [view, k, temperature], view, show_progress="hidden")
        clear.click(lambda: "", None, view)
    return page


if __name__ == "__main__":
    demo().launch(server_name="127.0.0.1", run_history=False, quiet=False)
