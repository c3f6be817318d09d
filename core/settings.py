"""From what a person typed to checked ``Settings``: one clear sentence for whatever cannot be used.

Knows the limits and their wording, nothing of the page or the terminal that asks. Numbers may
arrive as text, ints or whole floats, as form fields deliver them. See SP-01 and SP-02 in tests.
"""

from __future__ import annotations

import math
import secrets

from core.records import EXACT_VERIFIERS, Settings

MAX_DRAFT_TOKENS = 16
MAX_NEW_TOKENS = 8192
MAX_STOPS, MAX_STOP_LENGTH = 32, 500
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.1, 10.0
# Numbers that lossy rules take: the usual one, the least and the most (``core.verify.lossy``); None: it takes
# none.
LOSSY: dict[str, tuple[float, float, float] | None] = {
    "greedy": None,
    "threshold": (0.3, 0.0, 1.0),
    "draft-ratio": (0.9, 0.7, 0.99),
    "target-ratio": (0.9, 0.7, 0.99),
    "typical": (0.09, 0.001, 1.0),
}
VERIFIERS = (*EXACT_VERIFIERS, *LOSSY)
MAX_TREE_WIDTH = 8
SUGGESTIBLE = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # what a model may suggest
MAX_SEED = 2**63 - 1  # the largest integer SQLite stores
_DEFAULTS = Settings()


class SettingsError(ValueError):
    """A setting that cannot be used; the message is one sentence that says what to do."""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _number(name: str, value: object, low: float, high: float) -> float:
    try:
        number = float(str(value).strip())
    except ValueError:
        number = math.nan
    if not low <= number <= high:
        raise SettingsError(f"{name} must be a number from {low:g} to {high:g}, not {_shown(value)}.")
    return number


def parse_integer(name: str, value: object, low: int, high: int) -> int:
    """A whole number, also as a form field delivers it. Raises SettingsError with its limits."""
    text = str(value).strip()
    try:
        number = int(text)
    except ValueError:
        try:
            as_float = float(text)
        except ValueError:
            as_float = math.nan
        number = int(as_float) if math.isfinite(as_float) and as_float.is_integer() else None
    if number is None or not low <= number <= high:
        raise SettingsError(f"{name} must be a whole number from {low} to {high}, not {_shown(value)}.")
    return number


def _choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise SettingsError(f"{name} must be one of {', '.join(choices)}, not {_shown(value)}.")
    return value


def _threshold(value: object, verifier: str) -> float | None:
    """The number of the lossy rule ``verifier``, its usual one for a blank field; None if it takes none."""
    if (limits := LOSSY.get(verifier)) is None:
        return None
    usual, low, high = limits
    blank = value is None or not str(value).strip()
    return _number(f"The threshold of the rule {verifier}", usual if blank else value, low, high)


def parse_flag(name: str, value: object) -> bool:
    """A switch; None is off. Raises SettingsError for what is neither true nor false: "no" would be on."""
    if value not in (True, False, None):
        raise SettingsError(f"{name} must be true or false, not {_shown(value)}.")
    return bool(value)


def parse_seed(value: object) -> int:
    """A seed from a form field: blank or -1 draws a random one (shown and stored with the reply).

    Raises SettingsError for fractions, other negatives and numbers SQLite cannot store.
    """
    if value is None or str(value).strip() in ("", "-1", "-1.0"):
        return secrets.randbelow(2**31)
    return parse_integer("Seed", value, 0, MAX_SEED)


def parse_stop(value: object) -> tuple[str, ...]:
    """Stop strings from a list, or from text with one stop string a line; empty ones are dropped.

    Raises SettingsError for more, or longer ones, than a reply is watched for.
    """
    if value is None:
        return ()
    lines = value.replace("\r\n", "\n").split("\n") if isinstance(value, str) else value
    if not isinstance(lines, (list, tuple)) or not all(isinstance(line, str) for line in lines):
        raise SettingsError(f"Stop strings must be text or a list of texts, not {_shown(value)}.")
    stops = tuple(line for line in dict.fromkeys(lines) if line)
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise SettingsError(
            f"There may be up to {MAX_STOPS} stop strings of up to {MAX_STOP_LENGTH} characters each;"
            " please use fewer or shorter ones."
        )
    return stops


def parse_settings(
    *,
    temperature: object = _DEFAULTS.temperature,
    top_k: object = _DEFAULTS.top_k,
    top_p: object = _DEFAULTS.top_p,
    min_p: object = _DEFAULTS.min_p,
    repetition_penalty: object = _DEFAULTS.repetition_penalty,
    num_draft_tokens: object = _DEFAULTS.num_draft_tokens,
    auto_draft_tokens: object = _DEFAULTS.auto_draft_tokens,
    max_new_tokens: object = _DEFAULTS.max_new_tokens,
    stop: object = (),
    seed: object = None,
    verifier: object = _DEFAULTS.verifier,
    acceptance_threshold: object = None,
    tree_width: object = _DEFAULTS.tree_width,
) -> Settings:
    """Checked settings. Raises SettingsError with one sentence naming the first bad field."""
    return Settings(
        temperature=_number("Temperature", temperature, 0, 2),
        top_k=parse_integer("Top-k", 0 if top_k in (None, "") else top_k, 0, 2**31 - 1),
        top_p=_number("Top-p", 1.0 if top_p in (None, "") else top_p, 0, 1),
        min_p=_number("Min-p", 0.0 if min_p in (None, "") else min_p, 0, 1),
        repetition_penalty=_number(
            "Repetition penalty",
            1.0 if repetition_penalty in (None, "") else repetition_penalty,
            MIN_REPETITION_PENALTY,
            MAX_REPETITION_PENALTY,
        ),
        num_draft_tokens=(most := parse_integer("Draft tokens (K)", num_draft_tokens, 0, MAX_DRAFT_TOKENS)),
        auto_draft_tokens=parse_flag("Automatic K", auto_draft_tokens) and most > 0,
        max_new_tokens=parse_integer("Maximum new tokens", max_new_tokens, 1, MAX_NEW_TOKENS),
        stop=parse_stop(stop),
        seed=parse_seed(seed),
        verifier=_choice("Verifier", verifier, VERIFIERS),
        acceptance_threshold=_threshold(acceptance_threshold, verifier),
        tree_width=parse_integer("Tree width", tree_width, 1, MAX_TREE_WIDTH),
    )
