"""The Hugging Face hub, seen from here: what a repository holds, fetching its files, and its faults in words.

Everything goes through the package huggingface_hub and its cache, so that what other programs fetched is used
and they use what is fetched here. Without network the cache answers. Knows nothing of models.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.machine.progress import Progress
from core.models import network
from core.models.errors import LoadError, is_out_of_memory, too_little_memory
from core.models.memory import gigabytes
from core.models.weights import WeightFile

TIMEOUT = 15  # seconds for the hub to say what a repository holds
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Repository:
    """A repository at one commit. ``files`` by name; ``snapshot`` is the cache's folder of this commit, where
    it has one. ``fault`` is why the hub could not be asked: ``files`` are then those of the cache, and
    licence, gated and parameters are not known.
    """

    repo: str
    revision: str
    files: Mapping[str, WeightFile]
    snapshot: Path | None = None
    licence: str | None = None
    gated: bool | None = None
    parameters: int | None = None
    fault: LoadError | None = None


def look_up(repo: str, revision: str | None) -> Repository:
    """What ``repo`` holds at ``revision`` (None: its main one): by the hub, else by the cache.

    Raises LoadError where neither knows it.
    """
    from huggingface_hub import model_info

    try:
        check_proxy(repo)
        info = model_info(repo, revision=revision, files_metadata=True, timeout=TIMEOUT)
    except Exception as error:  # of many kinds, from name resolution to a gate: the cache may do without
        cached = _from_cache(repo, revision, LoadError(sentence(repo, revision, error)))
        if cached.fault is not None and not cached.files:
            raise cached.fault from error
        return cached
    card = info.card_data
    licence = (card.get("license_name") or card.get("license")) if card else None
    counted = info.safetensors.total if info.safetensors else None
    files = {
        sibling.rfilename: WeightFile(
            sibling.rfilename, sibling.size or 0, sibling.lfs.sha256 if sibling.lfs else None
        )
        for sibling in info.siblings or ()
    }
    return Repository(
        repo,
        info.sha or revision or "main",
        files,
        licence=str(licence) if licence else None,
        gated=bool(info.gated),
        parameters=counted,
    )


def in_cache(repo: str, revision: str | None) -> Repository:
    """What this disk has of ``repo``: the hub is not asked. No ``files`` where it has nothing."""
    return _from_cache(repo, revision, None)


def _from_cache(repo: str, revision: str | None, fault: LoadError | None) -> Repository:
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(repo, "config.json", revision=revision)
    except ValueError:  # no valid name
        found = None
    if not isinstance(found, str):
        return Repository(repo, revision or "main", {}, fault=fault)
    snapshot = Path(found).parent
    files = {}
    for path in snapshot.iterdir():
        if path.is_file():
            blob = path.resolve().name  # the cache calls a large file's blob by its SHA-256
            files[path.name] = WeightFile(
                path.name, path.stat().st_size, blob if _SHA256.fullmatch(blob) else None
            )
    return Repository(repo, snapshot.name, files, snapshot=snapshot, fault=fault)


def is_cached(repository: Repository, file: WeightFile) -> bool:
    """Whether the file is on this disk, under this commit or, with the same content, under another."""
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(repository.repo, file.name, revision=repository.revision), str):
        return True
    if file.sha256 is None:
        return False
    try:
        return (_folder(repository.repo) / "blobs" / file.sha256).stat().st_size == file.size
    except OSError:
        return False


def _folder(repo: str) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


def download(repository: Repository, files: Sequence[WeightFile], progress: Progress, what: str) -> Path:
    """Fetches files that are not cached yet; gives the folder that holds them. ``what`` is a sentence for
    people.

    Files fetched whole stay, so that after an interruption only the rest is fetched; of the file under way
    nothing is left. Raises LoadError.
    """
    from huggingface_hub import hf_hub_download

    missing = sum(file.size for file in files if not is_cached(repository, file))
    _check_disk(repository.repo, missing)
    done = 0

    def report(count: float) -> None:
        nonlocal done
        done += count
        progress(what, min(max(done / missing, 0.0), 1.0) if missing else None)

    folder = repository.snapshot
    for file in files:
        try:
            check_proxy(repository.repo)
            path = hf_hub_download(
                repository.repo, file.name, revision=repository.revision, tqdm_class=_bar(report)
            )
        except Exception as error:
            raise LoadError(sentence(repository.repo, repository.revision, error)) from error
        # The file lies as deep in the commit's folder as its name says.
        folder = Path(path).parents[file.name.count("/")]
    if folder is None:
        raise LoadError(f"{repository.repo} holds no model: check the name.")
    return folder


def keep_name(repository: Repository, revision: str | None) -> None:
    """Notes in the cache that ``revision`` (None: the main one) is this commit, as its layout has it.

    Files are fetched by commit, and without this the cache could not be asked by name. Not done before the
    weights are there, so that a name never moves from a whole model to one that was only looked at.
    """
    name = revision or "main"
    if name == repository.revision:
        return
    reference = _folder(repository.repo) / "refs" / name
    try:
        reference.parent.mkdir(parents=True, exist_ok=True)
        new = reference.with_name(f"{reference.name}.{os.getpid()}")
        new.write_text(repository.revision, encoding="ascii")
        os.replace(new, reference)
    except OSError:  # a cache that can only be read
        pass


def _bar(report: Callable[[float], None]) -> type:
    """A class that stands where huggingface_hub wants a tqdm: it draws nothing and passes bytes on.

    ``update_transfer`` is what it looks for to send bytes on the wire and bytes on disk to one bar.
    """

    class Bar:
        def __init__(self, *_: object, total: float | None = None, initial: float = 0, **__: object):
            self.total = total
            self.n = 0.0
            self.update(initial)

        def update(self, count: float | None = 1) -> None:
            self.n += count or 0
            report(count or 0)

        def update_transfer(self, count: float | None = 1) -> None: ...

        def set_postfix_str(self, *_: object, **__: object) -> None: ...

        set_transfer_postfix_str = set_description = set_description_str = refresh = set_postfix_str

        def close(self) -> None: ...

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None: ...

    return Bar


def _check_disk(repo: str, needed: int) -> None:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    there = next((folder for folder in [cache, *cache.parents] if folder.exists()), None)
    if there is not None and needed > (free := shutil.disk_usage(there).free):
        raise LoadError(
            f"{repo} needs {gigabytes(needed)} more in {cache}, where {gigabytes(free)} are free: make room, "
            "or set HF_HOME to a folder on another disk."
        )


def check_proxy(repo: str) -> None:
    """Makes the proxy settings readable. Raises LoadError where the hub needs a proxy that cannot be used."""
    from huggingface_hub import constants

    network.settle(os.environ)
    if reason := network.refusal(constants.ENDPOINT, os.environ):
        raise LoadError(f"The hub cannot be asked for {repo}, for {reason}.")


def sentence(repo: str, revision: str | None, error: BaseException) -> str:
    """A fault of huggingface_hub as one sentence that says what to do."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # it says that the file is not cached; this, why it could not be fetched
    if isinstance(error, LoadError):
        return str(error)
    if is_out_of_memory(error):
        return str(too_little_memory(f"fetch {repo}"))
    page = f"{constants.ENDPOINT}/{repo}"
    login = "log in with `hf auth login` or set HF_TOKEN"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return f"{repo} is gated: ask for access on {page}, then {login}, and try again."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}: see {page} for those it has."
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"The hub knows no model {repo}: check the name on {page}; if it is private, {login}."
    if isinstance(error, errors.DisabledRepoError):
        return f"{repo} was disabled on the hub: choose another model."
    if isinstance(error, errors.HFValidationError):
        return f"{repo!r} is no valid name of a hub repository (owner/name)."
    if isinstance(error, errors.OfflineModeIsEnabled):
        return (
            f"{repo} is not in the cache, and HF_HUB_OFFLINE forbids fetching it: unset HF_HUB_OFFLINE, or "
            "name a local folder."
        )
    if status in (401, 403):
        return f"The hub refuses access to {repo}: ask for it on {page}, then {login}, and try again."
    if status == 429:
        return f"The hub had too many requests from here: wait a few minutes or {login}, then try again."
    if status is not None:
        return f"The hub answered {status} when asked for {repo}: try again later, or name a local folder."
    if _is_full(error):
        return (
            f"The disk that holds {constants.HF_HUB_CACHE} is full: make room, or set HF_HOME to a folder on "
            "another disk."
        )
    if isinstance(error, PermissionError) or getattr(error, "errno", None) == errno.EROFS:
        return f"{constants.HF_HUB_CACHE} cannot be written: set HF_HOME to a folder that can."
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return f"The hub did not answer in time when asked for {repo}: try again, or name a local folder."
    return (
        f"The hub cannot be reached, and {repo} is not in the cache: connect this computer to the internet, "
        "or name a local folder."
    )


def _is_full(error: BaseException) -> bool:
    """Whether a full disk is behind it (the Xet downloader says so in words only)."""
    full = (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "errno", None) in full or os.strerror(errno.ENOSPC) in str(error)
