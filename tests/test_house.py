"""The floors of docs/HOUSE.md hold: imports go down or stay in a room, and no two files import each other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("core", "app")


def floors(document: str) -> dict[str, int]:
    """The floor of each room of the table: folders end with a slash, files with .py."""
    rooms = {}
    for line in document.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and re.fullmatch(r"-?\d+", cells[0]):
            for room in re.findall(r"`([^`]+)`", cells[1]):
                assert room not in rooms, f"{room} stands twice in the table"
                rooms[room] = int(cells[0])
    return rooms


def imported(source: str, files: set[str]) -> Iterator[str]:
    """The project's files that ``source`` imports, also inside functions and for type checking alone."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if file_of(name, files) else node.module for name in inside]
        else:
            continue
        yield from filter(None, (file_of(name, files) for name in names))


def file_of(module: str, files: set[str]) -> str | None:
    path = module.replace(".", "/")
    return next((file for file in (f"{path}.py", f"{path}/__init__.py") if file in files), None)


def room_of(file: str, rooms: dict[str, int]) -> str | None:
    """The room ``file`` is in: itself, or the longest folder of the table that holds it."""
    fitting = [room for room in rooms if file == room or (room.endswith("/") and file.startswith(room))]
    return max(fitting, key=len, default=None)


def faults(sources: dict[str, str], rooms: dict[str, int]) -> list[str]:
    """One sentence for each import that goes up or sideways, each pair that imports each other, and each file
    without a room. ``sources`` maps paths to text."""
    files = set(sources)
    graph = {file: set(imported(text, files)) - {file} for file, text in sources.items()}
    found = []
    for file in sorted(files):
        if file in {f"{package}/__init__.py" for package in PACKAGES}:
            continue
        room = room_of(file, rooms)
        if room is None:
            found.append(f"{file} is in no room of docs/HOUSE.md")
            continue
        for other in sorted(graph[file]):
            there = room_of(other, rooms)
            if there not in (None, room) and rooms[there] >= rooms[room]:
                found.append(
                    f"{file} (floor {rooms[room]}) imports {other} (floor {rooms[there]}), not a lower one"
                )
            if file < other and file in graph[other]:
                found.append(f"{file} and {other} import each other")
    return found


def project() -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }


@pytest.fixture(scope="module")
def rooms() -> dict[str, int]:
    return floors((ROOT / "docs" / "HOUSE.md").read_text("utf-8"))


def test_imports_go_down(rooms):
    assert faults(project(), rooms) == []


def test_every_room_is_there(rooms):
    assert [room for room in rooms if not (ROOT / room).exists()] == []


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("core/verify/planted.py", "from core.engine.loop import Engine", "core/engine/loop.py (floor"),
        (
            "core/verify/planted.py",
            "def f():\n    from core.engine import loop",
            "core/engine/loop.py (floor",
        ),
        ("core/record/planted.py", "import core.verify.sampling", "core/verify/sampling.py (floor"),
        ("core/planted.py", "", "core/planted.py is in no room"),
    ],
    ids=["up", "up, inside a function", "sideways", "no room"],
)
def test_a_planted_fault_is_named(rooms, file, line, said):
    found = faults(project() | {file: line}, rooms)
    assert len(found) == 1 and file in found[0] and said in found[0]


def test_two_files_that_import_each_other_are_named(rooms):
    planted = {"core/verify/a.py": "from core.verify import b", "core/verify/b.py": "import core.verify.a"}
    assert faults(project() | planted, rooms) == ["core/verify/a.py and core/verify/b.py import each other"]


def test_what_the_document_names_is_there():
    """Paths in docs/HOUSE.md exist, and names in brackets behind a path are defined in it."""
    text = (ROOT / "docs" / "HOUSE.md").read_text("utf-8")
    for path in set(re.findall(r"(?:core|app|assets|tests)/[\w./]+\w/?", text)):
        assert (ROOT / path).exists(), path
    for path, names in re.findall(r"`((?:core|app)/[\w/]+\.py)` \(((?:`\w+`(?:, )?)+)\)", text):
        source = (ROOT / path).read_text("utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^\s*(def|class) {name}\b|^{name}\b", source, re.M), f"{name} in {path}"
