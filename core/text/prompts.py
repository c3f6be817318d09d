"""The prompt suite that ships with the project: what benchmarks and proofs are run on.

``data/prompts/suite.jsonl`` holds one prompt a line. The first twenty alternate code and prose, so
that any even number of prompts from the start is a balanced sample of both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

SUITE = Path(__file__).resolve().parents[2] / "data" / "prompts" / "suite.jsonl"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user message. ``domain`` is what its reply is expected to be: code, prose, maths, structured."""

    id: str
    domain: str
    prompt: str


def load_prompts(path: Path = SUITE) -> list[Prompt]:
    """All prompts of a suite, in the file's order. Raises OSError where the file cannot be read."""
    with open(path, encoding="utf-8") as lines:
        return [Prompt(**json.loads(line)) for line in lines if line.strip()]
