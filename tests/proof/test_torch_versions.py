"""The engine's tests on other versions of torch than the one that constraints.txt pins.

On the oldest that requirements.txt allows, the newest that ZeroGPU offers and the newest there is; each in an
environment of its own that is removed afterwards. Everything else is as constraints.txt has it. uv installs
where ``make setup`` would use the one on PATH, and then torch's CPU builds; else pip, which on Linux brings
the CUDA builds where it is not told otherwise: 3 GB to download and 7 GB of disk for each version.

Run: ``make proof``, or ``python -m pytest -m proof tests/proof/test_torch_versions.py -k oldest``. Installing
takes minutes for each version, the tests as long as in ``make test``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from core.setup_environment import decisive_settings
from tests.test_front_matter import ZEROGPU_NEWEST, required

ROOT = Path(__file__).resolve().parents[2]
# Before any test closes pip's network, and without what would steer the tests inside.
NOT_THEIRS = ("REDLINE_", "PYTEST_", "PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS")
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(NOT_THEIRS)}
(OLDEST,) = (limit.version for limit in required("requirements.txt", "torch").specifier)
VERSIONS = {"oldest": f"torch=={OLDEST}.*", "zerogpu": f"torch=={ZEROGPU_NEWEST}.*", "newest": "torch"}

pytestmark = pytest.mark.proof


def run(*command: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT | variables, capture_output=True, text=True)


def install(python: str, *what: str) -> None:
    uv = shutil.which("uv")
    if uv and not decisive_settings(run(python, "-m", "pip", "config", "list").stdout):
        command = [uv, "pip", "install", "--quiet", "--python", python, "--torch-backend", "cpu", *what]
        if run(*command).returncode == 0:
            return
    done = run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_the_engines_tests_pass_on_this_torch(version: str, embedded_home: Path, embedded_folder: Path):
    with tempfile.TemporaryDirectory(prefix="redline-torch-") as folder:
        assert run(sys.executable, "-m", "venv", f"{folder}/venv").returncode == 0
        python = f"{folder}/venv/{'Scripts' if os.name == 'nt' else 'bin'}/python"
        rest = Path(folder, "constraints.txt")
        lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
        rest.write_text("\n".join(line for line in lines if not line.startswith("torch==")))
        tools = ("pytest", "pytest-xdist", "playwright")
        install(python, "--constraint", str(rest), VERSIONS[version], "-r", "requirements.txt", *tools)
        tests = ("pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile", "tests/core")
        done = run(python, "-m", *tests, REDLINE_HOME=str(embedded_home))
        found = run(python, "-c", "import torch; print(torch.__version__)").stdout
        assert done.returncode == 0, f"torch {found}\n{done.stdout[-20_000:]}{done.stderr[-5000:]}"
