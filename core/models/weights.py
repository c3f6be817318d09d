"""Files of weights on this disk: which a folder has, whether they are whole, and what identifies them.

Reads the headers of safetensors files, never tensors. Knows nothing of hubs or models.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from core.machine.home import home
from core.machine.progress import Progress
from core.models.errors import LoadError

SINGLE = "model.safetensors"  # what transformers looks for, in this order
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
LARGEST_HEADER = 100_000_000  # bytes; as the safetensors library
REMEMBERED = "fingerprints.json"


@dataclass(frozen=True)
class WeightFile:
    """``name`` within its folder, size in bytes, and the SHA-256 (hexadecimal) that its hub states, if one
    does.
    """

    name: str
    size: int
    sha256: str | None = None


def weight_names(source: str, names: Collection[str], index: Mapping[str, object] | None) -> list[str]:
    """Which of a model's files (``names``, with "/" between folders) hold the weights that transformers
    reads.

    ``index`` is the content of ``INDEX`` where that is among them. Raises LoadError where there are none,
    where shards are missing, where an adapter is among them, or where weights are only there as pickle, which
    can run anything.
    """
    if ADAPTER in names:
        # Also beside whole weights, which transformers would run with the adapter on top.
        raise LoadError(
            f"{source} holds an adapter ({ADAPTER}): merge it into its base model and name the result."
        )
    if SINGLE in names:
        return [SINGLE]
    if index is not None:
        shards = index.get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(map(_is_plain, shards.values())):
            raise LoadError(f"{INDEX} of {source} names no weights: fetch the model again.")
        if not isinstance(index.get("metadata"), dict):
            raise LoadError(
                f'{INDEX} of {source} has no "metadata", which transformers needs: write '
                '"metadata": {} into it, or fetch the model again.'
            )
        wanted = sorted(set(shards.values()))
        missing = [name for name in wanted if name not in names]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise LoadError(f"{source} is incomplete: {missing[0]}{more} is missing; fetch the model again.")
        return wanted
    raise LoadError(_no_weights(source, names))


def _is_plain(name: object) -> bool:
    """A file name without folders, so that an index cannot point out of its own."""
    return isinstance(name, str) and PurePosixPath(name).name == name and "\\" not in name


def _no_weights(source: str, names: Collection[str]) -> str:
    top = [name for name in names if "/" not in name]
    if any(name.lower().endswith(".gguf") for name in names):
        return f"{source} holds GGUF files: name one of them on this disk, as FOLDER/FILE.gguf."
    if any(name.lower().endswith(PICKLES) for name in top):
        return (
            f"{source} keeps its weights as pickle files, which can run any program while they are read: "
            "choose a version in safetensors, or convert it where you trust it."
        )
    return f"{source} holds no weights ({SINGLE}): name the folder or repository of a whole model."


def parameters_in(source: str, files: Sequence[Path]) -> int:
    """Numbers in the tensors of safetensors files. Raises LoadError where a file is not whole."""
    return sum(_parameters(source, path) for path in files)


def _parameters(source: str, path: Path) -> int:
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size, LARGEST_HEADER):
                raise ValueError("header longer than the file")
            header = json.loads(file.read(length))
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        end = max((tensor["data_offsets"][1] for tensor in tensors), default=0)
        if 8 + length + end != size:
            raise ValueError("cut off")
        return sum(math.prod(tensor["shape"]) for tensor in tensors)
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise LoadError(
            f"{path.name} of {source} is damaged or was not fetched whole: fetch it again."
        ) from error


def combined(hashes: Sequence[str]) -> str:
    """One SHA-256 for several: a single file's own, else of the list, in the order of names."""
    if len(hashes) == 1:
        return hashes[0]
    return hashlib.sha256("".join(f"{digest}\n" for digest in hashes).encode()).hexdigest()


def sha256(path: Path, progress: Progress) -> str:
    """Of the content. Large files take seconds a gigabyte, so a result is remembered with path, size and time
    of the last change, in ``home()``; where that cannot be written, the file is read again next time.
    """
    try:
        key, stamp = str(path.resolve()), _stamp(path)
        memory = _remembered()
        if memory.get(key, [])[:2] == stamp:
            return memory[key][2]
        digest = _read(path, stamp[0], progress)
        if _stamp(path) == stamp:  # not written meanwhile
            _remember(key, [*stamp, digest])
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}.") from error
    return digest


def check_known(path: Path, known: str, remedy: str, progress: Progress) -> None:
    """Raises LoadError, which ends with ``remedy``, unless the content has the SHA-256 it is ``known`` by.
    Read once: a file of the same size and time of change is remembered."""
    if sha256(path, progress) != known:
        raise LoadError(
            f"{path} is not the file that it was (its SHA-256 is another than the {known[:12]}… it is known"
            f" by): {remedy}."
        )


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _read(path: Path, size: int, progress: Progress) -> str:
    digest, done = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            done += len(block)
            progress(f"Reading {path.name} to know it again", min(done / size, 1.0))
    return digest.hexdigest()


def _remembered() -> dict[str, list]:
    try:
        memory = json.loads((home() / REMEMBERED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    entries = memory.items() if isinstance(memory, dict) else ()
    return {key: entry for key, entry in entries if isinstance(entry, list) and len(entry) == 3}


def _remember(key: str, entry: list) -> None:
    memory = {path: known for path, known in _remembered().items() if os.path.exists(path)} | {key: entry}
    try:
        home().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=home(), delete=False, encoding="utf-8") as file:
            json.dump(memory, file, indent=1)
        os.replace(file.name, home() / REMEMBERED)  # whole or not at all
    except OSError:
        pass
