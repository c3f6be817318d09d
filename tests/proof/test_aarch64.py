"""The embedded pair on a 64-bit ARM processor that qemu plays: it loads, and writes what it writes here.

Run: ``make proof``, on Debian 12, as any user. It takes ten minutes, most of them
for playing the processor. Everything is set up without touching the system, and comes from the network:

- Debian's qemu-user-static (63 MB), unless a qemu-aarch64 is installed;
- Debian's Python 3.11 and its libraries for arm64 (11 MB);
- the wheels for it: torch 146 MB, all others together 40 MB.

Unpacked that is 1.4 GB, with 0.3 GB for a copy of the model. The folder that ``REDLINE_AARCH64`` names
keeps it for the next run; without one it goes into a temporary folder and is removed. Where qemu or the
packages cannot be had, the test is skipped and says why.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from core.pairs.pair import Pair
from tests.proof.on_aarch64 import TOKENS, score, write

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = dict(os.environ)  # before any test closes pip's network

PYTHON = "3.11"  # Debian 12's
SYSTEM = f"""
    libc6 libgcc-s1 libstdc++6 libgomp1 zlib1g libexpat1 libffi8 libssl3 libsqlite3-0 libbz2-1.0 liblzma5
    libuuid1 libcrypt1 libpython{PYTHON}-minimal libpython{PYTHON}-stdlib python{PYTHON}-minimal
""".split()
# The last whose wheel for aarch64 on PyPI is the CPU's: later ones want gigabytes of CUDA before they import.
TORCH = "torch==2.10.0"
# With what they import, since pip reads the conditions of dependencies as of the machine it runs on.
WHEELS = """
    transformers tokenizers safetensors huggingface_hub numpy filelock typing_extensions sympy mpmath networkx
    jinja2 markupsafe regex packaging pyyaml fsspec tqdm httpx2 httpcore2 anyio h11 idna truststore psutil
""".split()
# Arm's Neoverse N1 (2019): what most 64-bit ARM processors have. It knows no bfloat16, which qemu plays so
# slowly that a product takes seconds.
CPU = "neoverse-n1"

# Mean KL between the two, in nats. Layers in 4 bits are within 0.001 of float32, layers in int8 within 0.006
# (docs/LOG.md), and the two processors may run different forms; a wrong kernel is off by whole nats.
MOST_KL = 0.01

pytestmark = pytest.mark.proof


class Unavailable(Exception):
    """Something cannot be had here; the message says what."""


def command(what: str, *line: str, **variables: str) -> str:
    """What the command printed. ``what`` begins the sentence that says it failed."""
    try:
        done = subprocess.run(line, env=ENVIRONMENT | variables, capture_output=True, text=True)
    except OSError as error:
        raise Unavailable(f"{what}: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Unavailable(f"{what}: {said[-1] if said else f'{line[0]} ended with {done.returncode}'}")
    return done.stdout


def once(folder: Path, make: Callable[[Path], None]) -> Path:
    """``folder``, filled by ``make`` where it is not there yet; it appears complete or not at all."""
    if not folder.exists():
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}-", dir=folder.parent) as work:
            make(Path(work) / folder.name)
            os.replace(Path(work) / folder.name, folder)
    return folder


def packages(architecture: str, names: list[str]) -> Callable[[Path], None]:
    """Unpacks Debian's packages into a new folder, by an apt that shares no more than its sources with the
    system's."""

    def make(folder: Path) -> None:
        apt = folder.parent / "apt"
        (apt / "state" / "lists" / "partial").mkdir(parents=True)
        (apt / "cache" / "archives" / "partial").mkdir(parents=True)
        (apt / "status").touch()
        (apt / "apt.conf").write_text(
            f'APT::Architecture "{architecture}";\nAPT::Architectures {{ "{architecture}"; }};\n'
            f'Dir::State "{apt}/state";\nDir::State::status "{apt}/status";\nDir::Cache "{apt}/cache";\n'
            'APT::Sandbox::User "";\nAPT::Update::Error-Mode "any";\n'
        )
        own = {"APT_CONFIG": str(apt / "apt.conf")}
        command("Debian's lists cannot be read", "apt-get", "update", **own)
        get = f'cd "{apt}" && apt-get download {" ".join(names)}'
        command("Debian's packages cannot be downloaded", "sh", "-c", get, **own)
        for package in apt.glob("*.deb"):
            command(f"{package.name} cannot be unpacked", "dpkg-deb", "-x", str(package), str(folder))

    return make


def wheels(folder: Path) -> None:
    """Installs the wheels for the other processor, in the versions of constraints.txt where that has one."""
    versions = folder.parent / "versions.txt"
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    versions.write_text("\n".join(line for line in pinned if not line.startswith("torch==")))
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    line += ["--target", str(folder), "--no-deps", "--only-binary", ":all:", "--implementation", "cp"]
    line += ["--python-version", PYTHON]
    for tag in ("manylinux_2_28", "manylinux_2_17", "manylinux2014"):
        line += ["--platform", f"{tag}_aarch64"]
    own = {"PIP_CONSTRAINT": str(versions)}
    command("pip cannot get the packages for aarch64", *line, TORCH, *WHEELS, **own)


class Arm:
    """A Python of the other processor. Raises Unavailable where it cannot be made."""

    def __init__(self, folder: Path):
        if sys.platform != "linux":
            raise Unavailable("qemu plays another processor's programs on Linux alone")
        if platform.machine() == "aarch64":
            raise Unavailable("this processor is one: the other tests run on it")
        self.qemu = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
        if self.qemu is None:
            ours = command("this system is not Debian's", "dpkg", "--print-architecture").strip()
            unpacked = once(folder / "qemu", packages(ours, ["qemu-user-static"]))
            self.qemu = str(unpacked / "usr" / "bin" / "qemu-aarch64-static")
        self.system = once(folder / "system", packages("arm64", SYSTEM))
        # A list that changed is another folder: what is kept from before lacks something.
        asked = zlib.crc32(" ".join((TORCH, *WHEELS)).encode())
        self.wheels = once(folder / f"wheels-{asked:08x}", wheels)

    def run(self, *arguments: str, **variables: str) -> str:
        """What Python printed, run from the checkout. What it tells meanwhile is shown by ``pytest -s``."""
        python = self.system / "usr" / "bin" / f"python{PYTHON}"
        line = [self.qemu, "-cpu", CPU, "-L", str(self.system), str(python)]
        variables |= {"PYTHONPATH": os.pathsep.join((str(ROOT), str(self.wheels))), "LANG": "C.UTF-8"}
        variables |= {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([*line, *arguments], cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True)
        assert done.returncode == 0, f"ended with {done.returncode}: {done.stdout}"
        return done.stdout


@pytest.fixture(scope="module")
def arm() -> Iterator[Arm]:
    with tempfile.TemporaryDirectory(prefix="redline-aarch64-") as temporary:
        folder = Path(os.environ.get("REDLINE_AARCH64") or temporary).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            made = Arm(folder)
        except Unavailable as reason:
            pytest.skip(str(reason))
        yield made


def test_the_embedded_pair_writes_the_same_on_aarch64(
    arm: Arm, embedded_home: Path, embedded_folder: Path, embedded_pair: Pair
):
    reply, rounds = write(embedded_pair)
    here = score(embedded_pair, reply).double().log_softmax(-1)
    # A home of its own: nothing is written into the user's cache.
    with tempfile.TemporaryDirectory(prefix="redline-home-") as name:
        home = Path(name)
        shutil.copytree(embedded_folder, home / embedded_folder.relative_to(embedded_home))
        asked = ["-m", "tests.proof.on_aarch64", str(home / "logits"), *map(str, reply)]
        said = json.loads(arm.run(*asked, REDLINE_HOME=str(home), HOME=str(home)).splitlines()[-1])
        there = load_file(home / "logits")["logits"].double().log_softmax(-1)

    divergence = (here.exp() * (here - there)).sum(-1)
    two = here.topk(2)
    margin = two.values[:, 0] - two.values[:, 1]
    # How far the gap between the two likeliest moved.
    moved = (there.gather(-1, two.indices).diff().squeeze(-1) + margin).abs()
    figures = f"KL {divergence.tolist()}, margins {margin.tolist()}, moved by {moved.tolist()}, {said}"
    print(figures)
    assert divergence.mean() < MOST_KL, figures
    assert (moved < margin).all(), figures  # or else a reply that differs would agree to rounding, too
    assert said["reply"] == reply and len(reply) == TOKENS, figures
    assert said["rounds"] < TOKENS and rounds < TOKENS, figures  # drafts are accepted there as here
