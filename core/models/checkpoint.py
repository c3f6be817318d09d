"""What a source is before its weights are touched: a hub id, a folder, a GGUF file or the embedded model.

``inspect`` fetches small files only (configuration and tokenizer) and refuses what can be refused from them;
``fetch`` gets the weights; ``fingerprint`` identifies them by content. Knows nothing of pairs, of
quantisation or of how a model runs.

Run: ``python -m core.models.checkpoint SOURCE`` prints what it finds.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from core.machine.progress import Progress, silent
from core.models import hub
from core.models.embedded import NAME, checked_fingerprint, prepare_embedded
from core.models.errors import LoadError
from core.models.gguf_header import read_header
from core.models.memory import gigabytes, size_of
from core.models.rotary import Rotary
from core.models.sources import Kind, SpecError, hub_id, source_kind
from core.models.weights import ADAPTER, INDEX, WeightFile, combined, parameters_in, sha256, weight_names

CONFIG, GENERATION = "config.json", "generation_config.json"
# What configuration and tokenizer consist of; nothing among them is a program or a pickle.
SMALL = (
    CONFIG,
    GENERATION,
    INDEX,
    "tokenizer*.json",
    "tokenizer.model*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.*",
    "spiece.model",
    "*.tiktoken",
)
MOST_LAYERS, MOST_PARAMETERS = 1000, 10**14  # far above any model: beyond, a configuration is a mistake
_LICENCE = re.compile(r"^license:[ \t]*[\"']?([\w.+-]+)", re.MULTILINE)


@dataclass(frozen=True)
class Checkpoint:
    """One model as found. ``folder`` holds configuration and tokenizer (for GGUF: the file itself,
    ``gguf_file``), and the weights once they are ``cached``, which says that nothing is left to download.

    ``config`` is the content of config.json (of a GGUF: its header in the same words), ``generation_config``
    that of generation_config.json or empty. ``revision`` is the hub's commit. ``licence``, ``gated`` and
    ``parameters`` are None where they are not known. ``quantized`` is the form the weights are stored in, if
    they are: transformers' quant_method or llama.cpp's file type. ``rotary`` and ``end_ids`` are what a GGUF
    file alone says of its rotary embedding and of the ids that end a reply.
    """

    source: str
    kind: Kind
    folder: Path
    config: dict
    weights: tuple[WeightFile, ...]
    gguf_file: str | None = None
    revision: str | None = None
    generation_config: dict | None = None
    licence: str | None = None
    gated: bool | None = None
    parameters: int | None = None
    cached: bool = True
    quantized: str | None = None
    rotary: Rotary | None = None
    end_ids: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        """What people call it: the last part of its source."""
        if self.kind == "embedded":
            return NAME
        if self.kind == "hub":
            return hub_id(self.source)[0].split("/")[1]
        return Path(self.gguf_file).stem if self.gguf_file else self.folder.name

    @property
    def weight_bytes(self) -> int:
        """Of the files that hold the weights."""
        return sum(file.size for file in self.weights)


def inspect(source: str, progress: Progress = silent) -> Checkpoint:
    """What ``source`` is; of a hub's model only small files are fetched, of the embedded one all (it is
    small).

    Raises LoadError for what is not there, not whole, or cannot be used: adapters, pickle, code of its own.
    """
    try:
        kind = source_kind(source)
    except SpecError as error:
        raise LoadError(str(error)) from error
    if kind == "embedded":
        folder = prepare_embedded(progress)
        checked_fingerprint(folder, progress)  # before anything is made of what is not what it should be
        return replace(_folder(source, folder), kind="embedded")
    if kind == "hub":
        return _hub(source, progress)
    path = Path(os.path.expanduser(source)).absolute()
    return _gguf(source, path, progress) if kind == "gguf" else _folder(source, path)


def is_here(source: str) -> bool:
    """Whether nothing of ``source`` is left to download, as far as this disk tells: the hub is not asked.

    Raises SpecError where ``source`` is no model's name.
    """
    if source_kind(source) != "hub":
        return True
    repo, revision = hub_id(source)
    found = hub.in_cache(repo, revision)
    if found.snapshot is None:
        return False
    try:
        _weights(repo, found.snapshot, found.files.keys(), found.files)
    except LoadError:
        return False
    return True


# --- Where it lies -----------------------------------------------------------------------------------------


def _hub(source: str, progress: Progress) -> Checkpoint:
    repo, revision = hub_id(source)
    progress(f"Asking the hub about {repo}", None)
    repository = hub.look_up(repo, revision)
    names = repository.files.keys()
    if CONFIG not in names:
        raise LoadError(_no_config(repo, names))
    small = [
        file
        for name, file in repository.files.items()
        if "/" not in name and any(fnmatch.fnmatchcase(name, pattern) for pattern in SMALL)
    ]
    folder = repository.snapshot or hub.download(
        repository, small, progress, f"Fetching configuration and tokenizer of {repo}"
    )
    config = _config(repo, folder)
    try:
        weights = _weights(repo, folder, names, repository.files)
    except LoadError:
        if repository.fault is not None:  # the cache has small files only: what is missing is on the hub
            raise repository.fault from None
        raise
    cached = all(hub.is_cached(repository, file) for file in weights)
    return Checkpoint(
        source=source,
        kind="hub",
        folder=folder,
        config=config,
        weights=weights,
        revision=repository.revision,
        generation_config=_json(repo, folder / GENERATION, needed=False),
        licence=repository.licence,
        gated=repository.gated,
        parameters=repository.parameters or _counted(config),
        cached=cached,
        quantized=_quantized(config),
    )


def _folder(source: str, folder: Path) -> Checkpoint:
    try:
        if not folder.is_dir():
            there = "is a file, not a folder" if folder.exists() else "does not exist"
            raise LoadError(f"{folder} {there}: name the folder of a model, with its {CONFIG}.")
        files = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    except OSError as error:
        raise _unreadable(folder, error) from error
    if CONFIG not in files:
        raise LoadError(_no_config(str(folder), files))
    config = _config(str(folder), folder)
    known = {name: WeightFile(name, size) for name, size in files.items()}
    weights = _weights(str(folder), folder, files, known)
    return Checkpoint(
        source=source,
        kind="folder",
        folder=folder,
        config=config,
        weights=weights,
        generation_config=_json(str(folder), folder / GENERATION, needed=False),
        licence=_licence(folder),
        parameters=_counted(config) or parameters_in(str(folder), [folder / file.name for file in weights]),
        quantized=_quantized(config),
    )


def _gguf(source: str, path: Path, progress: Progress) -> Checkpoint:
    try:
        if not path.is_file():
            raise LoadError(f"{path} does not exist: name a .gguf file on this disk.")
    except OSError as error:
        raise _unreadable(path, error) from error
    progress(f"Reading what {path.name} says of itself", None)
    header = read_header(path)
    _check_bounds(path.name, header.config)
    return Checkpoint(
        source=source,
        kind="gguf",
        folder=path.parent,
        gguf_file=path.name,
        config=header.config,
        weights=(WeightFile(path.name, path.stat().st_size),),
        licence=header.licence,
        parameters=header.parameters,
        quantized=header.quantized,
        rotary=header.rotary,
        end_ids=header.end_ids,
    )


def _unreadable(path: Path, error: OSError) -> LoadError:
    shown = str(path) if len(str(path)) <= 200 else f"{str(path)[:100]}…"
    return LoadError(f"{shown} cannot be read: {(error.strerror or str(error)).lower()}.")


# --- Small files -------------------------------------------------------------------------------------------


def _json(source: str, path: Path, needed: bool = True) -> dict:
    """The object in a JSON file; empty where there is none and none is needed. Raises LoadError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not an object")
    except FileNotFoundError as error:
        if needed:
            raise LoadError(f"{source} has no {path.name}: fetch the model again.") from error
        return {}
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path.name} of {source} is damaged: fetch the model again.") from error
    return content


def _config(source: str, folder: Path) -> dict:
    """config.json of a model that the installed transformers can run without code of the model's own."""
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = _json(source, folder / CONFIG)
    kind, brought, classes = (config.get(name) for name in ("model_type", "auto_map", "architectures"))
    native = isinstance(kind, str) and kind in CONFIG_MAPPING_NAMES
    if native and isinstance(brought, Mapping) and "AutoModelForCausalLM" in brought:
        # A known type may still name a class of its own.
        known = {
            name
            for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            for name in ([names] if isinstance(names, str) else names)
        }
        native = isinstance(classes, list) and any(name in known for name in classes)
    if native:
        _check_bounds(source, config)
        return config
    if brought:
        raise LoadError(
            f"{source} needs code of its own to run (trust_remote_code), which Redline never runs: choose a "
            "model that transformers knows."
        )
    if not isinstance(kind, str):
        raise LoadError(f"{CONFIG} of {source} names no model_type, so it is no model of transformers.")
    raise LoadError(
        f"{source} is a {kind!r} model, which transformers {__version__} does not know: update transformers "
        "or choose another model."
    )


def _check_bounds(source: str, config: Mapping[str, object]) -> None:
    """Raises LoadError for counts that no model has: transformers makes lists as long as a config says."""
    for part in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        for name, value in part.items():
            counts = name.endswith(("layer", "layers")) and isinstance(value, int | float)
            if counts and value > MOST_LAYERS:
                raise LoadError(
                    f"The config of {source} cannot be used, since its {name} is over {MOST_LAYERS:,}: "
                    "fetch it anew."
                )
    if (_counted(config) or 0) > MOST_PARAMETERS:
        raise LoadError(
            f"The config of {source} cannot be used, since a model of its sizes would have over "
            f"{MOST_PARAMETERS:,} parameters: fetch it anew."
        )


def _no_config(source: str, names: Collection[str]) -> str:
    """Why a source without config.json is refused."""
    if ADAPTER not in names and not any(name.lower().endswith(".gguf") for name in names):
        return f"{source} has no {CONFIG}, so it is no model of transformers: check the name."
    try:
        weight_names(source, names, None)
    except LoadError as error:
        return str(error)
    return f"{source} has no {CONFIG}: fetch the model again."


def _weights(
    source: str, folder: Path, names: Collection[str], known: Mapping[str, WeightFile]
) -> tuple[WeightFile, ...]:
    index = _json(source, folder / INDEX) if INDEX in names else None
    return tuple(known[name] for name in weight_names(source, names, index))


def _counted(config: Mapping[str, object]) -> int | None:
    size = size_of(config)
    return size.parameters if size else None


def _quantized(config: Mapping[str, object]) -> str | None:
    stored = config.get("quantization_config")
    method = stored.get("quant_method") if isinstance(stored, dict) else None
    return str(method) if method else None


def _licence(folder: Path) -> str | None:
    """From the front matter of a model card."""
    try:
        card = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    if not card.startswith("---"):
        return None
    found = _LICENCE.search(card.split("\n---", 1)[0])
    return found[1] if found else None


# --- Weights -----------------------------------------------------------------------------------------------


def fetch(checkpoint: Checkpoint, progress: Progress = silent) -> Checkpoint:
    """The checkpoint with its weights on this disk, checked to be whole; downloads what is missing from the
    hub.

    What was fetched stays after an interruption. Raises LoadError.
    """
    if checkpoint.gguf_file is not None:
        return checkpoint  # reading its header has seen every tensor's place
    paths = [checkpoint.folder / file.name for file in checkpoint.weights]
    if checkpoint.kind == "hub":
        repo, revision = hub_id(checkpoint.source)
        repository = hub.Repository(
            repo, checkpoint.revision, {file.name: file for file in checkpoint.weights}, checkpoint.folder
        )
        if not all(path.is_file() for path in paths):
            total = gigabytes(checkpoint.weight_bytes)
            hub.download(repository, checkpoint.weights, progress, f"Fetching {repo} ({total})")
        hub.keep_name(repository, revision)
    parameters_in(checkpoint.source, paths)
    return replace(checkpoint, cached=True)


def fingerprint(checkpoint: Checkpoint, progress: Progress = silent) -> str:
    """SHA-256 (hexadecimal) over the content of the weights: a single file's own, else over those of all
    files.

    Of a hub's files the hub says it; local ones are read once and remembered by path, size and time of
    change, so that a changed file gives another fingerprint. Raises LoadError.
    """
    if checkpoint.kind == "embedded":
        return checked_fingerprint(checkpoint.folder, progress)
    return combined(
        [file.sha256 or sha256(checkpoint.folder / file.name, progress) for file in checkpoint.weights]
    )


def main() -> None:
    from core.text.terminal import progress_printer

    if len(sys.argv) != 2:
        sys.exit("Usage: python -m core.models.checkpoint SOURCE")
    progress = progress_printer(sys.stderr)
    try:
        found = inspect(sys.argv[1], progress)
    except LoadError as error:
        progress("", None)
        sys.exit(str(error))
    progress("", None)
    here = "here" if found.cached else "to download"
    print(f"{found.name} ({found.kind}, {found.config.get('model_type')}) in {found.folder}")
    print(f"weights {gigabytes(found.weight_bytes)} {here}, parameters {found.parameters or '–'}")
    print(f"licence {found.licence or '–'}, gated {found.gated}, stored as {found.quantized or 'it is'}")


if __name__ == "__main__":
    main()
