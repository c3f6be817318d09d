"""NX-09: memory that is out is told as that, whoever says it and however, and never as a damaged file."""

from __future__ import annotations

import errno

import pytest
import torch
from safetensors import SafetensorError

from core.distill import train
from core.models import embedded, errors, gguf_header, hub
from core.models.errors import LoadError, is_out_of_memory
from core.pairs import draft_file, load, load_model, plan
from core.pairs.load import load_pair
from core.pairs.spec import embedded_spec


def of_windows(number: int, said: str) -> OSError:
    """As Windows raises it: its own number beside another errno."""
    error = OSError(errno.EINVAL, said)
    error.winerror = number
    return error


def caused_by(cause: BaseException) -> OSError:
    error = OSError("Unable to load weights from the checkpoint file")
    error.__cause__ = cause
    return error


PAGING = "The paging file is too small for this operation to complete"
COMMAND = "Not enough memory resources are available to process this command"
OUT_OF_MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasLtMatmul(...)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cudaErrorMemoryAllocation: the API call failed"),
    RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("HIP error: hipErrorOutOfMemory"),
    RuntimeError("HIP error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    RuntimeError("rocBLAS error: rocblas_status_memory_error"),
    RuntimeError("MIOpen Error: miopenStatusAllocFailed"),
    RuntimeError("MPS backend out of memory (MPS allocated: 9.05 GB)"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: not enough memory: you tried to "
        "allocate 12345 bytes."
    ),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("std::bad_alloc"),
    OSError(1455, PAGING),
    of_windows(1455, PAGING),
    of_windows(1455, "Die Auslagerungsdatei ist zu klein"),
    of_windows(8, "Für diesen Befehl ist nicht genügend Speicher verfügbar"),
    OSError(8, COMMAND),
    OSError(f"[WinError 1455] {PAGING}. Error loading torch_cpu.dll or one of its dependencies."),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    SafetensorError(f"Error while deserializing header: IO error: {PAGING}. (os error 1455)"),
    SafetensorError("IO error: Die Auslagerungsdatei ist zu klein. (os error 1455)"),
    SafetensorError("Error while deserializing header: IO error: Cannot allocate memory (os error 12)"),
    caused_by(MemoryError()),
]
SOMETHING_ELSE = [
    OSError(errno.ENOEXEC, "Exec format error"),  # 8, as on Windows the number of memory
    OSError(errno.ENOENT, "No such file or directory"),
    OSError(errno.ENOSPC, "No space left on device"),
    SafetensorError("Error while deserializing header: IO error: Exec format error (os error 8)"),
    SafetensorError("incomplete metadata, file not fully covered"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    KeyError("memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=repr)
def test_nx_09_memory_that_is_out_is_known(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", SOMETHING_ELSE, ids=repr)
def test_nx_09_what_is_something_else_is_not_told_as_memory(error):
    assert not is_out_of_memory(error)


def test_nx_09_a_number_in_words_counts_where_it_means_memory(monkeypatch):
    """12 is memory everywhere but on Windows, where it is a code of access, and 8 there alone."""
    twelve, eight = SafetensorError("IO error (os error 12)"), SafetensorError("IO error (os error 8)")
    for name, found in (("posix", (True, False)), ("nt", (False, True))):
        monkeypatch.setattr(errors.os, "name", name)
        answers = is_out_of_memory(twelve), is_out_of_memory(eight)
        monkeypatch.undo()
        assert answers == found


def failing(error):
    def fail(*args, **kwargs):
        raise error

    return fail


MEMORY = pytest.mark.parametrize(
    "error", [MemoryError(), OSError(1455, PAGING), SafetensorError("(os error 1455)")], ids=repr
)


@MEMORY
def test_nx_09_no_file_is_called_damaged_where_memory_was_out(error, monkeypatch, tmp_path):
    """Whatever is read: config and tokenizer, weights, a draft, a GGUF header, the embedded model."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"")
    monkeypatch.setattr(gguf_header, "_header", failing(error))
    with pytest.raises(LoadError, match="too little memory to read model.gguf"):
        gguf_header.read_header(path)
    with pytest.raises(LoadError, match="too little memory to read the draft"):
        raise draft_file._unreadable(path, error)
    for name, read in (("AutoConfig", plan._config), ("AutoTokenizer", lambda c: plan._tokenizer(c, None))):
        monkeypatch.setattr(getattr(plan.transformers, name), "from_pretrained", failing(error))
        monkeypatch.setattr(plan, "where_from", lambda checkpoint: {})
        with pytest.raises(LoadError, match="too little memory to read the"):
            read(Named("some/model"))
    assert "too little memory" in embedded._disk_sentence(tmp_path, error)
    assert "too little memory" in hub.sentence("some/model", None, error)
    monkeypatch.setattr(train.torch, "load", failing(error))
    with pytest.raises(train.TrainingError, match="too little memory to read the checkpoint"):
        train._resume(path, {}, torch.nn.Linear(1, 1), [], None, lambda sentence: None)


class Named:
    """As much of a checkpoint as a sentence needs."""

    def __init__(self, name: str):
        self.name = name


class Planned(Named):
    """As much of a plan."""

    need, device = Named("some/model"), "cpu"
    need.smaller, need.bytes = None, 5_400_000_000


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=repr)
def test_nx_09_every_way_to_load_says_too_little_memory(error, monkeypatch):
    assert "too little memory to load some/model" in load_model._sentence(Planned("some/model"), error)
    monkeypatch.setattr(load_model.memory, "free_bytes", lambda device: 1_200_000_000)
    said = load_model._sentence(Planned("some/model"), error)
    assert "(it needs about 5.4 GB, and 1.2 GB are free)" in said
    monkeypatch.setattr(load, "load_embedded", failing(error))
    with pytest.raises(LoadError, match="too little memory to load this pair"):
        load_pair(embedded_spec())
