"""The form a model's weights take: NF4 and LLM.int8 by bitsandbytes, int8 and int4 by the project, or none.

- ``nf4``: 4 bits, double quantisation, products in 16 bits (Dettmers et al. 2023, arXiv:2305.14314).
- ``llm-int8``: LLM.int8 (Dettmers et al. 2022, arXiv:2208.07339) with threshold 0.0. Any other threshold
  picks outlier columns over all rows of a pass at once, and the score of a token would depend on the drafts
  behind it (docs/ENGINE.md, rule 13).
- ``int8``, ``int4``: the project's products for a CPU (``core.models.linear``), by the kernel that evidence
  found right and fastest here; the head is always int8, as heads suffer most.

A lean decoder is made of such products (``maker``), which
are packed from weights of any kind of file; in a model of transformers they take the place of its
own after it was loaded (``apply``), and bitsandbytes' are put in while it is read (``loading_config``). What
really was quantised is counted after loading and said as it is (BQ-01). Knows nothing of where a model comes
from or how it is read.
"""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from core.machine.home import home
from core.machine.progress import Progress, silent
from core.models import card
from core.models.asked import has_bitsandbytes, quantize_flag, settled_form
from core.models.decoder import Decoder, Make
from core.models.errors import LoadError
from core.models.linear import (
    DenseLinear,
    Int4Linear,
    Linear,
    LlmInt8Linear,
    Nf4Linear,
    evidence,
    forms,
)
from core.models.linear.findings import Sizes
from core.models.memory import PACKED
from core.models.sizes import EMBEDDED

BITSANDBYTES = {"nf4": "Linear4bit", "llm-int8": "Linear8bitLt"}  # form: bitsandbytes' class
INT8_CARDS = (7, 5)  # from this compute capability on cards have the int8 products of bitsandbytes
_SHOWN = {"llm-int8": "llm.int8"}  # where a reply's record has another name
# On some processors bitsandbytes warns, while it is imported, that it found no kernel on the hub.
_NO_KERNEL = "from kernels-community"
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: _NO_KERNEL not in record.getMessage()
)
# LLM.int8's products are in float16 whatever comes in, and it would say so at each one, some 200 a pass, also
# of weights that come in this form.
_CAST = "inputs will be cast from"
logging.getLogger("bitsandbytes.autograd._functions").addFilter(
    lambda record: _CAST not in record.getMessage()
)


@dataclass(frozen=True)
class Quantised:
    """What quantisation came to: the form as ``PairInfo`` names it, and the share of the weights it holds.

    ``share`` is of the numbers in all matrices but embeddings and head; where forms are mixed, ``form`` is
    the most frequent.
    """

    form: str
    share: float

    def note(self, asked: str) -> str | None:
        """A sentence where less was quantised than ``asked`` promises."""
        if asked == "none":
            return None
        if self.form == "none":
            return f"Nothing in this model could be quantised as {asked}, so it runs unquantised."
        if self.form != _SHOWN.get(asked, asked):
            return f"Most of this model's weights could not be quantised as {asked}, and run as {self.form}."
        if self.share > 0.99:
            return None
        return f"Only {self.share:.0%} of this model's weights could be quantised as {asked}."


def choose_form(
    asked: str,
    device: str,
    draft: bool,
    bytes_16bit: int | None,
    whole: bool = False,
    sizes: Sizes = EMBEDDED,
    say: Progress = silent,
) -> str:
    """The form ("none", "int8", "int4", "nf4", "llm-int8") that ``asked`` (``asked.QUANTIZE``) means here.

    ``bytes_16bit`` are the weights' in 16 bits, None where unknown; ``whole`` says that they are a GGUF
    file's and not for the lean decoder: transformers then unpacks the file and leaves it so. ``sizes`` are
    those of the products, of which evidence may have to be taken first. Raises LoadError for what cannot be
    had.
    """
    form, flag = settled_form(asked, device, draft, bytes_16bit), quantize_flag(draft)
    if asked == "auto":
        impossible = whole and form in BITSANDBYTES or form in PACKED and best_form(form, sizes, say) != form
        return "none" if impossible else form
    if device == "cuda" and form == "int4":
        raise LoadError(f"int4 is Redline's own form for CPUs: on a CUDA card choose {flag} nf4.")
    if form in BITSANDBYTES:
        if whole:
            raise LoadError(
                f"A GGUF file of this architecture cannot be loaded as {form}: choose {flag} none"
                f"{'' if device == 'cuda' else ' or int8'}, or name the original model instead of the file."
            )
        if not has_bitsandbytes():
            raise LoadError(
                f"{form} needs the package bitsandbytes: run `pip install bitsandbytes`, or choose "
                f"{flag} none."
            )
    if form == "llm-int8" and device == "cuda" and (less := _without_int8_products()) is not None:
        raise LoadError(
            f"LLM.int8 needs a card of compute capability {INT8_CARDS[0]}.{INT8_CARDS[1]} or newer, and this "
            f"one has {less}: choose {flag} nf4."
        )
    if form in PACKED and best_form(form, sizes, say) != form:
        raise LoadError(f"This processor has no fast {form} products: choose {flag} none or nf4.")
    return form


def _without_int8_products() -> str | None:
    """The compute capability of the card in use, where bitsandbytes has no int8 products for it. AMD's cards
    count otherwise."""
    if not torch.cuda.is_available() or torch.version.hip:
        return None
    found = torch.cuda.get_device_capability()
    return None if found >= INT8_CARDS else ".".join(map(str, found))


def best_form(family: str, sizes: Sizes = EMBEDDED, say: Progress = silent) -> str:
    """``family`` ("int8" or "int4") where this machine has a right kernel for it that is not much slower than
    dense products, or else the faster of the dense ones."""
    return forms.family(kernel(family, sizes, say))


def kernel(family: str, sizes: Sizes = EMBEDDED, say: Progress = silent) -> str:
    """The form (``core.models.linear.forms``) in which a family runs here, by evidence in a model's sizes."""
    return evidence.find(sizes, home(), say=say).best(family)


def cache_dtype(form: str, device: str, sizes: Sizes = EMBEDDED) -> torch.dtype | None:
    """The dtype of a lean decoder's keys and values in which attention is fastest here, where its products
    are rounded more coarsely; None for that of its activations."""
    if device != "cpu" or form not in PACKED:
        return None
    return getattr(torch, evidence.find(sizes, home()).attention)


def keep_rows_apart(config) -> None:
    """Rule 13 for weights that come as LLM.int8, with the threshold of transformers in their ``config``."""
    stored = getattr(config, "quantization_config", None)
    if isinstance(stored, dict) and stored.get("load_in_8bit"):
        stored["llm_int8_threshold"] = 0.0


def loading_config(form: str, dtype: str, device: str = "cpu"):
    """What ``from_pretrained`` takes as ``quantization_config`` for ``form``; None where it takes nothing.

    ``dtype`` of activations.
    """
    from transformers import BitsAndBytesConfig

    if form == "nf4":
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=nf4_dtype(getattr(torch, dtype), device),
        )
    if form == "llm-int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    return None


def nf4_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """The dtype of NF4's products on "cpu" or "cuda" where all else is in ``dtype``: in float32 they would be
    slow, so there they are in 16 bits, on a card in its own."""
    if dtype != torch.float32:
        return dtype
    return getattr(torch, card.half()) if device == "cuda" else torch.bfloat16


def maker(form: str, dtype: torch.dtype, head: bool = False, sizes: Sizes = EMBEDDED) -> Make:
    """Makes the products of a lean decoder of these ``sizes`` in ``form``, or that of its head; ``dtype`` is
    of dense ones.

    A matrix of a size that a form's kernel cannot take becomes int8 in place of int4, dense in place of nf4.
    """

    def make(weight: torch.Tensor) -> Linear:
        if form in PACKED:
            return _packed("int8" if head else form, weight, sizes)
        if form == "nf4" and not head and Nf4Linear.takes(weight):
            return Nf4Linear(weight, nf4_dtype(dtype, weight.device.type))
        if form == "llm-int8" and not head:
            return LlmInt8Linear(weight)
        return DenseLinear(weight.to(dtype))

    return make


def apply(model, form: str, sizes: Sizes = EMBEDDED) -> None:
    """Puts the project's products in place of the model's own, where ``form`` is one of the project's.

    Matrices that the int4 kernel cannot take become int8. The model is on a CPU and wholly loaded.
    """
    if form not in PACKED:
        return
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if type(module) not in (nn.Linear, Conv1D):
            continue
        weight = module.weight.detach()
        weight = weight.T.contiguous() if isinstance(module, Conv1D) else weight
        product = _packed("int8" if module is head else form, weight, sizes)
        model.set_submodule(name, PackedLinear(product, module.bias))


def _packed(form: str, weight: torch.Tensor, sizes: Sizes) -> Linear:
    """In int8 what int4 cannot take, and dense where this machine has no int8."""
    if form == "int4" and not Int4Linear.takes(weight):
        form = "int8"
    return forms.maker(kernel(form, sizes))(weight)


class PackedLinear(nn.Module):
    """A product of ``core.models.linear`` where transformers expects a linear layer.

    Gives the dtype it was given.
    """

    def __init__(self, product: Linear, bias: torch.Tensor | None):
        super().__init__()
        self.out_features, self.in_features = product.shape
        self.product, self.form, self.bias = product, product.form, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.product(x.reshape(-1, self.in_features).float()).view(*x.shape[:-1], self.out_features)
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def count(model, stored: str | None = None) -> Quantised:
    """What of ``model``, as it is now, is quantised, by looking at its modules and not at its config.

    ``stored`` names the form in which its weights came, which may be one that is not known here.
    """
    head = model.get_output_embeddings()
    sizes: dict[str, int] = {}
    for module in model.modules():
        if module is head or isinstance(module, nn.Embedding):
            continue
        form = _form_of(module)
        if form is None:
            size = sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1)
        else:
            size = module.in_features * module.out_features
        sizes[form or "none"] = sizes.get(form or "none", 0) + size
    found = _quantised(sizes)
    return Quantised(stored, 1.0) if found.form == "none" and stored and _holds_packed(model) else found


def count_lean(decoder: Decoder) -> Quantised:
    """The same of a lean decoder."""
    sizes: dict[str, int] = {}
    for product in (product for layer in decoder.layers for product in layer.products):
        sizes[product.form] = sizes.get(product.form, 0) + math.prod(product.shape)
    return _quantised(sizes)


def _quantised(sizes: dict[str, int]) -> Quantised:
    """``sizes``: how many weights each form holds, "none" being one."""
    whole = sum(sizes.values())
    forms = {form: size for form, size in sizes.items() if form != "none"}
    if not forms:
        return Quantised("none", 0.0)
    form = max(forms, key=forms.__getitem__)
    return Quantised(_SHOWN.get(form, form), forms[form] / whole)


def _holds_packed(model) -> bool:
    """Whether any matrix is of numbers that no dense model has: integers, or floats of 8 bits."""
    dense = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool)
    tensors = itertools.chain(model.parameters(), model.buffers())
    return any(tensor.dim() > 1 and tensor.dtype not in dense for tensor in tensors)


def _form_of(module: nn.Module) -> str | None:
    if isinstance(module, PackedLinear):
        return module.form
    for form, name in BITSANDBYTES.items():
        # The weight as it is says more than the class, which stands there before anything is quantised.
        if type(module).__name__ == name and module.weight.dtype in (torch.uint8, torch.int8):
            return getattr(module.weight, "quant_type", form) if form == "nf4" else form
    return None
