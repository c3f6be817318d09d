"""Settings as people type them: used, or refused in one sentence."""

import contextlib

import pytest

from core.record.store import Store
from core.records import Settings
from core.settings import MAX_SEED, SettingsError, parse_flag, parse_seed, parse_settings, parse_stop
from tests.core.builders import record


def test_nothing_given_means_the_defaults():
    settings = parse_settings()
    assert settings == Settings(seed=settings.seed)


def test_nothing_is_chosen_automatically_where_k_is_0():
    assert parse_settings(auto_draft_tokens=True, num_draft_tokens=8).auto_draft_tokens
    assert not parse_settings(auto_draft_tokens=True, num_draft_tokens=0).auto_draft_tokens


# --- SP-02: the seed field


@pytest.mark.parametrize("blank", [None, "", "  ", -1, "-1", " -1 ", -1.0, "-1.0"])
def test_sp_02_blank_and_minus_one_draw_a_seed_that_can_be_shown_and_given_again(blank):
    seeds = {parse_seed(blank) for _ in range(20)}
    assert len(seeds) > 1
    assert all(isinstance(seed, int) and 0 <= seed < 2**31 and parse_seed(seed) == seed for seed in seeds)


@pytest.mark.parametrize(
    ("given", "seed"),
    [
        (0, 0),
        ("0", 0),
        (42.0, 42),
        ("42.0", 42),
        (2**31, 2**31),
        (2**63 - 1, 2**63 - 1),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_sp_02_whole_numbers_are_taken_as_they_are(given, seed):
    found = parse_seed(given)
    assert found == seed and type(found) is int


@pytest.mark.parametrize(
    "bad", [1.5, "1.5", 2**63, str(2**63), 2**64, float(2**63), -2, "-1.5", "abc", "nan", "inf", True]
)
def test_sp_02_the_rest_is_refused_in_words(bad):
    with pytest.raises(SettingsError) as error:
        parse_seed(bad)
    message = str(error.value)
    assert message.startswith(f"Seed must be a whole number from 0 to {MAX_SEED}") and message.endswith(".")


def test_sp_02_the_largest_seed_is_stored(tmp_path):
    with contextlib.closing(Store(tmp_path / "redline.db")) as store:
        conversation, _, _ = record(store, "p", settings=parse_settings(seed=str(MAX_SEED)))
        assert store.problem is None
        assert store.conversation(conversation).messages[1].shown.settings.seed == MAX_SEED


# --- SP-01: degenerate settings


@pytest.mark.parametrize("temperature", [0, 1e-4, "0.0001", 2])
@pytest.mark.parametrize("top_p", [0, 1e-4, 1])
@pytest.mark.parametrize("top_k", [0, 1, 10 * 49152])
def test_sp_01_degenerate_settings_are_settings(temperature, top_p, top_k):
    settings = parse_settings(temperature=temperature, top_p=top_p, top_k=top_k)
    assert (settings.temperature, settings.top_p, settings.top_k) == (float(temperature), top_p, top_k)
    assert type(settings.top_k) is int


@pytest.mark.parametrize(
    ("field", "bad", "name", "limits"),
    [
        ("temperature", 100, "Temperature", "from 0 to 2"),
        ("temperature", -0.1, "Temperature", "from 0 to 2"),
        ("temperature", "warm", "Temperature", "from 0 to 2"),
        ("temperature", "", "Temperature", "from 0 to 2"),
        ("temperature", None, "Temperature", "from 0 to 2"),
        ("temperature", float("nan"), "Temperature", "from 0 to 2"),
        ("temperature", True, "Temperature", "from 0 to 2"),
        ("top_p", 1.01, "Top-p", "from 0 to 1"),
        ("min_p", -0.1, "Min-p", "from 0 to 1"),
        ("repetition_penalty", 0, "Repetition penalty", "from 0.1 to 10"),
        ("top_p", "nan", "Top-p", "from 0 to 1"),
        ("top_k", -1, "Top-k", "from 0 to"),
        ("top_k", 2.5, "Top-k", "from 0 to"),
        ("num_draft_tokens", 17, "Draft tokens (K)", "from 0 to 16"),
        ("num_draft_tokens", -1, "Draft tokens (K)", "from 0 to 16"),
        ("num_draft_tokens", False, "Draft tokens (K)", "from 0 to 16"),
        ("num_draft_tokens", None, "Draft tokens (K)", "from 0 to 16"),
        ("max_new_tokens", 0, "Maximum new tokens", "from 1 to 8192"),
        ("max_new_tokens", "many", "Maximum new tokens", "from 1 to 8192"),
        ("max_new_tokens", float("inf"), "Maximum new tokens", "from 1 to 8192"),
        ("max_new_tokens", "9" * 5000, "Maximum new tokens", "from 1 to 8192"),
    ],
)
def test_sp_01_what_cannot_be_used_is_named_with_its_limits(field, bad, name, limits):
    with pytest.raises(SettingsError) as error:
        parse_settings(**{field: bad})
    message = str(error.value)
    assert message.startswith(f"{name} must be a ") and limits in message and message.endswith(".")
    assert "\n" not in message and len(message) < 200


def test_an_empty_field_of_a_filter_means_off():
    for empty in ("", None):
        settings = parse_settings(top_k=empty, top_p=empty, min_p=empty, repetition_penalty=empty)
        assert (settings.top_k, settings.top_p) == (0, 1.0)
        assert (settings.min_p, settings.repetition_penalty) == (0.0, 1.0)


def test_numbers_may_come_as_form_fields_deliver_them():
    settings = parse_settings(
        temperature=" 0.5 ", top_k="40", top_p="0.9", num_draft_tokens=4.0, max_new_tokens="128"
    )
    assert settings == Settings(
        temperature=0.5, top_k=40, top_p=0.9, num_draft_tokens=4, max_new_tokens=128, seed=settings.seed
    )


# --- Stop strings


@pytest.mark.parametrize(
    ("given", "stop"),
    [
        (None, ()),
        ("", ()),
        ("\n\n", ()),
        ("END\n###", ("END", "###")),
        ("a\na\n\nb", ("a", "b")),
        ("  kept as typed ", ("  kept as typed ",)),
        ("from a\r\nWindows form", ("from a", "Windows form")),
        (["a line\nbreak", "", "a line\nbreak"], ("a line\nbreak",)),
        (("x",), ("x",)),
    ],
)
def test_stop_strings_from_a_list_or_one_a_line(given, stop):
    assert parse_stop(given) == stop
    assert parse_settings(stop=given).stop == stop


@pytest.mark.parametrize("stop", [5, True, {"a": 1}, [None], ["x", 5]])
def test_stop_strings_are_text(stop):
    with pytest.raises(SettingsError, match="Stop strings must be text or a list of texts, not "):
        parse_stop(stop)


def test_a_switch_is_true_or_false():
    assert [parse_flag("Record", value) for value in (True, False, None)] == [True, False, False]
    for value in ("no", "true", 2, []):
        with pytest.raises(SettingsError, match="Record must be true or false, not "):
            parse_flag("Record", value)
    with pytest.raises(SettingsError, match="Automatic K must be true or false"):
        parse_settings(auto_draft_tokens="no")


@pytest.mark.parametrize("stop", ["\n".join(map(str, range(33))), ["x" * 501]])
def test_more_stop_strings_than_can_be_watched_for_are_refused_in_words(stop):
    assert len(parse_stop([str(n) for n in range(32)])) == 32
    with pytest.raises(SettingsError, match="up to 32 stop strings"):
        parse_stop(stop)
