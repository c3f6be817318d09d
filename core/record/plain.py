"""Records made of Python's own numbers and texts, which is all that a database, JSON and CSV know.

A NumPy or torch scalar that gets into a record looks like a number and is stored as bytes, or not at all,
and the next export fails. Knows neither library: a scalar is what gives its one value by ``item()``.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import TypeVar

_AS_THEY_ARE = (type(None), bool, int, float, str)
_LARGEST = 2**63  # SQLite's integers are below
Record = TypeVar("Record")


class NotPlain(ValueError):
    """A value that is neither number nor text; the message names it."""


def plain(name: str, value: object) -> object:
    """``value`` of the field ``name`` as None, a number or a text. Raises NotPlain."""
    if isinstance(value, Enum):
        value = value.value
    if type(value) not in _AS_THEY_ARE:
        value = _own(name, value)
    if type(value) is int and not -_LARGEST <= value < _LARGEST:
        raise NotPlain(f"{name} is a number of over 64 bits")
    return value


def _own(name: str, value: object) -> object:
    for kind in (bool, int, float, str):
        if isinstance(value, kind):  # np.float64 is a float
            return kind(value)
    try:
        own = value.item()
    except Exception as error:  # of each library its own: no scalar, a tensor of several
        raise NotPlain(f"{name} is a {type(value).__name__}, which is neither a number nor a text") from error
    if type(own) not in _AS_THEY_ARE:
        raise NotPlain(f"{name} is a {type(own).__name__}, which is neither a number nor a text")
    return own


def plain_record(record: Record) -> Record:
    """A dataclass of ``core.records`` with plain values, those in its tuples and dataclasses too; itself
    where they are. Tuples of pairs (``top_p``) are left to ``struct``, which packs scalars of any make.

    Raises NotPlain.
    """
    changes = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if value is None or type(value) is float or type(value) is str:  # most are: this runs for each token
            continue
        if (changed := _within(field.name, value)) is not value:
            changes[field.name] = changed
    return replace(record, **changes) if changes else record


def _within(name: str, value: object) -> object:
    if isinstance(value, Enum):
        return value
    if is_dataclass(value):
        return plain_record(value)
    if isinstance(value, tuple):
        if value and isinstance(value[0], tuple):
            return value
        own = [_within(name, inner) for inner in value]
        return value if all(a is b for a, b in zip(own, value, strict=True)) else tuple(own)
    return plain(name, value)
