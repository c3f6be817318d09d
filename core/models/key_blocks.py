"""How much room a cache of keys and values takes for so many ids; imports nothing, so that it can be counted
before torch is there."""

from __future__ import annotations

# Attention always runs over whole blocks of keys, the surplus masked: the sums over keys then have
# the same structure for a token whether it is scored alone or with others behind it, and come out
# bit-equal (measured: 64 and 128 are not enough, see docs/LOG.md). A pass whose rows end in two blocks is
# made in two, so that a row has the same number of keys as alone.
KEY_BLOCK = 256
PARTS = 4  # of a cache: each costs a pass three small operations, and grows by itself


def held_positions(length: int, context_length: int) -> int:
    """How many positions a cache of ``length`` ids has room for, of a model of this context.

    They come in steps of a block of keys, and where that is less, of an eighth of the power of two below
    ``length``. So at most an eighth lies idle, and a sequence that grows id by id is copied once while it
    grows by a sixteenth at least. 4,096 ids hold 4,096 positions, 4,097 hold 4,608.
    """
    blocks, most = -(-length // KEY_BLOCK), -(-context_length // KEY_BLOCK)
    step = max(1, 2 ** (max(blocks - 1, 1).bit_length() - 1) // 8)
    return min(-(-blocks // step) * step, most) * KEY_BLOCK
