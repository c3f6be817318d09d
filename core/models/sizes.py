"""The sizes of a model's products, in which evidence on their forms is taken (``core.models.linear``)."""

from __future__ import annotations

from core.models.linear.findings import Sizes

EMBEDDED = Sizes(((960, 576), (576, 576), (3072, 576), (576, 1536)), 30, (49152, 576))
