"""The documentation's commands on machines that are not here: each runs, or is refused in a sentence."""

from __future__ import annotations

import re

import pytest

from tests.core.machines import MACHINES, Machine, commands, main, planned

PAIR, BY_NAME, GGUF = commands()[1:]
CARDS = [machine for machine in MACHINES if machine.card]


def test_these_are_the_commands_of_the_documentation():
    assert commands() == [
        "app.py",
        "app.py --pair qwen2.5-7b",
        "app.py --target Qwen/Qwen2.5-7B-Instruct --draft Qwen/Qwen2.5-0.5B-Instruct --quantize nf4",
        "app.py --target ~/models/big.gguf --draft ~/models/small.gguf --quantize int8",
    ]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize("command", commands())
def test_it_runs_or_says_what_would(command, machine):
    said = planned(command, machine)
    runs = re.fullmatch(r"the embedded pair .*|(cuda|cpu): (\S+ \S+ \w+)( \+ \S+ \S+ \w+), [\d.]+ GB", said)
    assert runs or re.search("choose .*[.]$", said), said
    assert "*" not in said  # all of the lean decoder's families


@pytest.mark.parametrize(
    "machine", [one for one in CARDS if one.capability > (7, 0) and one.card > 8], ids=lambda one: one.name
)
def test_a_gguf_file_in_int8_is_llm_int8_on_a_card(machine):
    """README's third example, which was refused on every one of them."""
    assert re.match(r"cuda: big llm-int8 \w+ \+ small none \w+, ", planned(GGUF, machine))


def test_what_a_gguf_file_is_elsewhere():
    assert planned(GGUF, Machine(0)).startswith("cpu: big int8 float32 + small int8 float32, ")
    assert "quantise (--quantize nf4" in planned(GGUF, Machine(8))
    assert planned(GGUF.replace("int8", "nf4"), Machine(8)).startswith("cuda: big nf4 bfloat16 + small none")
    # Not where cards have no int8 products; and where torch has no kernels for the card, nothing runs on it.
    assert "choose --quantize nf4" in planned(GGUF, Machine(16, (6, 1), "cu126"))


def test_main_memory_is_needed_for_a_part_of_a_model_at_a_time():
    """Where it was short the target left the lean decoder; a GGUF file needed four bytes of it a weight."""
    for command in (PAIR, BY_NAME, GGUF):
        assert planned(command, Machine(16, (7, 5), memory=2)).startswith("cuda: ")
        assert "too little memory" in planned(command, Machine(16, (7, 5), memory=1))


def test_the_table(capsys):
    main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(commands()) * (1 + len(MACHINES)) and lines[0] == "app.py"
