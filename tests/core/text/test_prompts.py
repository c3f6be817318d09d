from __future__ import annotations

from collections import Counter

from core.records import DOMAINS
from core.text.prompts import load_prompts


def test_suite_is_large_enough_and_its_entries_differ():
    prompts = load_prompts()
    assert len(prompts) >= 40
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert len({prompt.prompt for prompt in prompts}) == len(prompts)
    assert all(prompt.prompt == prompt.prompt.strip() != "" for prompt in prompts)


def test_first_twenty_alternate_code_and_prose():
    assert [prompt.domain for prompt in load_prompts()[:20]] == ["code", "prose"] * 10


def test_every_domain_but_other_is_covered():
    counts = Counter(prompt.domain for prompt in load_prompts())
    assert set(counts) == set(DOMAINS) - {"other"}
    assert min(counts.values()) >= 5


def test_a_suite_of_ones_own_is_read_in_order_and_blank_lines_are_skipped(tmp_path):
    path = tmp_path / "mine.jsonl"
    lines = [
        '{"id": "b", "domain": "prose", "prompt": "Zürich?"}',
        "",
        '{"id": "a", "domain": "code", "prompt": "x"}',
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert [(prompt.id, prompt.prompt) for prompt in load_prompts(path)] == [("b", "Zürich?"), ("a", "x")]
