"""Pairs that are known to go together, with what a person wants to know before downloading gigabytes.

Each model is described by its published ``config.json``; parameters, memory and download sizes are computed
from that. Knows nothing of what is on this machine, downloads nothing, and imports neither torch
(but to ask what a processor can) nor transformers.

Run: ``python -m core.pairs.catalogue`` prints the table.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.models.asked import settled_form
from core.models.memory import OVERHEAD, Size, choose_dtype, gigabytes, needed_to_load, size_of
from core.models.sources import EMBEDDED, SpecError
from core.pairs.spec import PairSpec, embedded_spec

PUBLISHED_BYTES = 2  # a weight, as all of these are published


@dataclass(frozen=True)
class Model:
    """One model of the catalogue. ``head_published``: its files hold the head though it is the embedding
    again.
    """

    repo: str
    config: dict[str, object]
    head_published: bool = False

    @property
    def size(self) -> Size:
        size = size_of(self.config)
        assert size is not None, f"{self.repo} cannot be counted"
        return size

    @property
    def download_bytes(self) -> int:
        twice = self.config["vocab_size"] * self.config["hidden_size"] if self.head_published else 0
        return PUBLISHED_BYTES * (self.size.parameters + twice)

    def needed_to_load(self, form: str, device: str, draft: bool, dtype: str = "auto") -> int:
        """The most bytes it takes on "cpu" or "cuda", in forms and types of ``core.models.asked``."""
        bytes_16bit = 2 * self.size.parameters
        form = settled_form(form, device, draft, bytes_16bit)
        needed = needed_to_load(self.config, form, choose_dtype(dtype, device, bytes_16bit), device)
        assert needed is not None
        return needed


def _config(
    kind: str,
    vocabulary: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: tuple[int, int],
    context: int,
    tied: bool,
    head: int | None = None,
) -> dict[str, object]:
    """The part of a ``config.json`` that sizes depend on; ``heads`` of queries and of keys and values."""
    return {
        "model_type": kind,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": head or hidden // heads[0],
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
    }


_SMOLLM2_135M = Model(
    "HuggingFaceTB/SmolLM2-135M-Instruct", _config("llama", 49152, 576, 1536, 30, (9, 3), 8192, True)
)
_SMOLLM2_360M = Model(
    "HuggingFaceTB/SmolLM2-360M-Instruct", _config("llama", 49152, 960, 2560, 32, (15, 5), 8192, True)
)
_SMOLLM2_1_7B = Model(
    "HuggingFaceTB/SmolLM2-1.7B-Instruct", _config("llama", 49152, 2048, 8192, 24, (32, 32), 8192, True)
)
_QWEN25_0_5B = Model(
    "Qwen/Qwen2.5-0.5B-Instruct", _config("qwen2", 151936, 896, 4864, 24, (14, 2), 32768, True)
)
_QWEN25_1_5B = Model(
    "Qwen/Qwen2.5-1.5B-Instruct", _config("qwen2", 151936, 1536, 8960, 28, (12, 2), 32768, True)
)
_QWEN25_7B = Model(
    "Qwen/Qwen2.5-7B-Instruct", _config("qwen2", 152064, 3584, 18944, 28, (28, 4), 32768, False)
)
_QWEN3_0_6B = Model(
    "Qwen/Qwen3-0.6B",
    _config("qwen3", 151936, 1024, 3072, 28, (16, 8), 40960, True, head=128),
    head_published=True,
)
_QWEN3_4B = Model("Qwen/Qwen3-4B", _config("qwen3", 151936, 2560, 9728, 36, (32, 8), 40960, True, head=128))
_QWEN3_8B = Model("Qwen/Qwen3-8B", _config("qwen3", 151936, 4096, 12288, 36, (32, 8), 40960, False, head=128))
_QWEN3_14B = Model(
    "Qwen/Qwen3-14B", _config("qwen3", 151936, 5120, 17408, 40, (40, 8), 40960, False, head=128)
)
_LLAMA32_1B = Model(
    "meta-llama/Llama-3.2-1B-Instruct", _config("llama", 128256, 2048, 8192, 16, (32, 8), 131072, True)
)
_LLAMA31_8B = Model(
    "meta-llama/Llama-3.1-8B-Instruct", _config("llama", 128256, 4096, 14336, 32, (32, 8), 131072, False)
)


@dataclass(frozen=True)
class Entry:
    """A pair of the catalogue. ``gated``: its files are given only to accounts with access."""

    name: str
    title: str
    target_model: Model
    draft_model: Model
    licence: str = "Apache-2.0"
    gated: bool = False

    @property
    def target(self) -> str:
        return self.target_model.repo

    @property
    def draft(self) -> str:
        return self.draft_model.repo

    @property
    def target_parameters(self) -> int:
        return self.target_model.size.parameters

    @property
    def draft_parameters(self) -> int:
        return self.draft_model.size.parameters

    @property
    def size_ratio(self) -> float:
        """How many times the draft's parameters the target has."""
        return self.target_parameters / self.draft_parameters

    @property
    def download_bytes(self) -> int:
        """The weights of both, as published."""
        return self.target_model.download_bytes + self.draft_model.download_bytes

    def needed_bytes(
        self, device: str, quantize: str = "auto", draft_quantize: str = "auto", dtype: str = "auto"
    ) -> int:
        """The most memory that the pair takes on "cuda" or "cpu": as ``Model.needed_to_load``."""
        return (
            self.target_model.needed_to_load(quantize, device, False, dtype)
            + self.draft_model.needed_to_load(draft_quantize, device, True, dtype)
            + OVERHEAD
        )


# By size of the target, smallest first.
CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("smollm2-360m", "SmolLM2 360M + 135M", _SMOLLM2_360M, _SMOLLM2_135M),
        Entry("qwen2.5-1.5b", "Qwen2.5 1.5B + 0.5B", _QWEN25_1_5B, _QWEN25_0_5B),
        Entry("smollm2-1.7b", "SmolLM2 1.7B + 135M", _SMOLLM2_1_7B, _SMOLLM2_135M),
        Entry("qwen3-4b", "Qwen3 4B + 0.6B", _QWEN3_4B, _QWEN3_0_6B),
        Entry("qwen2.5-7b", "Qwen2.5 7B + 0.5B", _QWEN25_7B, _QWEN25_0_5B),
        Entry(
            "llama-3.1-8b",
            "Llama 3.1 8B + 3.2 1B",
            _LLAMA31_8B,
            _LLAMA32_1B,
            licence="Llama 3.1 and 3.2 Community Licences",
            gated=True,
        ),
        Entry("qwen3-8b", "Qwen3 8B + 0.6B", _QWEN3_8B, _QWEN3_0_6B),
        Entry("qwen3-14b", "Qwen3 14B + 0.6B", _QWEN3_14B, _QWEN3_0_6B),
    )
}


def spec(name: str) -> PairSpec:
    """The pair of that name (letter case does not matter), "embedded" included. Raises SpecError."""
    wanted = name.strip().lower()
    if wanted == EMBEDDED:
        return embedded_spec()
    entry = CATALOGUE.get(wanted)
    if entry is None:
        raise SpecError(f"There is no pair {name!r}: choose one of {', '.join([EMBEDDED, *CATALOGUE])}.")
    return PairSpec(
        name=entry.name,
        target=entry.target,
        draft=entry.draft,
    )


def fitting(free_bytes: int, device: str = "cuda", gated: bool = False) -> Entry | None:
    """The pair with the largest target that fits into ``free_bytes``; gated ones only where asked for."""
    fits = [
        entry
        for entry in CATALOGUE.values()
        if entry.needed_bytes(device) <= free_bytes and (gated or not entry.gated)
    ]
    return max(fits, key=lambda entry: entry.target_parameters, default=None)


def main() -> None:
    for entry in CATALOGUE.values():
        print(
            f"{entry.name:13} {entry.title:22} {entry.target_parameters / 1e9:6.2f} B "
            f"{entry.size_ratio:5.1f}:1  card {gigabytes(entry.needed_bytes('cuda')):>8}  "
            f"cpu {gigabytes(entry.needed_bytes('cpu')):>8}  download {gigabytes(entry.download_bytes):>8}  "
            f"{entry.licence}{', gated' if entry.gated else ''}"
        )


if __name__ == "__main__":
    main()
