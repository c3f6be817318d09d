"""A CUDA card without a card: real module code on tensors that say ``cuda:0`` and hold no numbers.

    with FakeCard() as card:
        x = torch.empty(2, 3, device=CUDA)   # takes no memory
        with card.counting() as counts:
            y = (x @ x.T).cpu()              # one launch, one view, one copy to the host, one wait

Tensors on the card are torch's own fake ones (``FakeTensorMode``), which have shapes, dtypes and a device and
raise where a tensor of the processor meets one of the card. Tensors on the processor are real. What is copied
to the host gets its numbers from ``answer``, so that code which reads them there goes on.

``Counts`` says what a card's driver and its host would have been given to do:

- ``launches``: operations that start at least one kernel. An operation that torch makes of others is counted
  by those; attention and the RMS norm are one, as on a card, and so is a product of bitsandbytes: whether it
  runs its fused kernel, or unpacks the weights first, depends on rows and card. Sorts, sums and the like may
  be several kernels in truth.
- ``views``: operations that look at memory another way or set memory aside. They cost the host alone.
- ``uploads`` and ``downloads``: copies from and to the host.
- ``waits``: what stops the host until the card has got there: downloads, uploads from memory that is not
  pinned, asking for a value, and results whose size depends on values.

Knows nothing of models. It cannot show what kernels compute or how long they take, which kernel is chosen,
waits within CUDA's own libraries, or memory that runs out. Where it needs torch's private parts it is tested
(``tests/core/bench/test_fake_card.py``), so that a new torch is noticed there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.attention import bias
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

CUDA = torch.device("cuda:0")
HALVES = (torch.bfloat16, torch.float16)
ATEN = torch.ops.aten

# One kernel each on a card, though torch can also make them of others.
ATTENTION = ATEN.scaled_dot_product_attention.default
WHOLE = {ATTENTION, ATEN.rms_norm.default}
VIEWS = frozenset(
    "view _unsafe_view reshape _reshape_alias transpose t numpy_T permute expand unsqueeze squeeze select"
    " slice narrow unbind split split_with_sizes unsafe_split unsafe_split_with_sizes chunk diagonal"
    " as_strided alias detach detach_ view_as_complex view_as_real lift lift_fresh empty empty_like"
    " empty_strided new_empty new_empty_strided".split()
)
# Results whose size, or what the host does next, depends on values.
ASKING = frozenset(
    "_local_scalar_dense is_nonzero nonzero masked_select _unique2 unique_dim unique_consecutive equal"
    " bincount".split()
)
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
VALUES = {"item": lambda value: value, "__bool__": bool, "__int__": int, "__float__": float, "__index__": int}


class NeedsNumbers(RuntimeError):
    """Something asked the card for a result whose size depends on values, which a fake one has not."""


@dataclass
class Counts:
    """What was done on the card; ``kinds`` are launches by the name of the operation."""

    launches: int = 0
    views: int = 0
    uploads: int = 0
    downloads: int = 0
    waits: int = 0
    kinds: Counter[str] = field(default_factory=Counter)

    @property
    def figures(self) -> tuple[int, int, int, int, int]:
        return self.launches, self.views, self.uploads, self.downloads, self.waits


Answer = Callable[[torch.Tensor], torch.Tensor]  # of a tensor on the card: one of its shape and dtype, real


def zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


class _Mode(FakeTensorMode):
    avoid_device_init = True  # also where ``torch.cuda`` says that there is a card


class FakeCard(TorchDispatchMode):
    """Within it ``cuda:0`` is there. ``answer`` gives the numbers of what is copied to the host."""

    def __init__(self, answer: Answer = zeros):
        super().__init__()
        self.answer = answer
        self._fake = _Mode(allow_non_fake_inputs=False)
        self._counts: Counts | None = None
        self._open: contextlib.ExitStack | None = None

    @contextlib.contextmanager
    def counting(self) -> Iterator[Counts]:
        """Counts what happens within."""
        before, self._counts = self._counts, Counts()
        try:
            yield self._counts
        finally:
            self._counts = before

    def __enter__(self) -> FakeCard:
        # torch lists once which functions heed ``with torch.device(...)``: the real ones and no stand-ins, or
        # else models that are read later in this process are made on the wrong device.
        _device_constructors()
        with contextlib.ExitStack() as stack:
            for owner, name, stand_in in _stand_ins(self):
                stack.enter_context(mock.patch.object(owner, name, stand_in))
            stack.enter_context(_fresh_tables())
            stack.enter_context(self._fake)
            super().__enter__()
            self._open = stack.pop_all()
        return self

    def __exit__(self, *about: object) -> None:
        super().__exit__(*about)
        self._open.__exit__(*about)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "prim":  # the device of a tensor
            return func(*args, **kwargs)
        tensors = list(_tensors((*args, *kwargs.values())))
        on_card = [tensor for tensor in tensors if is_on_card(tensor)]
        goal = kwargs.get("device")
        wanted = None if goal is None else torch.device(goal).type
        if not on_card and wanted != "cuda":
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "_to_copy" and len(on_card) == (wanted == "cpu"):
            return self._moved(args[0], kwargs)
        if func == ATEN.copy_.default and len(on_card) == 1:
            return self._copied(*args, **kwargs)
        if _is_composite(func):
            with self._watching_on():
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if name in ASKING:
            return self._asked(name, args[0])
        args = self._indices_moved(name, args)
        if len(on_card) < len(tensors):
            args, kwargs = tree_map_only(torch.Tensor, lambda one: self._beside(name, one), (args, kwargs))
        result = self._attended(*args[:3]) if func == ATTENTION else func(*args, **kwargs)
        if self._counts is not None:
            if name in VIEWS:
                self._counts.views += 1
            else:
                self._counts.launches += 1
                self._counts.kinds[name] += 1
        return result

    @contextlib.contextmanager
    def _watching_on(self) -> Iterator[None]:
        """Sees also what an operation is made of."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    # --- Between host and card ---

    def _moved(self, tensor: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """``tensor`` on the other side, perhaps in another dtype."""
        dtype = kwargs.get("dtype") or tensor.dtype
        if is_on_card(tensor):
            with unset_fake_temporarily():
                return self._downloaded(tensor, wait=not kwargs.get("non_blocking")).to(dtype)
        self._upload(tensor, kwargs.get("non_blocking", False))
        return self._empty(tensor.shape, dtype)

    def _copied(self, goal: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if is_on_card(source):
            with unset_fake_temporarily():
                goal.copy_(self._downloaded(source, wait=not non_blocking).expand_as(goal))
        else:
            self._upload(source, non_blocking)
        return goal

    def _upload(self, tensor: torch.Tensor, non_blocking: bool) -> None:
        if self._counts is not None:
            self._counts.uploads += 1
            self._counts.waits += not (non_blocking and getattr(tensor, "_pinned", False))

    def _downloaded(self, tensor: torch.Tensor, wait: bool = True) -> torch.Tensor:
        if self._counts is not None:
            self._counts.downloads += 1
            self._counts.waits += wait
        with unset_fake_temporarily():
            return self.answer(tensor)

    def _value(self, tensor: torch.Tensor) -> bool | int | float:
        with unset_fake_temporarily():
            return self._downloaded(tensor).flatten()[0].item()

    def _listed(self, tensor: torch.Tensor) -> Any:
        with unset_fake_temporarily():
            return self._downloaded(tensor).tolist()

    def _asked(self, name: str, tensor: torch.Tensor) -> Any:
        if name == "_local_scalar_dense":
            return self._value(tensor)
        if self._counts is not None:
            self._counts.waits += 1
        raise NeedsNumbers(f"{name} waits for the card: what follows depends on its numbers")

    def _indices_moved(self, name: str, args: tuple) -> tuple:
        """``args`` with indices of the host on the card: torch moves them there itself, and waits."""
        if name not in INDEXING:
            return args
        indices = []
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                return self._asked("an index by a mask", index)
            if index is not None and not is_on_card(index):
                self._upload(index, False)
                index = self._empty(index.shape, index.dtype)
            indices.append(index)
        return (args[0], indices, *args[2:])

    def _beside(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor as an operation on the card can take it: one number may come from the host."""
        if is_on_card(tensor):
            return tensor
        if tensor.dim() == 0:
            if name == "where":  # whose kernel takes none: torch brings it to the card first
                self._upload(tensor, False)
            return self._empty((), tensor.dtype, tensor.device)
        raise RuntimeError(
            f"{name}: expected all tensors to be on the same device, but found cuda:0 and {tensor.device}"
        )

    def _attended(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """As kernels for a card lay it out: position by position, not head by head."""
        if not query.dtype == key.dtype == value.dtype:
            raise RuntimeError(f"attention: {query.dtype}, {key.dtype} and {value.dtype} do not go together")
        batch, heads, rows, _ = query.shape
        made = self._empty([batch, rows, heads, value.shape[-1]], query.dtype)
        with self._fake:
            return ATEN.transpose.int(made, 1, 2)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device = CUDA) -> torch.Tensor:
        with self._fake:
            return ATEN.empty.memory_format(shape, dtype=dtype, device=device)


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """Those among an operation's arguments, which are no deeper than lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (one for one in value if isinstance(one, torch.Tensor))


@functools.cache
def _is_composite(func: torch._ops.OpOverload) -> bool:
    """Whether torch makes the operation of others on every device."""
    key = "CompositeImplicitAutograd"
    return func not in WHOLE and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def is_on_card(tensor: object) -> bool:
    return isinstance(tensor, FakeTensor)


# --- What torch's own C++ would ask a driver for, or does behind the dispatcher -----------------------------


def _stand_ins(card: FakeCard) -> list[tuple[object, str, object]]:
    """What to put in whose place, under which name, while ``card`` is there."""
    real_tensor = torch.tensor

    def tensor(data: object, *, pin_memory: bool = False, **how: object) -> torch.Tensor:
        made = real_tensor(data, **how)
        if pin_memory:
            made._pinned = True
        return made

    return [
        (torch, "tensor", tensor),
        (torch.cuda, "current_stream", lambda device=None: _Stream()),
        (torch.cuda, "Event", _Event),
        (torch.cuda, "current_device", lambda: 0),
        # Which of its kernels can run is asked of a card; the memory-efficient ones always can here.
        (bias.CausalBias, "__new__", _made_apart),
        (bias, "can_use_flash_attention", lambda asked, debug=False: asked.query.dtype in HALVES),
        (bias, "can_use_efficient_attention", lambda asked, debug=False: True),
        (FakeTensor, "__getitem__", _getitem),
        (FakeTensor, "__setitem__", _setitem),
        (FakeTensor, "__invert__", lambda self: ATEN.bitwise_not.default(self)),
        (FakeTensor, "copy_", _copy),
        (FakeTensor, "contiguous", _contiguous),
        *(
            (FakeTensor, name, lambda self, kind=kind: kind(card._value(self)))
            for name, kind in VALUES.items()
        ),
        (FakeTensor, "tolist", lambda self: card._listed(self)),
    ]


def _made_apart(kind: type, *given: object) -> torch.Tensor:
    """A tensor that only says something: made under a mode it would be of another class."""
    with _disable_current_modes():
        return torch.Tensor.__new__(kind)


class _Stream:
    def record_event(self, event: _Event) -> _Event:
        return event


class _Event:
    """Fake time stands still."""

    def __init__(self, **how: object):
        pass

    def elapsed_time(self, other: _Event) -> float:
        return 0.0


@contextlib.contextmanager
def _fresh_tables() -> Iterator[None]:
    """bitsandbytes keeps a table on the card for the next weight: one on a fake card is not for later."""
    if importlib.util.find_spec("bitsandbytes") is None:
        yield
        return
    from bitsandbytes import functional

    with mock.patch.dict(functional.name2qmap, clear=True):
        yield


def _copy(goal: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return ATEN.copy_.default(goal, source, non_blocking)


def _contiguous(tensor: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format):
    if tensor.is_contiguous(memory_format=memory_format):
        return tensor
    return ATEN.clone.default(tensor, memory_format=memory_format)


def _getitem(tensor: torch.Tensor, key: object) -> torch.Tensor:
    viewed, indices = _viewed(tensor, key)
    return ATEN.index.Tensor(viewed, indices) if indices else viewed


def _setitem(tensor: torch.Tensor, key: object, value: object) -> None:
    viewed, indices = _viewed(tensor, key)
    if indices:
        value = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=tensor.dtype)
        ATEN.index_put_.default(viewed, indices, value)
    elif isinstance(value, torch.Tensor):
        ATEN.copy_.default(viewed, value)
    else:
        ATEN.fill_.Scalar(viewed, value)


def _viewed(tensor: torch.Tensor, key: object) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The view that numbers and slices of ``key`` make, and the indices that are tensors, by dimension."""
    parts = list(key) if isinstance(key, tuple) else [key]
    named = sum(part is not None and part is not Ellipsis for part in parts)
    at = next((index for index, part in enumerate(parts) if part is Ellipsis), len(parts))
    parts[at : at + 1] = [slice(None)] * (tensor.dim() - named)
    dim, indices = 0, {}
    for part in parts:
        if isinstance(part, torch.Tensor | list) and (isinstance(part, list) or part.dim()):
            indices[dim] = part if isinstance(part, torch.Tensor) else torch.tensor(part)
        elif part is None:
            tensor = ATEN.unsqueeze.default(tensor, dim)
        elif not isinstance(part, slice):  # a tensor without dimensions, too, is asked for its value
            tensor = ATEN.select.int(tensor, dim, int(part))
            dim -= 1
        elif part != slice(None):
            step = 1 if part.step is None else part.step
            tensor = ATEN.slice.Tensor(tensor, dim, part.start, part.stop, step)
        dim += 1
    return tensor, [indices.get(index) for index in range(max(indices, default=-1) + 1)]
