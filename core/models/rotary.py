"""What a rotary embedding is meant to be, in float64 and from the words of a file alone.

A second witness: the models that run compute their rotary tables in libraries, or take them over from there,
and a scaling that got lost on the way shows at far positions only, where no short self-test looks (ggml-org/
llama.cpp PR #8676). Here the same is computed from ``config.json`` or from a GGUF file's header by the
published formulas, and ``table_fault`` and ``module_fault`` compare. Shares no code with transformers and
none with ``core.models.decoder``.

Sources: Su et al. 2021 (arXiv:2104.09864); linear scaling, Chen et al. 2023 (arXiv:2306.15595); YaRN, Peng et
al. 2023 (arXiv:2309.00071), sections 3.2 to 3.4; LongRoPE, Ding et al. 2024 (arXiv:2402.13753); Llama 3.1's
factors as Meta published them with that model. GGUF: what ``ggml_rope_ext`` of llama.cpp does with a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a file's header is read without waiting for torch
    import torch

CLOSE = 1e-5  # frequencies in float32 differ from those in float64 by less, relatively
FACTORS, LONG, SHORT = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_FULL = "full_attention"  # where kinds of layers differ, the one whose positions a file scales


class UnknownRotary(ValueError):
    """A rotary embedding that is not known here; the message names it, to stand within a sentence."""


@dataclass(frozen=True)
class Rotary:
    """``size`` elements of a head are turned, in pairs; ``base`` is theta.

    ``kind`` is "none", "linear", "yarn" or "longrope". ``factor`` stretches positions; ``original`` is the
    length the model was first trained at. ``factors`` (size / 2) divide the frequencies one by one, and
    ``long`` do in their place beyond ``original``. ``scale`` multiplies what was turned.
    """

    size: int
    base: float
    original: int
    kind: str = "none"
    factor: float = 1.0
    factors: tuple[float, ...] | None = None
    long: tuple[float, ...] | None = None
    scale: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def frequencies(self) -> torch.Tensor:
        """Radians a position, (size / 2,) float64, of sequences no longer than ``original``."""
        import torch

        plain = self.base ** (-torch.arange(0, self.size, 2, dtype=torch.float64) / self.size)
        if self.factors is not None:
            plain = plain / torch.tensor(self.factors, dtype=torch.float64)
        if self.kind != "yarn":
            return plain / self.factor
        kept = self._kept()
        return plain * kept + plain / self.factor * (1 - kept)

    def _kept(self) -> torch.Tensor:
        """How much of each frequency YaRN leaves as it is: those that turn often within ``original``."""
        import torch

        low, high = (
            self.size * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.base))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.size - 1)
        ramp = (torch.arange(self.size // 2, dtype=torch.float64) - low) / max(high - low, 0.001)
        return 1 - ramp.clamp(0, 1)

    @property
    def plain(self) -> bool:
        """Whether nothing is scaled."""
        return self.kind != "yarn" and self.factors is None and self.factor == self.scale == 1


# --- From config.json --------------------------------------------------------------------------------------


def of_config(config: Mapping, usual_base: float = 10000.0) -> Rotary | None:
    """Of a ``config.json``, old or new words; None where layers differ in it or its kind is not known here.

    ``usual_base`` is theta where none is stated.
    """
    said = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in said.values()):
        return None
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    part = said.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1
    base = float(said.get("rope_theta") or config.get("rope_theta") or usual_base)
    most = config["max_position_embeddings"]
    original = said.get("original_max_position_embeddings") or most
    factor = float(said.get("factor") or 1)
    rotary = Rotary(int(head * part), base, original)
    kind = said.get("rope_type") or said.get("type") or "default"
    if kind == "default":
        return rotary
    if kind == "linear":
        return _with(rotary, kind="linear", factor=factor)
    if kind == "llama3":
        return _with(rotary, factors=_llama3(rotary, said))
    stated = said.get("attention_factor")
    if kind == "yarn":
        one, all_dims = said.get("mscale"), said.get("mscale_all_dim")
        usual = _yarn_scale(factor, one) / _yarn_scale(factor, all_dims) if one and all_dims else None
        usual = _yarn_scale(factor) if usual is None else usual
        return _with(
            rotary,
            kind="yarn",
            factor=factor,
            scale=usual if stated is None else stated,
            beta_fast=float(said.get("beta_fast") or 32),
            beta_slow=float(said.get("beta_slow") or 1),
            truncate=said.get("truncate", True),
        )
    if kind == "longrope":
        factor = said.get("factor") or most / original
        usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return _with(
            rotary,
            kind="longrope",
            factors=tuple(said["short_factor"]),
            long=tuple(said["long_factor"]),
            scale=usual if stated is None else stated,
        )
    return None


def _with(rotary: Rotary, **changes) -> Rotary:
    return Rotary(**{**vars(rotary), **changes})


def _yarn_scale(factor: float, share: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0


def _llama3(rotary: Rotary, said: Mapping) -> tuple[float, ...]:
    """What each frequency is divided by: nothing where a turn is short, ``factor`` where it is long."""
    factor, low, high = (float(said[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    factors = []
    for frequency in rotary.frequencies().tolist():
        turns = rotary.original * frequency / (2 * math.pi)  # within the original length
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / (share + (1 - share) / factor))
    return tuple(factors)


# --- From a GGUF file --------------------------------------------------------------------------------------


def of_gguf(said: Mapping, architecture: str, tensors: Mapping[str, list[float]], config: Mapping) -> Rotary:
    """Of a GGUF file's header, as llama.cpp reads it. ``tensors`` are the factors the file holds, by name;
    ``config`` is the header in the words of a ``config.json``.

    Raises UnknownRotary for what is not known here.
    """
    start = f"{architecture}.rope."
    rope = {name.removeprefix(start): value for name, value in said.items() if name.startswith(start)}
    heads = config.get("num_attention_heads") or 1
    head = said.get(f"{architecture}.attention.key_length") or config.get("hidden_size", 0) // heads
    most = config.get("max_position_embeddings") or 0
    scaling = {name[8:]: value for name, value in rope.items() if name.startswith("scaling.")}
    for name in ("alpha", "yarn_log_multiplier"):
        if scaling.get(name):
            raise UnknownRotary(f"{start}scaling.{name}")
    if scaling.get("yarn_ext_factor", 1) not in (1, -1):
        raise UnknownRotary(f"{start}scaling.yarn_ext_factor")
    known = {"type", "factor", "original_context_length", "finetuned", "attn_factor", "alpha"}
    known |= {f"yarn_{name}" for name in ("ext_factor", "attn_factor", "beta_fast", "beta_slow")}
    if strange := sorted(scaling.keys() - known - {"yarn_log_multiplier"}):
        raise UnknownRotary(f"{start}scaling.{strange[0]}")
    kind, factor = (
        scaling.get("type", "linear"),
        float(scaling.get("factor") or rope.get("scale_linear") or 1),
    )
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise UnknownRotary(f"scaling of the type {kind!r}")
    factors, long, short = (tensors.get(name) for name in (FACTORS, LONG, SHORT))
    if (long is None) != (short is None):
        raise UnknownRotary(f"{LONG} without {SHORT}" if short is None else f"{SHORT} without {LONG}")
    several = [kind == "yarn", factors is not None, long is not None, kind == "longrope" and factor != 1]
    if sum(several) > 1 or (kind == "longrope" and long is None and factors is None):
        raise UnknownRotary(f"scaling of the type {kind!r} with {', '.join(tensors) or 'no factors'}")
    scale = float(scaling.get("attn_factor") or 1) * float(scaling.get("yarn_attn_factor") or 1)
    divided = short if factors is None else factors
    return Rotary(
        size=rope.get("dimension_count") or head,
        base=float(rope.get("freq_base") or 10000.0),  # llama.cpp's own, unstated
        original=scaling.get("original_context_length") or most,
        kind="longrope" if long is not None else "none" if kind == "longrope" else kind,
        factor=1.0 if kind == "none" else factor,
        factors=None if divided is None else tuple(divided),
        long=None if long is None else tuple(long),
        scale=scale * (_yarn_scale(factor) if kind == "yarn" else 1.0),
        beta_fast=float(scaling.get("yarn_beta_fast") or 32),
        beta_slow=float(scaling.get("yarn_beta_slow") or 1),
        truncate=architecture != "gpt-oss",  # whose own config says so; a file has no word for it
    )


def settle(config, rotary: Rotary) -> None:
    """Writes ``rotary`` into a config of transformers, which reads no scaling from GGUF files.

    Factors one by one become its kind "longrope" with the same ones at every length. Where kinds of layers
    differ, those that see everything are meant.
    """
    ropes = config.rope_parameters
    own = ropes.get(_FULL) if isinstance(ropes.get(_FULL), Mapping) else ropes
    if own.get("rope_type") == "proportional":
        return  # a kind that leaves some elements unturned: the file writes them as factors
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    new = {"rope_theta": rotary.base, "rope_type": "default"}
    if rotary.size != head:
        new["partial_rotary_factor"] = rotary.size / head
    most = config.max_position_embeddings
    if rotary.kind == "yarn":
        new |= dict(rope_type="yarn", factor=rotary.factor, original_max_position_embeddings=rotary.original)
        new |= dict(beta_fast=rotary.beta_fast, beta_slow=rotary.beta_slow, truncate=rotary.truncate)
        new |= dict(attention_factor=rotary.scale)
    elif rotary.factors is None and rotary.scale == 1:
        if rotary.factor != 1:
            new |= dict(rope_type="linear", factor=rotary.factor)
    else:
        factors = rotary.factors or (1.0,) * (rotary.size // 2)
        short = [factor * rotary.factor for factor in factors]
        original = most if rotary.long is None else rotary.original
        new |= dict(rope_type="longrope", short_factor=short, long_factor=[*(rotary.long or short)])
        new |= dict(original_max_position_embeddings=original, attention_factor=rotary.scale)
        new |= dict(factor=most / original)
        if hasattr(config, "original_max_position_embeddings"):
            config.original_max_position_embeddings = original
    config.rope_parameters = new if own is ropes else {**ropes, _FULL: new}


# --- Comparing ---------------------------------------------------------------------------------------------


def table_fault(rotary: Rotary, turns: torch.Tensor) -> str | None:
    """What is wrong with a table of rotations (positions, size / 2), complex; None if nothing is.

    Compares the frequencies, the scale and the angles at the last position.
    """
    import torch

    frequencies = rotary.frequencies()
    if turns.shape[-1] != len(frequencies):
        return f"{turns.shape[-1]} pairs are turned and not {len(frequencies)}"
    last = len(turns) - 1
    if last < 1:
        return None
    first, end = turns[[1, last]].detach().cpu().to(torch.complex128)
    if (fault := _fault(rotary, first.angle(), first.abs())) is not None:
        return fault
    meant = torch.polar(torch.full_like(frequencies, rotary.scale), last * frequencies)
    # The position times a frequency in float32, and that frequency's own rounding.
    room = rotary.scale * (1e-3 + 4e-7 * last)
    return None if (end - meant).abs().max() <= room else f"position {last:,} is turned otherwise"


def module_fault(rotary: Rotary, model) -> str | None:
    """The same of the rotary modules of a model of transformers, by their frequencies and scale."""
    found = [_fault(rotary, frequencies, scale) for frequencies, scale in _tables(model)]
    if not found and not rotary.plain:
        return "this model's own module has no frequencies"
    return next((fault for fault in found if fault is not None), None)


def _tables(model) -> Iterator[tuple[torch.Tensor, float]]:
    import torch

    for module in model.modules():
        for start in ("", f"{_FULL}_"):
            frequencies = getattr(module, f"{start}inv_freq", None)
            if isinstance(frequencies, torch.Tensor):
                scale = getattr(module, f"{start}attention_scaling", 1.0)
                yield frequencies.detach().double().cpu(), scale


def _fault(rotary: Rotary, frequencies: torch.Tensor, scale: torch.Tensor | float) -> str | None:
    import torch

    meant = rotary.frequencies()
    if len(frequencies) != len(meant):
        return f"{len(frequencies)} pairs are turned and not {len(meant)}"
    if not torch.allclose(frequencies, meant, rtol=CLOSE, atol=1e-15):
        ratio = frequencies / meant
        worst = int((ratio - 1).abs().argmax())
        return f"frequency {worst} is off by a factor of {ratio[worst]:.3g}"
    scales = torch.as_tensor(scale, dtype=torch.float64)
    if not torch.allclose(scales, torch.full_like(scales, rotary.scale), rtol=CLOSE):
        return f"the scale is {scales.max().item():.4g} and not {rotary.scale:.4g}"
    return None
