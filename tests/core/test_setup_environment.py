"""What the set-up decides on machines that are not there: which commands it gives, and what it says."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field

import pytest

from core import setup_environment
from core.setup_environment import PIP, PYTHON, REQUIREMENTS, decisive_settings, no_torch_here, pinned_torch

PIP_SAYS = {
    "none": ":env:.disable-pip-version-check='1'\nglobal.timeout='60'\n",
    "own index": "global.extra-index-url='file:///wheels/simple'\n:env:.find-links='/wheels'\n",
}


@dataclass
class Computer:
    """Answers in the place of every command that the set-up gives, and remembers them."""

    system: str = "Linux"
    card: bool = False
    venv: bool = True
    uv_on_path: str = "  --torch-backend <BACKEND>"  # of its help
    uv_can_be_had: bool = True
    torch: str = ""
    pip_settings: str = PIP_SAYS["none"]
    index_answers: bool = True
    failing: tuple[str, ...] = ()  # of "venv", "uv", "pip"
    given: list[list[str]] = field(default_factory=list)

    def succeeds(self, command: list[str], seconds: float | None = None, **variables: str) -> bool:
        if "--dry-run" in command:
            assert seconds and variables["UV_HTTP_RETRIES"] == "0"
            return self.index_answers
        if command[:3] == PIP and "install" in command:
            self.given.append(command)
            return self.uv_can_be_had
        assert command == [*PIP, "--version"]
        return self.venv

    def output(self, command: list[str]) -> str:
        if command[0] == "nvidia-smi":
            return "GPU 0: NVIDIA L4\n" if self.card else ""
        if command[-1] == "--help":
            return self.uv_on_path if command[0] == "/bin/uv" else ""
        return self.pip_settings if command[-2:] == ["config", "list"] else self.torch

    def run(self, command: list[str]) -> int:
        self.given.append(command)
        kind = "venv" if "venv" in command else "uv" if "--python" in command else "pip"
        return int(kind in self.failing)


@pytest.fixture
def set_up(monkeypatch, capsys):
    """Runs the set-up on such a computer; gives what it installed by, with which build, and what it said."""

    def on(computer: Computer) -> str:
        monkeypatch.setattr(setup_environment.platform, "system", lambda: computer.system)
        monkeypatch.setattr(setup_environment.platform, "machine", lambda: "arm64")
        monkeypatch.setattr(setup_environment.platform, "mac_ver", lambda: ("15.1", "", ""))
        monkeypatch.setattr(setup_environment.os.path, "exists", lambda path: False)
        monkeypatch.setattr(setup_environment.shutil, "which", lambda name: "/bin/uv")
        for name in ("succeeds", "output", "run"):
            monkeypatch.setattr(setup_environment, f"_{name}", getattr(computer, name))
        setup_environment.main()
        return capsys.readouterr().out

    monkeypatch.delenv("UV_TORCH_BACKEND", raising=False)
    return on


def by_uv(*backend: str, uv: tuple[str, ...] = ("/bin/uv",)) -> list[str]:
    return [*uv, "pip", "install", "--quiet", "--python", PYTHON, *backend, *REQUIREMENTS]


BY_PIP = [*PIP, "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS]


@pytest.mark.parametrize(
    "system, card, backend, says",
    [
        ("Linux", False, ("--torch-backend", "cpu"), "the CPU build: there is no NVIDIA card"),
        ("Linux", True, ("--torch-backend", "auto"), "the CUDA build that fits this NVIDIA card"),
        ("Windows", True, ("--torch-backend", "auto"), "the CUDA build that fits this NVIDIA card"),
        ("Windows", False, (), "takes minutes.\n"),  # what PyPI has is the CPU build
        ("Darwin", False, (), "takes minutes.\n"),
    ],
)
def test_torch_comes_in_the_build_that_fits(set_up, system, card, backend, says):
    computer = Computer(system=system, card=card)
    said = set_up(computer)
    assert computer.given == [by_uv(*backend)]
    assert says in said and said.count("\n") == 1


@pytest.mark.parametrize("card", [False, True])
def test_where_pytorchs_index_does_not_answer_torch_is_pypis(set_up, card):
    computer = Computer(card=card, index_answers=False)
    said = set_up(computer)
    assert computer.given == [by_uv()]
    assert "gives no build here, so torch comes from PyPI, on Linux in the CUDA build" in said


FITTING = ("--torch-backend", "cpu")


@pytest.mark.parametrize("installed, backend", [("{}+cpu", ()), ("{}", ()), ("2.8.0", FITTING)])
def test_a_torch_that_is_there_is_not_fetched_again(set_up, installed, backend):
    computer = Computer(torch=installed.format(pinned_torch()) + "\n")
    set_up(computer)
    assert computer.given == [by_uv(*backend)]


@pytest.mark.parametrize("on_path", ["", "  --python <PYTHON>"], ids=["none", "old"])
def test_uv_is_fetched_where_there_is_none_that_can(set_up, on_path):
    computer = Computer(uv_on_path=on_path)
    set_up(computer)
    fetched, installed = computer.given
    assert fetched[-1] == "uv" and ["--only-binary", ":all:"] == fetched[6:8]
    assert installed == by_uv(*FITTING, uv=(PYTHON, "-m", "uv"))


def test_without_uv_pip_installs(set_up):
    computer = Computer(uv_on_path="", uv_can_be_had=False)
    assert "uv is not to be had" in set_up(computer)
    assert computer.given[1:] == [BY_PIP]


def test_where_uv_fails_pip_installs(set_up):
    computer = Computer(failing=("uv",))
    assert set_up(computer).endswith("so pip tries.\n")
    assert computer.given == [by_uv(*FITTING), BY_PIP]


def test_pips_own_settings_are_kept(set_up):
    computer = Computer(pip_settings=PIP_SAYS["own index"])
    said = set_up(computer)
    assert computer.given == [BY_PIP]
    assert said.endswith("as its settings here say: extra-index-url, find-links.\n")


def test_uvs_own_setting_is_kept(set_up, monkeypatch):
    monkeypatch.setenv("UV_TORCH_BACKEND", "cu128")
    computer = Computer()
    assert "as UV_TORCH_BACKEND says" in set_up(computer)
    assert computer.given == [by_uv()]


@pytest.mark.parametrize(
    "listed, names",
    [
        (PIP_SAYS["none"], []),
        ("install.no-index='true'\nglobal.proxy='http://proxy.example'", ["no-index", "proxy"]),
        ("download.find-links='/wheels'\nglobal.note=''", []),  # another command's
        (":env:.index-url='https://somebody:cert=@mirror.example/simple'", ["index-url"]),
    ],
)
def test_settings_that_uv_would_not_read(listed, names):
    assert decisive_settings(listed) == names


def test_a_venv_that_works_is_kept_and_a_broken_one_made_anew(set_up):
    computer = Computer(venv=False)
    set_up(computer)
    assert computer.given[0][:4] == [sys.executable, "-m", "venv", "--clear"]
    assert computer.given[1:] == [by_uv(*FITTING)]


@pytest.mark.parametrize(
    "failing, what", [(("venv",), "could not make .venv"), (("uv", "pip"), "pip could not install")]
)
def test_what_fails_ends_in_a_sentence(set_up, failing, what):
    with pytest.raises(SystemExit, match=what):
        set_up(Computer(venv=False, failing=failing))


@pytest.mark.parametrize(
    "computer, reason",
    [
        (("Darwin", "x86_64", "15.1"), "Intel Macs"),
        (("Darwin", "arm64", "13.7.2"), "macOS 14 or newer, because torch does; this is macOS 13.7.2"),
        (("Darwin", "arm64", "14.0"), None),
        (("Darwin", "arm64", "10.16"), None),
        (("Windows", "win-arm64", ""), "for x86-64"),
        (("Windows", "win-amd64", ""), None),
        (("Linux", "aarch64", ""), None),
    ],
)
def test_computers_that_torch_is_not_made_for(computer, reason):
    found = no_torch_here(*computer)
    assert found is None if reason is None else re.search(reason, found)


def test_a_command_that_is_not_there_or_fails_says_nothing():
    assert setup_environment._output(["no-such-program-of-redlines"]) == ""
    assert setup_environment._output([sys.executable, "-c", "print(1); raise SystemExit(1)"]) == ""
    assert setup_environment._output([sys.executable, "-c", "print(1)"]).strip() == "1"
    assert not setup_environment._succeeds(["no-such-program-of-redlines"])
    assert not setup_environment._succeeds([sys.executable, "-c", "import time; time.sleep(9)"], seconds=0.1)
    assert setup_environment._succeeds(
        [sys.executable, "-c", "import os; assert os.environ['REDLINE_X'] == '1'"], REDLINE_X="1"
    )
