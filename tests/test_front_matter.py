"""The block at the top of README.md that configures a Space (docs/SPACE.md) agrees with the rest."""

from __future__ import annotations

from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
ZEROGPU_NEWEST = "2.11"  # of the versions of torch it offers


def front_matter() -> dict[str, str]:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert lines[0] == "---"
    pairs = (line.split(": ", 1) for line in lines[1 : lines.index("---", 1)])
    return {name: value.strip('"') for name, value in pairs}


def required(file: str, name: str) -> Requirement:
    lines = (ROOT / file).read_text().splitlines()
    (line,) = [line for line in lines if line.split("#")[0].startswith((f"{name}~", f"{name}=", f"{name}>"))]
    return Requirement(line)


def test_a_space_gets_the_gradio_that_the_tests_use():
    version = front_matter()["sdk_version"]
    assert required("requirements.txt", "gradio").specifier.contains(version)
    assert required("constraints.txt", "gradio").specifier.contains(version)


def test_zerogpu_could_run_it():
    assert front_matter()["python_version"] in ("3.10", "3.12")
    assert required("requirements.txt", "torch").specifier.contains(f"{ZEROGPU_NEWEST}.0")


def test_what_it_names_is_there_and_short_enough():
    block = front_matter()
    assert block["sdk"] == "gradio" and (ROOT / block["app_file"]).is_file()
    assert block["license"] == "mit" and (ROOT / "LICENSE").read_text().startswith("MIT")
    assert len(block["short_description"]) <= 60
