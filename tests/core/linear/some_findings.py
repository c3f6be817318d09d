"""Findings for tests: small sizes, and entries and tables made by hand."""

from __future__ import annotations

from core.models.linear.findings import Evidence, Found, Sizes

SMALL = Sizes(((96, 64), (64, 64), (128, 64), (64, 128)), 2, (256, 64), (4, 2, 16))


def entry(form: str, *milliseconds: float, head: float = 1, **more) -> Evidence:
    layers = tuple(m / 1e3 for m in milliseconds)
    if layers:
        more = {"draft": layers[0] + head / 3e3} | more
    return Evidence(form, 0.0, layers=layers, head=(head / 1e3,) * 4, **more)


def found(*table: Evidence, **chosen) -> Found:
    chosen = {"layers": "float32", "head": "float32", "draft": "float32", "attention": "float32"} | chosen
    return Found(**chosen, table=table, attended={"float32": (1e-3, 1e-2), "bfloat16": (2e-3, 2e-2)})
