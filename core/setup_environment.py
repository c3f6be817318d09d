"""Builds ``.venv``: Python's own venv with pip in it, and in that what Redline needs.

Only torch takes thought: what PyPI has for Linux is the CUDA build, several gigabytes that serve nobody
without an NVIDIA card. uv knows PyTorch's own index and which build fits a card's driver, so uv installs: the
one on PATH, or one that pip puts into ``.venv``. pip installs, as it is configured, where the user's settings
of pip say something that uv would not read, where uv is not to be had, and where uv fails.

Runs before anything is installed, so it knows the standard library alone, and no index by its address. Each
step leaves alone what is there already: a set-up that was interrupted is taken up by running it again.

Run: ``python -m core.setup_environment`` (``make setup`` does, and marks that it came to the end).
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = str(VENV / ("Scripts" if os.name == "nt" else "bin") / "python")
REQUIREMENTS = ["--constraint", "constraints.txt", "--editable", ".[test]"]
PIP = [PYTHON, "-m", "pip"]
QUIET = ["--quiet", "--disable-pip-version-check"]  # of pip
TORCH = "import importlib.metadata as m; print(m.version('torch'))"

# pip's settings that decide what is installed or how it is reached; uv reads none of them.
DECISIVE = (
    "index-url",
    "extra-index-url",
    "find-links",
    "no-index",
    "constraint",
    "proxy",
    "cert",
    "client-cert",
    "trusted-host",
)
BEGUN = "Installing what Redline needs into .venv; the first time this takes minutes"
ON_LINUX = ", on Linux in the CUDA build of several gigabytes"
PATIENCE = 15  # seconds for PyTorch's index to answer


class SetupError(Exception):
    """One sentence for whoever ran the set-up."""


def main() -> None:
    try:
        system = platform.system()
        # Windows may name the processor, where what counts is what this Python was built for.
        machine = sysconfig.get_platform() if system == "Windows" else platform.machine()
        if reason := no_torch_here(system, machine, platform.mac_ver()[0]):
            raise SetupError(reason)
        make_venv()
        install()
    except SetupError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("Broken off: the same command goes on from here.")


def no_torch_here(system: str, machine: str, macos: str) -> str | None:
    """Why torch has no build for such a computer, or None. Linux is let through: there are too many kinds."""
    if system == "Darwin" and machine == "x86_64":
        return (
            "torch is no longer made for Intel Macs, so Redline cannot run on one. On Apple silicon choose "
            "an arm64 Python: make setup PYTHON=/opt/homebrew/bin/python3"
        )
    major = int(macos.split(".")[0] or 0)
    if system == "Darwin" and 10 < major < 14:  # a Python that was built long ago calls all of them 10.16
        return f"Redline needs macOS 14 or newer, because torch does; this is macOS {macos}."
    if system == "Windows" and machine == "win-arm64":
        return "torch is not made for Windows on ARM: choose a Python for x86-64 with make setup PYTHON=..."
    return None


def make_venv() -> None:
    if not _succeeds([*PIP, "--version"]) and _run([sys.executable, "-m", "venv", "--clear", str(VENV)]):
        raise SetupError(f"{sys.executable} could not make .venv; what it says stands above.")


def install() -> None:
    """By uv or pip; says in one line which torch comes from where. Raises SetupError."""
    if settings := decisive_settings(_output([*PIP, "config", "list"])):
        _say(f"{BEGUN}. pip fetches it, torch too, as its settings here say: {', '.join(settings)}.")
    elif uv := find_uv():
        backend, sentence = torch_backend(uv)
        _say(sentence)
        if not _run([*uv, "install", "--quiet", "--python", PYTHON, *backend, *REQUIREMENTS]):
            return
        _say("uv could not install everything, so pip tries.")
    else:
        _say(f"{BEGUN}. uv is not to be had, so torch comes from PyPI{ON_LINUX}.")
    if _run([*PIP, "install", *QUIET, *REQUIREMENTS]):
        raise SetupError("pip could not install everything; what it says stands above.")


def decisive_settings(listed: str) -> list[str]:
    """The names of those in ``pip config list`` that uv would have to know, for installing."""
    found = re.findall(r"^(?:global|install|:env:)\.([\w-]+)=", listed, re.MULTILINE)
    return sorted(set(found).intersection(DECISIVE))


def find_uv() -> list[str] | None:
    """``uv pip`` as a command: from PATH or of ``.venv``, where pip puts it if it must; None if it cannot."""
    own = [PYTHON, "-m", "uv", "pip"]
    for uv in ([shutil.which("uv") or "uv", "pip"], own):
        if "--torch-backend" in _output([*uv, "install", "--help"]):  # it works, and is not from before 2025
            return uv
    # Never from its source, which takes a compiler and many minutes.
    fetch = [*PIP, "install", *QUIET, "--only-binary", ":all:", "--retries", "1", "--upgrade", "uv"]
    return own if _succeeds(fetch) else None


def torch_backend(uv: list[str]) -> tuple[list[str], str]:
    """uv's option that names torch's build, or none where that is settled, and what to say about it."""
    card, pin = has_nvidia_card(), pinned_torch()
    build = wanted_build(platform.system(), card)
    if "UV_TORCH_BACKEND" in os.environ:
        return [], f"{BEGUN}. torch comes as UV_TORCH_BACKEND says."
    if build is None or _output([PYTHON, "-c", TORCH]).strip().split("+")[0] == pin:
        return [], f"{BEGUN}."
    option = ["--python", PYTHON, "--torch-backend", build]
    # Where nothing answers uv would try again and again, for up to minutes.
    asked = [*uv, "install", "--dry-run", "--no-deps", *option, f"torch=={pin}"]
    if not _succeeds(asked, seconds=PATIENCE, UV_HTTP_RETRIES="0", UV_HTTP_TIMEOUT=str(PATIENCE)):
        return [], f"{BEGUN}. PyTorch's index gives no build here, so torch comes from PyPI{ON_LINUX}."
    which = "the CUDA build that fits this NVIDIA card" if card else "the CPU build: there is no NVIDIA card"
    return option[2:], f"{BEGUN}. torch comes in {which}."


def wanted_build(system: str, card: bool) -> str | None:
    """uv's name for it; None where PyPI's is the one: the CPU build on Windows, the only one on a Mac."""
    if system in ("Linux", "Windows") and card:
        return "auto"
    return "cpu" if system == "Linux" else None


def has_nvidia_card() -> bool:
    """Whether a driver for one runs: without it no CUDA build could use the card."""
    return os.path.exists("/proc/driver/nvidia/version") or "GPU" in _output(["nvidia-smi", "-L"])


def pinned_torch() -> str:
    (pin,) = re.findall(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    return pin


def _say(sentence: str) -> None:
    print(sentence, flush=True)


def _run(command: list[str]) -> int:
    """Its exit status; what it prints is seen."""
    return subprocess.run(command, cwd=ROOT).returncode


def _output(command: list[str]) -> str:
    """What it prints, or nothing where it cannot be run or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _succeeds(command: list[str], seconds: float | None = None, **variables: str) -> bool:
    """Whether it does, in that time; what it prints is not seen."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | variables, capture_output=True, timeout=seconds
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


if __name__ == "__main__":
    main()
