"""``python -m core.models.linear``: which forms of products are right and quick on this machine."""

from __future__ import annotations

import argparse

import torch

from core.machine.home import home
from core.models.linear.evidence import KEPT, find
from core.models.linear.findings import DISTURBED, ROWS, Found
from core.models.sizes import EMBEDDED


def table(found: Found) -> str:
    """What was found of each form, as lines of text; milliseconds are of all layers, by rows of a pass."""
    rows = "".join(f"{f'{count} rows' if count > 1 else '1 row':>10}" for count in ROWS)
    lines = [f"{'form':18}{'error':>10}{'alone':>10}{rows}{'head, 1':>10}{'head, 4':>10}"]
    for entry in found.table:
        error = "–" if entry.error is None else f"{entry.error:.1e}"
        times = "".join(f"{1e3 * s:10.2f}" for s in (*entry.layers, *entry.head[:2]))
        chosen = [name for name in ("layers", "head", "draft") if getattr(found, name) == entry.form]
        said = entry.verdict or ("chosen: " + ", ".join(chosen) if chosen else "")
        lines.append(f"{entry.form:18}{error:>10}{entry.alone:10.1e}{times:60}  {said}".rstrip())
    attention = ", ".join(
        f"{name} {1e3 * few:.2f} and {1e3 * many:.2f}" for name, (few, many) in found.attended.items()
    )
    lines.append(f"attention of a layer, 4 and 256 rows: {attention}; chosen: {found.attention}")
    if found.disturbed:
        lines.append(DISTURBED)
    if found.sentence:
        lines.append(found.sentence)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m core.models.linear", description=__doc__)
    parser.add_argument("--again", action="store_true", help="look anew, and keep what is found")
    options = parser.parse_args()
    found = find(EMBEDDED, home(), options.again)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; kept in {home() / KEPT}")
    print("Products of the embedded target. error: the largest against float64, as a share of what is")
    print("summed; alone: how far a row is from what it is alone. Milliseconds of all layers, and of the")
    print("head, by rows of a pass, with weights out of the near caches.")
    print(table(found))


if __name__ == "__main__":
    main()
