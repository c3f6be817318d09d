"""The table of products: every form with what was found of it, and nothing of it as markup."""

from __future__ import annotations

from app.tabs.products_view import products
from core.models.linear.findings import Evidence, Found

FOUND = Found(
    layers="int4",
    head="int8x2-onednn",
    draft="int4",
    attention="float32",
    table=(
        Evidence("int8-fbgemm", 0.99, verdict="wrong by 99%"),
        Evidence("int8-qnnpack", None, verdict="does not run here (<b>no engine</b>)"),
        Evidence("int8x2-onednn", 2e-8, layers=(0.005, 0.0061, 0.02, 1.5), head=(0.001,) * 4),
        Evidence("int4", 0.0026, layers=(0.0043, 0.0073, 0.0139, 0.3), head=(0.001,) * 4),
    ),
    attended={"float32": (3e-4, 9e-3), "bfloat16": (4e-4, 8e-3)},
)


def test_every_form_stands_there_with_its_figures_or_why_not():
    shown = products(FOUND)
    line = "<tr class=best><th scope='row'>int4<i>layers, drafts</i></th><td>yes</td>"
    line += "<td>4.30</td><td>7.30</td><td>14</td>"
    assert line in shown
    assert "<td>300</td></tr>" in shown and "<th scope='row'>int8x2-onednn<i>head</i></th>" in shown
    assert "<th scope='row'>int8-fbgemm</th><td>no</td><td colspan='4'>wrong by 99%</td>" in shown
    assert "float32 0.30 and 9.00, bfloat16 0.40 and 8.00; runs in float32" in shown


def test_what_libraries_say_is_inert():
    assert "&lt;b&gt;no engine&lt;/b&gt;" in products(FOUND) and "<b>" not in products(FOUND)


def test_nothing_where_nothing_was_looked_for():
    assert products(None) == ""
