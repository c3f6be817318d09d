"""Conversations, and the writing of replies into view, figures and record, with a scripted engine."""

from __future__ import annotations

import dataclasses
import gc
import json
import sqlite3
import threading
from pathlib import Path

import pytest

from app.api import describe
from app.chat import desk as desk_module
from app.chat.conversation import Conversation, Refused
from app.chat.desk import NOT_RECORDED, NOT_SAID, Desk
from app.serving.loading import Loader, LoadingState
from core.record.store import Store
from core.records import Settings
from core.text.detokenise import PromptError
from tests.app.toy import PAIR, ToyEngine, ToyTokenizer

SETTINGS = Settings(seed=7, num_draft_tokens=4)
TEXT = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen."


class Loaded(Loader):
    """A loader that has its engine already."""

    def __init__(self, engine):
        super().__init__(lambda spec, progress: engine)
        self.state = LoadingState("Ready.", 1.0, engine=engine)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "record.db")


def desk_of(engine, store) -> Desk:
    return Desk(Loaded(engine), store)


def ask(desk: Desk, conversation: Conversation, question: str, settings=SETTINGS, record=True):
    """Ask and wait for the end, as the page does."""
    conversation.claim()
    try:
        answer = desk.ask(conversation, question, settings, "auto", record)
        assert answer.done.wait(10)
        return answer
    finally:
        conversation.release()


def drawn(conversation: Conversation) -> list[list]:
    return [json.loads(line) for line in conversation.drawn().splitlines()]


def emitted_text(records: list[list]) -> str:
    return "".join(
        token[1] for record in records if record[0] == "r" for token in record[3] if token[0] not in "rd"
    )


def test_a_question_is_answered_drawn_counted_and_recorded(store):
    desk = desk_of(ToyEngine(TEXT), store)
    conversation = desk.new()
    answer = ask(desk, conversation, "Count, please.")
    assert answer.text == TEXT and answer.finish_reason == "eos_token"
    records = drawn(conversation)
    assert records[0] == ["u", "Count, please."] and records[-1][:3] == ["e", len(TEXT), "eos_token"]
    assert emitted_text(records) == TEXT
    figures = answer.figures()
    assert figures.drafted == figures.accepted + figures.rejected + figures.discarded
    assert figures.emitted == figures.accepted + figures.resampled + figures.bonus + figures.plain
    stored = store.conversation(conversation.key)
    assert [message.content for message in stored.messages] == ["Count, please.", TEXT]
    assert stored.messages[1].replies[0].figures == figures


def test_rounds_are_on_record_while_the_reply_is_written(store):
    gate = threading.Event()
    desk = desk_of(ToyEngine(TEXT, gate=gate), store)
    conversation = desk.new()
    conversation.claim()
    answer = desk.ask(conversation, "Count.", SETTINGS, "auto", True)
    try:
        while len(answer.rounds) < 2:
            assert not answer.done.wait(0.001)
        assert not answer.done.is_set()
        with sqlite3.connect(store.path) as connection:
            assert connection.execute("SELECT count(*) FROM rounds").fetchone()[0] == 2
    finally:
        gate.set()
        conversation.release()


def test_the_view_only_grows_while_a_reply_streams(store):
    gate = threading.Event()
    desk = desk_of(ToyEngine(TEXT, gate=gate), store)
    conversation = desk.new()
    conversation.claim()
    answer = desk.ask(conversation, "Count.", SETTINGS, "auto", False)
    while len(answer.rounds) < 2:
        assert not answer.done.wait(0.001)
    half = conversation.drawn()
    gate.set()
    assert answer.done.wait(10)
    whole = conversation.drawn()
    conversation.release()
    assert whole.startswith(half) and len(whole) > len(half)
    assert whole == conversation.drawn()


def test_stop_keeps_what_was_said_and_the_next_message_goes_through(store):
    engine = ToyEngine(TEXT, gate=threading.Event())
    desk = desk_of(engine, store)
    conversation = desk.new()
    conversation.claim()
    answer = desk.ask(conversation, "Count.", SETTINGS, "auto", True)
    while len(answer.rounds) < 2:
        assert not answer.done.wait(0.001)
    conversation.stop()
    assert answer.done.wait(10)
    conversation.release()
    assert answer.finish_reason == "cancelled" and not engine.busy
    assert answer.text and TEXT.startswith(answer.text)
    assert store.conversation(conversation.key).messages[1].content == answer.text
    engine.gate.set()
    assert ask(desk, conversation, "Go on.").text == TEXT
    assert f"<assistant>{answer.text}</assistant>" in engine.prompts[-1]


def test_a_second_reply_waits_for_one_that_was_stopped_but_not_for_one_that_goes_on(store):
    engine = ToyEngine(TEXT, gate=threading.Event())
    desk = desk_of(engine, store)
    conversation = desk.new()
    conversation.claim()
    answer = desk.ask(conversation, "Count.", SETTINGS, "auto", False)
    with pytest.raises(Refused, match="still being written"):
        conversation.claim()
    conversation.stop()
    threading.Timer(0.05, conversation.release).start()
    conversation.claim()  # returns when the first was given back
    assert answer.done.is_set()
    conversation.release()


def test_a_message_sent_twice_after_stop_is_asked_once(store):
    gate = threading.Event()
    desk = desk_of(ToyEngine(TEXT, gate=gate), store)
    conversation = desk.new()
    conversation.claim()
    desk.ask(conversation, "Count.", SETTINGS, "auto", True)
    conversation.stop()
    refused = []

    def send():
        try:
            ask(desk, conversation, "Go on.")
        except Refused as error:
            refused.append(str(error))

    clicks = [threading.Thread(target=send) for _ in range(2)]
    for click in clicks:
        click.start()
    while not refused and any(click.is_alive() for click in clicks):
        clicks[0].join(0.01)
    gate.set()
    conversation.release()
    for click in clicks:
        click.join()
    assert len(refused) == 1 and [turn.question for turn in conversation.turns] == ["Count.", "Go on."]


def test_a_message_sent_twice_is_asked_once_however_long_its_beginning_takes(store, monkeypatch):
    desk = desk_of(ToyEngine(TEXT), store)
    conversation = desk.new()
    ask(desk, conversation, "Count.")
    conversation.claim()  # its reply is not begun yet: the prompt is long, or the database is locked
    monkeypatch.setattr("app.chat.conversation.SECONDS_TO_STOP", 60)
    with pytest.raises(Refused, match="still being written"):
        conversation.claim()


def test_a_closed_tab_ends_the_reply_and_frees_the_engine(store):
    engine = ToyEngine(TEXT, gate=threading.Event())
    desk = desk_of(engine, store)
    conversation = desk.new()
    conversation.claim()
    answer = desk.ask(conversation, "Count.", SETTINGS, "auto", True)
    conversation.release()  # what a handler's ``finally`` does
    assert answer.done.is_set() and answer.finish_reason == "cancelled" and not engine.busy


class Deaf(ToyEngine):
    """Hears no stop before it may begin, as one that waits for a GPU to be lent."""

    def generate(self, prompt_ids, settings, **how):
        generation = super().generate(prompt_ids, settings, **how)
        self.lent.wait(10)
        return generation


def test_the_right_to_write_comes_back_only_when_the_reply_has_ended(store, monkeypatch):
    monkeypatch.setattr("app.chat.conversation.SECONDS_TO_STOP", 0.01)
    engine = Deaf(TEXT)
    engine.lent = threading.Event()
    desk = desk_of(engine, store)
    conversation = desk.new()
    conversation.claim()
    answer = desk.ask(conversation, "Count.", SETTINGS, "auto", True)
    conversation.release()
    assert not answer.done.is_set()
    with pytest.raises(Refused, match="still being written"):
        conversation.claim()
    engine.lent.set()
    assert answer.done.wait(10) and answer.finish_reason == "cancelled"
    monkeypatch.setattr("app.chat.conversation.SECONDS_TO_STOP", 10)
    assert ask(desk, conversation, "Go on.").text == TEXT


def test_an_error_in_the_middle_keeps_what_was_said(store):
    desk = desk_of(ToyEngine(TEXT, fail_after=2), store)
    conversation = desk.new()
    answer = ask(desk, conversation, "Count.")
    assert answer.finish_reason == "error"
    assert answer.reply.error == "The target gave no usable distribution."
    assert answer.text and TEXT.startswith(answer.text)
    assert drawn(conversation)[-1][2] == "error"


def test_a_fault_of_ours_ends_the_reply_with_a_sentence_and_frees_the_engine(store, monkeypatch):
    engine = ToyEngine(TEXT)
    desk = desk_of(engine, store)

    def broken(key, round):
        raise RuntimeError("a fault")

    monkeypatch.setattr(store, "add_round", broken)
    answer = ask(desk, desk.new(), "Count.")
    assert answer.finish_reason == "error" and "a fault" in answer.error and not engine.busy


def test_regenerating_replaces_the_reply_and_keeps_the_old_one_on_record(store):
    replies = iter(["First.", "Second."])
    engine = ToyEngine(lambda question: next(replies))
    desk = desk_of(engine, store)
    conversation = desk.new()
    ask(desk, conversation, "Say something.")
    conversation.claim()
    answer = desk.again(conversation, SETTINGS, "auto", True)
    assert answer.done.wait(10)
    conversation.release()
    assert emitted_text(drawn(conversation)) == "Second."
    assert engine.prompts[0] == engine.prompts[1]
    kinds = [(reply.kind, reply.text) for reply in store.conversation(conversation.key).messages[1].replies]
    assert kinds == [("first", "First."), ("regenerated", "Second.")]


def test_answering_plainly_repeats_prompt_seed_and_settings_with_k_0(store):
    engine = ToyEngine(TEXT)
    desk = desk_of(engine, store)
    conversation = desk.new()
    auto = Settings(seed=11, num_draft_tokens=3, auto_draft_tokens=True, temperature=0.5, verifier="block")
    first = ask(desk, conversation, "Count.", auto)
    conversation.claim()
    plain = desk.again_plainly(conversation, True)
    assert plain.done.wait(10)
    conversation.release()
    assert plain.settings == Settings(seed=11, num_draft_tokens=0, temperature=0.5, verifier="block")
    assert first.predicted_speedup is not None and first.costs is engine.pair.costs
    assert engine.prompts[0] == engine.prompts[1]
    assert plain.figures().plain == plain.figures().emitted
    speculative_figures, plain_figures, ratio = conversation.last.speedup
    assert ratio == pytest.approx(speculative_figures.tokens_per_second / plain_figures.tokens_per_second)
    assert conversation.last.shown == [first, plain]
    captions = [record[3] for record in drawn(conversation) if record[0] == "s"]
    assert f"{ratio:.2f}×" in captions[0] and "the target alone" in captions[1]
    stored = store.conversation(conversation.key).messages[1].replies
    assert [(reply.kind, reply.answers_reply_id) for reply in stored] == [
        ("first", None),
        ("plain", first.key),
    ]
    # What the conversation goes on from is the first reply, once.
    ask(desk, conversation, "Go on.")
    assert engine.prompts[-1].count(TEXT) == 1


def test_nothing_to_repeat_is_said_in_words(store):
    desk = desk_of(ToyEngine(TEXT), store)
    conversation = desk.new()
    for attempt in (
        lambda: desk.again_plainly(conversation, True),
        lambda: desk.again(conversation, SETTINGS, "auto", True),
    ):
        with pytest.raises(Refused, match="There is no reply"):
            attempt()
    ask(desk, conversation, "Count.", Settings(num_draft_tokens=0))
    with pytest.raises(Refused, match="plainly already"):
        desk.again_plainly(conversation, True)


def test_a_message_that_is_too_long_changes_nothing(store):
    desk = desk_of(ToyEngine(TEXT), store)
    conversation = desk.new()
    with pytest.raises(PromptError, match="too long"):
        desk.ask(conversation, "word " * 3000, SETTINGS, "auto", True)
    assert not conversation.turns and not conversation.recorded and store.list_conversations() == ()


def test_two_sessions_do_not_mix(store):
    engine = ToyEngine(lambda question: f"You said {question}")
    desk = desk_of(engine, store)
    a, b = desk.new(), desk.new()
    ask(desk, a, "My word is APPLE.")
    ask(desk, b, "My word is PEAR.")
    ask(desk, a, "What is my word?")
    assert "PEAR" not in engine.prompts[2] and "APPLE" in engine.prompts[2]
    assert "PEAR" not in a.drawn() and "APPLE" not in b.drawn()
    assert "PEAR" not in str(store.conversation(a.key))
    assert desk.open("nobody") is None and desk.open(None) is None and desk.open({"a": 1}) is None


def test_two_sessions_take_turns(store):
    engine = ToyEngine(TEXT, gate=threading.Event())
    desk = desk_of(engine, store)
    a, b = desk.new(), desk.new()
    a.claim()
    first = desk.ask(a, "Count.", SETTINGS, "auto", False)
    while len(first.rounds) < 2:
        assert not first.done.wait(0.001)
    b.claim()
    second = desk.ask(b, "Count.", SETTINGS, "auto", False)
    assert not second.done.wait(0.05) and not second.rounds and second.had_to_wait
    engine.gate.set()
    assert first.done.wait(10) and second.done.wait(10)
    a.release()
    b.release()
    assert first.text == second.text == TEXT


def test_after_a_restart_the_conversation_is_as_it_was(store):
    desk = desk_of(ToyEngine(TEXT), store)
    conversation = desk.new()
    desk.set_system(conversation, "Be brief.")
    ask(desk, conversation, "Count.")
    conversation.claim()
    assert desk.again_plainly(conversation, True).done.wait(10)
    conversation.release()
    again = desk_of(ToyEngine(TEXT), Store(store.path)).open(conversation.key)
    assert again.drawn() == conversation.drawn()
    assert again.system == "Be brief." and again.messages() == conversation.messages()
    assert again.current.figures() == conversation.current.figures()
    assert again.current.ttft_seconds == conversation.current.ttft_seconds
    assert again.last.speedup[2] == pytest.approx(conversation.last.speedup[2])


def test_details_are_found_by_a_replys_key_only(store):
    desk = desk_of(ToyEngine(TEXT), store)
    conversation = desk.new()
    answer = ask(desk, conversation, "Count.", record=False)
    count = sum(len(round.tokens) for round in answer.rounds)
    assert desk.details(answer.key, 0)["fate"] == "accepted"
    assert desk.details(answer.key, count - 1)["fate"]
    for key, i in (("no such key", 0), (answer.key, count), (answer.key, -1)):
        with pytest.raises(LookupError):
            desk.details(key, i)


def test_without_recording_nothing_is_written(store):
    desk = desk_of(ToyEngine(TEXT), store)
    conversation = desk.new()
    ask(desk, conversation, "Count.", record=False)
    assert store.list_conversations() == () and not conversation.recorded
    ask(desk, conversation, "Again.", record=True)
    assert [message.content for message in store.conversation(conversation.key).messages] == ["Again.", TEXT]
    desk.set_system(conversation, "Not for the record.")
    ask(desk, conversation, "Once more.", record=False)
    assert store.conversation(conversation.key).system_prompt == ""
    ask(desk, conversation, "And again.")
    assert store.conversation(conversation.key).messages[-1].replies[0].system_prompt == "Not for the record."


@pytest.mark.parametrize("plainly", [False, True])
def test_a_repetition_is_recorded_though_what_it_repeats_is_not(store, plainly):
    desk = desk_of(ToyEngine(TEXT), store)
    conversation = desk.new()
    ask(desk, conversation, "Count.", record=False)
    conversation.claim()
    again = (
        desk.again_plainly(conversation, True)
        if plainly
        else desk.again(conversation, SETTINGS, "auto", True)
    )
    assert again.done.wait(10)
    conversation.release()
    (reply,) = store.conversation(conversation.key).messages[1].replies
    assert reply.text == TEXT and reply.answers_reply_id is None and store.problem is None


def test_what_was_deleted_is_gone_from_memory_and_record(store):
    desk = desk_of(ToyEngine(TEXT), store)
    kept, gone = desk.new(), desk.new()
    ask(desk, kept, "Keep this.")
    desk.turn("a page", kept, gone)
    answer = ask(desk, gone, "Forget this.")
    key, reply_key = gone.key, answer.key
    desk.forget(gone)
    assert desk.shown("a page", kept) is kept
    assert desk.open(key) is None and desk.open(kept.key) is kept
    del gone, answer
    gc.collect()
    with pytest.raises(LookupError):
        desk.details(reply_key, 0)
    desk.forget_everything()
    assert desk.open(kept.key) is None and store.list_conversations() == ()


def test_the_system_prompt_reaches_the_model(store):
    engine = ToyEngine(TEXT)
    desk = desk_of(engine, store)
    conversation = desk.new()
    desk.set_system(conversation, "Be brief.")
    ask(desk, conversation, "Count.")
    assert engine.prompts[0].startswith("<system>Be brief.</system>")


def test_a_lone_surrogate_does_not_stop_the_reply(store):
    desk = desk_of(ToyEngine(TEXT), store)
    conversation = desk.new()
    desk.set_system(conversation, "half \ud83d")
    assert ask(desk, conversation, "hi \ud83d").text == TEXT
    conversation.drawn().encode()
    conversation.system.encode()


def other(**changes) -> ToyEngine:
    """An engine of another pair."""
    return ToyEngine("Other words.", info=dataclasses.replace(PAIR, target_fingerprint="12" * 32, **changes))


def test_a_reply_goes_on_with_its_own_engine_when_another_pair_is_loaded_meanwhile(store):
    gate = threading.Event()
    desk = desk_of(ToyEngine(TEXT, gate=gate), store)
    conversation = desk.new()
    conversation.claim()
    answer = desk.ask(conversation, "Count.", SETTINGS, "auto", True)
    while len(answer.rounds) < 2:
        assert not answer.done.wait(0.001)
    desk.loader.state = LoadingState("Ready.", 1.0, engine=other(target="Other"))
    gate.set()
    assert answer.done.wait(10)
    conversation.release()
    assert answer.text == TEXT and answer.reply.pair.target == PAIR.target
    assert answer.generation is None  # or the engine that was given up would stay in memory
    words = [row[0] for row in desk.details(answer.key, 0)["top_p"]]
    assert words[0] == "one"  # by its own tokenizer: the other has met no such word
    second = ask(desk, conversation, "Go on.")
    assert second.text == "Other words." and second.info.target == "Other"
    recorded = [m.replies[0].pair.target for m in store.conversation(conversation.key).messages if m.replies]
    assert recorded == [PAIR.target, "Other"]


def test_why_a_load_failed_is_told_to_the_owner_only(store):
    """Such sentences hold paths of the owner's disk."""
    desk = desk_of(ToyEngine(TEXT), store)
    desk.loader.state = failed = LoadingState("/home/ada/model does not exist.", failed=True)
    assert desk.loading == failed
    desk.personal = False
    assert desk.loading == dataclasses.replace(failed, sentence=NOT_SAID)
    assert desk.loading.number == failed.number  # the page knows by it what it has shown
    with pytest.raises(Refused) as refused:
        ask(desk, desk.new(), "Count.")
    assert str(refused.value) == NOT_SAID == describe(desk)["sentence"]
    desk.loader.state = loading = LoadingState("Reading the weights.", 0.5, loading=True)
    assert desk.loading is loading


def test_what_troubles_the_record_is_told_to_the_owner_only(store, caplog):
    store.path.unlink()
    store.path.mkdir()  # where the file should be
    desk = desk_of(ToyEngine(TEXT), store)
    ask(desk, desk.new(), "Count.")
    assert desk.problem == store.problem and str(store.path) in store.problem
    desk.personal = False
    assert desk.problem == desk.problem == NOT_RECORDED
    assert caplog.text.count(str(store.path)) == 1
    store.path.rmdir()
    ask(desk, desk.new(), "Count.")
    assert desk.problem is None


def test_a_conversation_that_is_written_is_never_pushed_out_of_memory(store, monkeypatch):
    """It would come back from the record as a second one, and two would write it."""
    monkeypatch.setattr(desk_module, "CONVERSATIONS_KEPT", 3)
    gate = threading.Event()
    desk = desk_of(ToyEngine(TEXT, gate=gate), store)
    claimed, idle = desk.new(), desk.new()
    claimed.claim()
    answer = desk.ask(claimed, "Count.", SETTINGS, "auto", False)
    newer = [desk.new() for _ in range(4)]
    assert desk.open(claimed.key) is claimed and desk.open(newer[-1].key) is newer[-1]
    assert desk.open(idle.key) is desk.open(newer[0].key) is None and len(desk._conversations) == 3
    gate.set()
    assert answer.done.wait(10)
    desk.new()
    assert desk.open(claimed.key) is claimed  # somebody has the right to write still
    claimed.release()
    newer = [desk.new() for _ in range(3)]
    assert list(desk._conversations.values()) == newer


def test_the_newest_conversation_stays_while_all_others_are_written(store, monkeypatch):
    monkeypatch.setattr(desk_module, "CONVERSATIONS_KEPT", 1)
    desk = desk_of(ToyEngine(TEXT), store)
    for conversation in (first := desk.new(), second := desk.new()):
        conversation.claim()
    assert desk.open(second.key) is second and desk.open(first.key) is None
    third = desk.new()
    assert desk.open(second.key) is second and desk.open(third.key) is third


def test_a_reply_is_not_compared_with_another_target(store):
    desk = desk_of(ToyEngine(TEXT), store)
    conversation = desk.new()
    ask(desk, conversation, "Count.")
    desk.loader.state = LoadingState("Ready.", 1.0, engine=other())
    with pytest.raises(Refused, match="was written with Toy-135M as it ran then"):
        desk.again_plainly(conversation, True)
    desk.loader.state = LoadingState("No models are loaded: choose a pair under Models.")
    with pytest.raises(Refused, match="choose a pair under Models"):
        desk.again(conversation, SETTINGS, "auto", True)


def test_a_pair_without_a_draft_writes_plainly_already(store):
    engine = ToyEngine(TEXT, info=dataclasses.replace(PAIR, draft="", drafter="plain"))
    desk = desk_of(engine, store)
    conversation = desk.new()
    assert not ask(desk, conversation, "Count.").drafted
    with pytest.raises(Refused, match="plainly already"):
        desk.again_plainly(conversation, True)


def test_a_follow_up_reads_only_what_is_new(store):
    desk = desk_of(ToyEngine(TEXT), store)
    conversation = desk.new()
    first = ask(desk, conversation, "Count.")
    second = ask(desk, conversation, "Go on.")
    assert first.reused_tokens == 0
    assert 0 < second.reused_tokens < second.prompt_tokens
    assert 0 < second.prefill_share < first.prefill_share < 1
    again = desk_of(ToyEngine(TEXT), Store(store.path)).open(conversation.key)
    assert again.current.reused_tokens == second.reused_tokens


class Thinker(ToyTokenizer):
    """Its template begins each reply with a thought."""

    def apply_chat_template(self, messages, tokenize=False, add_generation_prompt=True) -> str:
        text = super().apply_chat_template(messages, tokenize, add_generation_prompt)
        return text + "<think>\n" if add_generation_prompt else text.removesuffix("<assistant>")


def test_what_the_template_has_opened_goes_back_to_the_model_whole(store):
    engine = ToyEngine("A plan.</think>An answer.")
    engine.pair.tokenizer = Thinker()
    desk = desk_of(engine, store)
    conversation = desk.new()
    assert ask(desk, conversation, "Why?").opening == "<think>\n"
    ask(desk, conversation, "And then?")
    assert "<think>\nA plan.</think>An answer.</assistant>" in engine.prompts[1]
    again = desk_of(engine, Store(store.path)).open(conversation.key)
    assert again.messages() == conversation.messages() and again.current.opening == "<think>\n"


def test_a_base_model_is_stopped_where_it_would_ask_itself(store):
    engine = ToyEngine(TEXT)
    engine.pair.tokenizer.chat_template = None
    desk = desk_of(engine, store)
    answer = ask(desk, desk.new(), "Count.", Settings(seed=7, stop=("END",)))
    assert answer.settings.stop == ("END", "\nUser:") and answer.prompt.notes


def test_what_a_rule_that_is_not_exact_is_compared_with_is_exact(store):
    desk = desk_of(ToyEngine(TEXT), store)
    conversation = desk.new()
    lossy = dataclasses.replace(SETTINGS, verifier="typical", acceptance_threshold=0.09)
    first = ask(desk, conversation, "Count.", lossy)
    assert first.not_exact == "not exact: typical 0.09"
    plain = desk.again_plainly(conversation, True)
    assert plain.done.wait(10)
    assert plain.not_exact == "" and plain.settings.verifier == "token"
    starts = [record for record in drawn(conversation) if record[0] == "s"]
    assert "not exact: typical 0.09" in starts[0][3] and "not exact" not in starts[1][3]
    exact = [reply.settings.exact for reply in store.conversation(conversation.key).messages[1].replies]
    assert exact == [False, True]
