"""How much memory a model needs, how much is free, and a refusal in words where the first is more.

Counts parameters from a model's configuration; the sums are estimates on the careful side, never measured
here. Knows nothing of where models come from or of how they are loaded, and imports torch only to ask a
card or a processor.

Run: ``python -m core.models.memory`` prints what is free.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.models import card
from core.models.errors import LoadError
from core.models.key_blocks import PARTS, held_positions
from core.models.processor import has_fast_bfloat16

# Bytes for one weight of a linear layer, by form (``core.models.asked.QUANTIZE``). "nf4" with double
# quantisation is 4 bits + 8 bits for every 64 weights; the forms of the project keep a scale for every row or
# group; the rest is for alignment and for what a kernel keeps beside them. "none" is as wide as the dtype.
WEIGHT_BYTES = {"nf4": 0.55, "int4": 0.65, "llm-int8": 1.05, "int8": 1.1}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PACKED = ("int8", "int4")  # the project's own forms
# Bytes that rounding a product's weights takes for each of them, beside what it becomes.
ROUNDING_BYTES = {"int8": 3, "int4": 13, "llm-int8": 2}

# On a processor with bfloat16 products, models above this many bytes (in 16 bits) run in bfloat16.
# Smaller ones run in float32, whose rounding is so small that a row hardly depends on its neighbours.
LARGE = 1e9

CONTEXT = 4096  # tokens of conversation that a pair should have room for
# Logits, workspaces of kernels, activations of passes over few rows: per pair. Caches that are kept of other
# conversations are not counted, for they go where memory ends (``core.engine.loop``).
OVERHEAD = 400_000_000
# Rows of a prompt that a card reads in a pass, most first. NF4's weights are unpacked anew for each pass, and
# read again: 29 GB for a 7B, a fifth of what 1,024 rows take to multiply on a card of 1 TB/s. A pass of more
# than 2,048 would keep somebody who stops it waiting.
PROMPT_ROWS = (2048, 1024, 512, 256)
COUNTED_ROWS = 1024  # of which the plan counts the activations
CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Size:
    """What a model is made of, in numbers, not bytes.

    ``parameters`` counts a tied head once; ``linear`` are those in the layers' matrices, which a quantised
    form shrinks (embedding, head, norms and biases stay as wide as the dtype); ``cache`` is how many numbers
    one token adds to the KV cache. ``layer`` are the linear ones of one layer, ``largest`` those of its
    largest product (queries, keys and values are one product, and so are the gate and what it lets through);
    ``table`` are those of the embedding; ``widths`` are the numbers a row of a pass has in the residual
    stream, in the queries, in the keys, and in the gate of the MLP.
    """

    parameters: int
    linear: int
    cache: int
    layer: int
    largest: int
    table: int
    widths: tuple[int, int, int, int]

    def weights(self, form: str, dtype: str) -> int:
        """Bytes of the weights in a form of ``asked.QUANTIZE`` but "auto"; ``dtype`` is what stays wide."""
        wide = DTYPE_BYTES[dtype]
        return round(self.linear * WEIGHT_BYTES.get(form, wide) + (self.parameters - self.linear) * wide)

    def kept(self, tokens: int, context: int, dtype: str) -> int:
        """Bytes of a KV cache of so many tokens, of a model of this context."""
        return held_positions(tokens, context) * self.cache * DTYPE_BYTES[dtype]

    def row(self, form: str, dtype: str) -> int:
        """Bytes of activations that a row of a prompt's pass takes."""
        return row_bytes(*self.widths, form, DTYPE_BYTES[dtype])

    def read(self, dtype: str) -> int:
        """Bytes of the largest part of a model that is read from its files at once: a layer, or a table."""
        return DTYPE_BYTES[dtype] * max(self.layer, self.table)

    def packing(self, form: str, dtype: str) -> int:
        """Bytes beside those of the packed weights while one part after the other is packed: a layer as it
        was read, the product that is made of it and what a form's rounding takes a weight, or the head."""
        wide, rounding = DTYPE_BYTES[dtype], ROUNDING_BYTES.get(form, 0)
        head = self.table * (wide + rounding) if form in PACKED else 0  # of other forms it stays as it is
        product = wide + rounding if form in WEIGHT_BYTES else 0  # which a dense form keeps as it is
        return max(self.layer * wide + self.largest * product, head)


def row_bytes(hidden: int, queries: int, keys: int, inner: int, form: str, wide: int) -> int:
    """Bytes of activations that a row of a pass takes in the widest place, the MLP: the residual stream and
    what is added to it, the gate with what it lets through and their product, beside queries, keys and values
    in float32 and queries as attention takes them. LLM.int8 makes whole numbers of 32 bits first."""
    sums = 4 * 2 * inner if form == "llm-int8" else 0
    return wide * (2 * hidden + queries + 3 * inner) + 4 * (queries + 2 * keys) + sums


def size_of(config: Mapping[str, object]) -> Size | None:
    """The size of a Llama-shaped model (Llama, Mistral, Qwen2, Qwen3, Gemma, ...) from its ``config.json``.

    None where the configuration says too little, or names experts, whose weights are counted otherwise.
    """
    config = config.get("text_config") or config
    try:
        hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        heads, inner = int(config["num_attention_heads"]), int(config["intermediate_size"])
        vocabulary = int(config["vocab_size"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head = int(config.get("head_dim") or hidden // heads)
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None
    if any("expert" in name and value for name, value in config.items()):
        return None
    if layers < 1:
        return None
    queries, keys = heads * head, kv_heads * head
    linear = layers * (hidden * (2 * queries + 2 * keys) + 3 * hidden * inner)
    kind = config.get("model_type")
    small = 2 * hidden  # the norms before attention and before the MLP
    if kind == "qwen2":
        small += queries + 2 * keys  # biases of q, k and v
    elif kind == "qwen3":
        small += 2 * head  # norms of queries and keys
    tied = config.get("tie_word_embeddings", kind in ("gemma", "gemma2", "gemma3_text"))
    rows = vocabulary * hidden * (1 if tied else 2)
    return Size(
        parameters=linear + layers * small + hidden + rows,
        linear=linear,
        cache=2 * layers * keys,
        layer=linear // layers,
        largest=hidden * max(queries + 2 * keys, 2 * inner),
        table=vocabulary * hidden,
        widths=(hidden, queries, keys, inner),
    )


def choose_dtype(asked: str, device: str, bytes_16bit: int | None) -> str:
    """The type ("float32", ...) of activations and of weights that are not quantised; ``asked`` is one of
    ``core.models.asked.DTYPES``, ``bytes_16bit`` a model's weights in 16 bits, None where unknown.
    """
    if asked != "auto":
        return asked
    if device == "cuda":
        return card.half()
    large = bytes_16bit is not None and bytes_16bit > LARGE
    return "bfloat16" if large and has_fast_bfloat16() else "float32"


def needed_to_load(
    config: Mapping[str, object],
    form: str,
    dtype: str,
    device: str,
    parameters: int | None = None,
    stored_bytes: int | None = None,
    by_layer: bool = True,
) -> int | None:
    """The most bytes that a model takes on "cpu" or "cuda", from loading to a conversation.

    ``by_layer``: whether it is packed layer by layer (``core.models.by_layer``), or else the project's own
    forms from weights that are whole at first. ``stored_bytes`` is the size of weights that come quantised
    and stay so. None where nothing is known of the model.
    """
    size = size_of(config)
    if size is None:
        if stored_bytes is not None or parameters is None:
            return stored_bytes
        forms = [form, "none"] if form in PACKED else [form]
        return max(round(parameters * WEIGHT_BYTES.get(one, DTYPE_BYTES[dtype])) for one in forms)
    weights = size.weights(form, dtype) if stored_bytes is None else stored_bytes
    whole = weights + _conversation(size, config, form, dtype, device)
    if stored_bytes is not None:
        return whole
    if by_layer:  # while nothing of OVERHEAD is in use yet
        return max(whole, weights + size.packing(form, dtype) - OVERHEAD)
    return max(whole, size.weights("none", dtype)) if form in PACKED else whole


def _conversation(size: Size, config: Mapping[str, object], form: str, dtype: str, device: str) -> int:
    """Bytes beside the weights: the cache of ``CONTEXT`` tokens (less where the model holds fewer) while it
    grows to that, the largest matrix where a form unpacks it for each pass over many rows, and on a card the
    activations of such a pass."""
    holds = config.get("max_position_embeddings")
    holds = holds if isinstance(holds, int) and holds > 0 else CONTEXT
    kept = size.kept(min(CONTEXT, holds), holds, "float32" if device == "cpu" else dtype)
    unpacked = size.largest * DTYPE_BYTES["bfloat16"] if form == "nf4" else 0
    rows = min(COUNTED_ROWS, CONTEXT, holds) if device == "cuda" else 0
    return kept + -(-kept // PARTS) + unpacked + rows * size.row(form, dtype)


def free_bytes(device: str) -> int | None:
    """Memory that can still be had on "cpu" (of this process's control group, where that is less) or "cuda"
    (of the current card); None where nobody can tell.
    """
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
    import psutil

    return min([psutil.virtual_memory().available, *_left_in_groups(CGROUPS, MEMBERSHIP)])


def prompt_rows(row: int) -> int:
    """How many rows of a prompt the current card may read in a pass, where each takes ``row`` bytes of
    activations: as many as take half of what is free, what torch holds and nobody uses included."""
    free = free_bytes("cuda")
    if free is None:
        return COUNTED_ROWS
    import torch

    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return next((rows for rows in PROMPT_ROWS if rows * row <= free // 2), PROMPT_ROWS[-1])


def _left_in_groups(root: Path, membership: Path) -> Iterable[int]:
    """What is left below the limit of each control group that this process is in (versions 1 and 2)."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, used = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = top / path.strip("/")
        # In a container the path may be the host's, of which only the root can be seen: missing ones are
        # passed over.
        for folder in [group, *(parent for parent in group.parents if parent.is_relative_to(top))]:
            left = _left(folder, limit, used)
            if left is not None:
                yield left


def _left(folder: Path, limit: str, used: str) -> int | None:
    try:
        most = (folder / limit).read_text().strip()
        if most == "max":
            return None
        now = int((folder / used).read_text())
        # Pages of files that were read and can be dropped count as used, though nobody holds them.
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        dropped = int(statistics.get("total_inactive_file") or statistics.get("inactive_file") or 0)
        return max(int(most) - now + dropped, 0)
    except (OSError, ValueError):
        return None


def release() -> None:
    """Gives memory back that nobody needs any more, a card's too."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Need:
    """One model of a pair: its name for people, its form, its bytes (``needed_to_load``), and what to ask for
    so that it is smaller, where there is such a form.
    """

    model: str
    form: str
    bytes: int
    smaller: str | None = None


def check(needs: Sequence[Need], device: str, free: int | None = None) -> None:
    """Raises LoadError where the models together need more than is ``free`` on ``device`` (None: ask).

    Passes where the free memory cannot be told.
    """
    free = free_bytes(device) if free is None else free
    total = sum(need.bytes for need in needs) + OVERHEAD
    if free is None or total <= free:
        return
    place = "on the card" if device == "cuda" else "in memory"
    each = " and ".join(
        f"{need.model} about {gigabytes(need.bytes)} ({'unquantised' if need.form == 'none' else need.form})"
        for need in needs
    )
    forms = " ".join(need.smaller for need in needs if need.smaller)
    smaller = f" quantise ({forms})," if forms else ""
    raise LoadError(
        f"There is too little memory: {each} would need {gigabytes(total)} with room to work, and "
        f"{gigabytes(free)} are free {place}; choose a smaller model,{smaller} or close what else uses it."
    )


def gigabytes(count: int) -> str:
    """Bytes for people: "5.4 GB", with two digits below one."""
    return f"{count / 1e9:.2f} GB" if count < 995_000_000 else f"{count / 1e9:,.1f} GB"


def main() -> None:
    for device in ("cpu", "cuda"):
        free = free_bytes(device)
        print(f"{device}: {'–' if free is None else gigabytes(free)} free", file=sys.stdout)


if __name__ == "__main__":
    main()
