"""Chats as token ids, on disk and in memory, and the one rule that divides them into training and held-out.

A corpus is four arrays in an ``.npz`` file, which holds no code and is read without running any:

    ids          uint16 or int32: all chats end to end, each a prompt and its reply
    offsets      int64, n + 1: where each chat begins and the last ends
    prompt_len   int32: ids of a chat before its reply, the reply's header included
    temperature  float32: at which the reply was drawn; NaN where nobody knows

The ids are the target's: a corpus serves one tokenizer, and does not know which.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from core.distill.files import write_whole

HELD_OUT_EVERY = 17
FENCE = "```"
ARRAYS = ("ids", "offsets", "prompt_len", "temperature")


class CorpusError(Exception):
    """A text cannot be learned from; the message is one sentence that says what to do."""


def held_out(prompt_ids: Iterable[int]) -> bool:
    """Whether a chat with this prompt is kept from training, to judge drafts by: about one in 17.

    By the prompt alone, so that replies to one prompt are always on one side, in every corpus.
    """
    return sum(map(int, prompt_ids)) % HELD_OUT_EVERY == 0


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt and its reply: ``ids`` of both, the first ``prompt_len`` of them the prompt's."""

    ids: np.ndarray
    prompt_len: int
    temperature: float

    @property
    def prompt(self) -> np.ndarray:
        return self.ids[: self.prompt_len]

    @property
    def reply(self) -> np.ndarray:
        return self.ids[self.prompt_len :]

    @property
    def held_out(self) -> bool:
        return held_out(self.prompt)

    def domain(self, tokenizer) -> str:
        """What the reply is: "code" if it holds a code fence, "prose" otherwise."""
        return "code" if FENCE in tokenizer.decode(self.reply.tolist()) else "prose"


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Chats end to end; see the module for the arrays. Behaves as a sequence of ``Chat``."""

    ids: np.ndarray
    offsets: np.ndarray
    prompt_len: np.ndarray
    temperature: np.ndarray

    @classmethod
    def of(cls, chats: Iterable[Chat]) -> Corpus:
        """The corpus of these chats, in order."""
        chats = list(chats)
        lengths = [len(chat.ids) for chat in chats]
        ids = np.concatenate([np.asarray(chat.ids, np.int64) for chat in chats] or [np.zeros(0, np.int64)])
        narrow = not len(ids) or ids.max() < 2**16
        return cls(
            ids.astype(np.uint16 if narrow else np.int32),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.asarray([chat.prompt_len for chat in chats], np.int32),
            np.asarray([chat.temperature for chat in chats], np.float32),
        )

    @classmethod
    def load(cls, *paths: str | os.PathLike) -> Corpus:
        """The corpora of these files, one behind the other. Raises CorpusError."""
        return cls.join(_load(Path(path)) for path in paths)

    @classmethod
    def join(cls, corpora: Iterable[Corpus]) -> Corpus:
        """One corpus of several of the same tokenizer."""
        return cls.of(chat for corpus in corpora for chat in corpus)

    def save(self, path: str | os.PathLike) -> None:
        """Write to ``path``, complete or not at all. Raises CorpusError."""
        path = Path(path)
        arrays = {name: getattr(self, name) for name in ARRAYS}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, lambda file: np.savez_compressed(file, **arrays))
        except OSError as error:
            raise CorpusError(
                f"The corpus {path} cannot be written ({error.strerror or error}): name a file in a folder"
                " that can be written and has room."
            ) from error

    def __len__(self) -> int:
        return len(self.prompt_len)

    def __getitem__(self, index: int) -> Chat:
        index = range(len(self))[index]
        ids = self.ids[self.offsets[index] : self.offsets[index + 1]]
        return Chat(ids, int(self.prompt_len[index]), float(self.temperature[index]))

    def __iter__(self) -> Iterator[Chat]:
        return (self[index] for index in range(len(self)))

    @property
    def reply_tokens(self) -> int:
        return len(self.ids) - int(self.prompt_len.sum())

    def split(self) -> tuple[Corpus, Corpus]:
        """Training and held-out (``held_out`` of each prompt)."""
        sides: tuple[list[Chat], list[Chat]] = ([], [])
        for chat in self:
            sides[chat.held_out].append(chat)
        return Corpus.of(sides[False]), Corpus.of(sides[True])

    def distinct(self) -> Corpus:
        """Without chats whose prompt, id by id, an earlier one has."""
        seen: set[bytes] = set()
        kept = []
        for chat in self:
            key = np.asarray(chat.prompt, np.int32).tobytes()
            if key not in seen:
                seen.add(key)
                kept.append(chat)
        return Corpus.of(kept)


def _load(path: Path) -> Corpus:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ARRAYS}
    except FileNotFoundError as error:
        raise CorpusError(f"There is no corpus {path}: name a file that core.distill wrote.") from error
    except OSError as error:
        raise CorpusError(f"The corpus {path} cannot be read ({error.strerror or error}).") from error
    except (ValueError, KeyError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise CorpusError(
            f"{path} is not a corpus, or is damaged: name an .npz file with the arrays {_names()}."
        ) from error
    if reason := _flaw(**arrays):
        raise CorpusError(f"The corpus {path} is damaged ({reason}): write it anew.")
    return Corpus(**arrays)


def _names() -> str:
    return ", ".join(ARRAYS[:-1]) + f" and {ARRAYS[-1]}"


def _flaw(
    ids: np.ndarray, offsets: np.ndarray, prompt_len: np.ndarray, temperature: np.ndarray
) -> str | None:
    """What is wrong with the arrays of a corpus; None if nothing is."""
    arrays: Sequence[np.ndarray] = (ids, offsets, prompt_len, temperature)
    if any(array.ndim != 1 for array in arrays) or any(array.dtype.kind not in "ui" for array in arrays[:3]):
        return "an array has another shape or type"
    if temperature.dtype.kind != "f" or len(offsets) != len(prompt_len) + 1:
        return "an array has another length or type"
    if len(temperature) != len(prompt_len):
        return "an array has another length or type"
    lengths = np.diff(offsets.astype(np.int64))
    if offsets[0] != 0 or offsets[-1] != len(ids) or (lengths < 0).any():
        return "its offsets do not fit its ids"
    if (prompt_len < 0).any() or (prompt_len > lengths).any():
        return "a prompt is longer than its chat"
    return "an id is negative" if len(ids) and ids.min() < 0 else None
