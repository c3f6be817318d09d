"""The file a distilled draft ships in: int8 matrices with one scale per output row.

Such a draft (kind ``model``) is a small Llama that borrows its target's embedding: token ids go in
through it, ``layers.N.*`` and ``norm.weight`` follow, then ``proj.weight``, then logits against the
embedding's rows ``head_token_ids``. Ids outside have q = 0. Packing changes q a little, so alpha is
measured again afterwards and kept in the metadata. Knows the file, not how the draft is run.

Run: ``python -m core.models.draft_file SRC DST --target NAME --origin TEXT --licence ID --alpha TEXT``
packs a floating-point safetensors file.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from core.models.errors import LoadError

SCALE = ".scale"  # suffix of the tensor that holds a matrix's row scales
HEAD = "head_token_ids"


@dataclass(frozen=True)
class UnpackedDraft:
    """A draft as it was before packing, but for rounding.

    ``tensors`` are float32 by their names in the file; ``head_ids`` (n,) int64, ascending, are the ids that
    the head scores. ``metadata`` is what the file says of itself: kind, target, origin, licence, alpha, and
    fingerprint (SHA-256, hexadecimal, over all tensors).
    """

    tensors: dict[str, torch.Tensor]
    layers: int
    head_ids: torch.Tensor
    metadata: dict[str, str]


def pack_draft(src: Path | str, dst: Path | str, **metadata: str) -> None:
    """Pack the floating-point draft ``src`` into ``dst``.

    Matrices become int8 [out, in] with float32 scales [out] (weight = int8 * scale), vectors float32,
    ``head_token_ids`` int32. ``src``'s own metadata, ``metadata`` and the fingerprint of the packed
    tensors are kept in the file. Raises LoadError where ``src`` cannot be read.
    """
    tensors, kept = _read(Path(src))
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name == HEAD:
            packed[name] = tensor.to(torch.int32)
        elif tensor.dim() == 2:
            weight = tensor.float()
            scale = weight.abs().amax(dim=1) / 127
            # A row of zeros has scale 0; dividing it by anything else leaves it zero.
            steps = weight / torch.where(scale > 0, scale, 1.0).unsqueeze(1)
            packed[name] = steps.round().to(torch.int8)
            packed[name + SCALE] = scale
        else:
            packed[name] = tensor.float()
    save_file(packed, dst, kept | metadata | {"fingerprint": _fingerprint(packed)})


def load_draft(path: Path | str) -> UnpackedDraft:
    """The packed draft, unpacked. Raises LoadError where the file is missing, damaged or of another kind."""
    path = Path(path)
    packed, metadata = _read(path)
    if metadata.get("fingerprint") != _fingerprint(packed):
        raise LoadError(f"The draft {path} is damaged or was not packed by Redline: fetch it anew.")
    tensors = {
        name: tensor * packed[name + SCALE][:, None] if name + SCALE in packed else tensor
        for name, tensor in packed.items()
        if name != HEAD and not name.endswith(SCALE)
    }
    layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))
    return UnpackedDraft(tensors, layers, packed[HEAD].long().sort().values, metadata)


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise LoadError(f"The draft {path} cannot be read ({error}): fetch it anew.") from error


def _fingerprint(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="Pack a distilled draft into int8.")
    parser.add_argument("src", type=Path)
    parser.add_argument("dst", type=Path)
    for field, text in {
        "target": "the model it drafts for",
        "origin": "how it was made",
        "licence": "SPDX identifier",
        "alpha": "measured after packing, with the text it was measured on",
    }.items():
        parser.add_argument(f"--{field}", required=True, help=text)
    options = vars(parser.parse_args())
    try:
        pack_draft(options.pop("src"), dst := options.pop("dst"), **options)
        print(f"{dst}: {dst.stat().st_size:,} bytes, fingerprint {load_draft(dst).metadata['fingerprint']}")
    except LoadError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
