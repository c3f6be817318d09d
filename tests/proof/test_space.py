"""A Space's environment, built from requirements.txt alone, and the app started in it as a Space starts it.

Run: ``make proof``. It takes minutes and some 2 GB of disk, and pip downloads what it has not cached. torch
alone is held to the version that constraints.txt pins, so that pip finds the CPU build which the tests use
already: the newest, which a Space would take, comes with several gigabytes for GPUs.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = dict(os.environ)  # before any test closes pip's network
NOT_A_SPACES_OWN = ("REDLINE_", "GRADIO_", "PYTHONPATH", "VIRTUAL_ENV")
SPACES = "spaces==0.51.3"  # what ZeroGPU has installed: its internals are stood in for where there is no GPU

pytestmark = pytest.mark.proof


class Space:
    """A checkout with an environment of its own. ``python`` is that environment's."""

    def __init__(self, folder: Path):
        self.checkout, self.environment = folder / "app", folder / "environment"
        self.python = self.environment / ("Scripts" if os.name == "nt" else "bin") / "python"
        ours = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(ours, cwd=ROOT, check=True, capture_output=True, text=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
                (self.checkout / name).write_bytes((ROOT / name).read_bytes())
        subprocess.run([sys.executable, "-m", "venv", str(self.environment)], check=True)
        self.constraint = folder / "constraint.txt"
        pinned = (ROOT / "constraints.txt").read_text().splitlines()
        self.constraint.write_text("\n".join(line for line in pinned if line.startswith("torch==")))
        self.install("-r", str(self.checkout / "requirements.txt"))

    def variables(self, **more: str) -> dict[str, str]:
        own = {k: v for k, v in ENVIRONMENT.items() if not k.startswith(NOT_A_SPACES_OWN)}
        return {**own, "PYTHONUNBUFFERED": "1", **more}

    def install(self, *what: str) -> None:
        command = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
        variables = self.variables(PIP_CONSTRAINT=str(self.constraint))
        finished = subprocess.run(command, env=variables, capture_output=True, text=True)
        assert finished.returncode == 0, finished.stderr


@pytest.fixture(scope="module")
def space() -> Iterator[Space]:
    with tempfile.TemporaryDirectory(prefix="redline-space-") as folder:
        yield Space(Path(folder))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_a_space_installs_and_answers(
    space: Space, tmp_path: Path, embedded_home: Path, embedded_folder: Path
):
    port, log = free_port(), tmp_path / "app.log"
    variables = space.variables(
        SPACE_ID="someone/redline",
        SYSTEM="spaces",
        GRADIO_SERVER_PORT=str(port),
        REDLINE_HOME=str(embedded_home),
        HF_HUB_OFFLINE="1",
    )
    with open(log, "w") as output:
        process = subprocess.Popen(
            [str(space.python), "app.py"],
            cwd=space.checkout,
            env=variables,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        use(f"http://127.0.0.1:{port}", process, log)
    finally:
        process.terminate()
        process.wait(30)
    # A Space's image holds ``spaces`` beside requirements.txt. Without it a thread of Gradio's, which would
    # reload the app for its developer, ends with this and nothing else happens.
    said = log.read_text()
    assert said.count("Traceback") == said.count("package is required to run hot-reloading in Spaces"), said
    # Case DB-05: a temporary folder is no place that lasts. The page says the same
    # (tests/app/serving/test_place.py).
    assert "is lost when it restarts" in said
    assert (space.checkout / "data" / "redline.db").exists()


def use(url: str, process: subprocess.Popen, log: Path) -> None:
    """What a visitor's program does; everything listens on 0.0.0.0 there."""
    deadline = time.monotonic() + 300

    def waiting() -> None:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)

    while f"Redline is at {url}" not in log.read_text():
        waiting()
    while True:
        try:
            page = urllib.request.urlopen(url, timeout=60).read().decode()
            break
        except OSError:
            waiting()
    assert "Redline" in page
    client = Client(url, verbose=False)
    while not (pair := client.predict(api_name="/pair"))["loaded"]:
        assert "could not" not in pair["sentence"], pair["sentence"]
        waiting()
    assert (pair["pair"], pair["device"]) == ("embedded", "cpu")

    asked = {"max_new_tokens": 24, "seed": 3, "api_name": "/chat"}
    reply = client.predict("Write a haiku about rivers.", **asked)
    assert reply.strip() and client.predict("Write a haiku about rivers.", **asked) == reply
    plainly = client.predict("Say hello.", temperature=0, num_draft_tokens=0, **asked)
    assert client.predict("Say hello.", temperature=0, **asked) == plainly
    with pytest.raises(AppError, match="Temperature must be a number from 0 to 2"):
        client.predict("Hello.", temperature=9, api_name="/chat")
    client.close()


def test_replies_cross_the_real_zerogpu_wrapper(space: Space):
    """Case HF-02 with the package ``spaces`` itself, up to where a GPU would be touched."""
    space.install(SPACES)
    finished = subprocess.run(
        [str(space.python), "-m", "tests.proof.on_zero_gpu"],
        cwd=space.checkout,
        env=space.variables(SPACES_ZERO_GPU="true"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.strip().endswith("everything as expected"), finished.stdout + finished.stderr
