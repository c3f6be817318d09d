"""What findings come to: which form runs a family, and what is said of them."""

from __future__ import annotations

from tests.core.linear.some_findings import entry, found


def test_a_family_is_run_by_its_fastest_kernel_or_dense():
    some = found(
        entry("int8-fbgemm", 1, 1, 1, 1),  # only for what is rotated
        entry("int8x2-fbgemm", 5, 5, 5, 5),
        entry("int8x2-onednn", 4, 4, 4, 4),
        entry("int4", 200, 200, 200, 200),
        entry("int4+bfloat16", 3, 3, 3, 3),  # more memory than who asks for int4 expects
        entry("bfloat16", 40, 40, 40, 40),
        entry("float32", 50, 50, 50, 50),
    )
    assert (some.best("int8"), some.best("int4"), some.reads_bfloat16) == ("int8x2-onednn", "bfloat16", True)
