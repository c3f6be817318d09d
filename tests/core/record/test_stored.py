"""Values as the database holds them, and who may read."""

import pytest

from core.record.store import Store
from core.record.stored import StoreError, pack_top, reading, unpack_top
from tests.core.builders import record


def test_top_tens_are_packed_as_uint32_and_float32():
    pairs = ((49151, 0.5), (2**32 - 1, 0.0009765625))
    assert pack_top(pairs) == bytes.fromhex("ffbf0000 0000003f ffffffff 0000803a")
    assert unpack_top(pack_top(pairs)) == pairs
    assert pack_top(()) is None
    assert unpack_top(None) == ()


def test_reading_what_is_not_there_says_so_and_makes_nothing(tmp_path):
    with (
        pytest.raises(StoreError, match="There is no database .*none.db yet."),
        reading(tmp_path / "none.db"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_reader_sees_one_state_whatever_is_written_meanwhile(tmp_path):
    store = Store(tmp_path / "redline.db")
    record(store, "p")
    with reading(store.path) as connection:
        (before,) = connection.execute("SELECT count(*) FROM replies").fetchone()
        record(store, "p")
        (meanwhile,) = connection.execute("SELECT count(*) FROM replies").fetchone()
    with reading(store.path) as connection:
        (after,) = connection.execute("SELECT count(*) FROM replies").fetchone()
    store.close()
    assert (before, meanwhile, after) == (1, 1, 2)
