"""Case HF-02: on ZeroGPU only plain data crosses to the GPU process, and no reply is lost with it.

``Lender`` stands in for the package ``spaces``: like its decorator it runs the function in a forked process,
passes everything through pickle and raises what ``spaces`` raises when that process dies. Unlike it, the
process waits for each item to be taken, so that a test knows how far it got.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import gradio as gr
import pytest

from app.chat.desk import Desk
from app.serving import zero_gpu
from app.serving.loading import LoadingState
from core.engine.loop import Engine
from core.record.store import Store
from core.records import Reply, Round, Settings
from core.text.detokenise import PromptError
from tests.app.letters import chat_pair
from tests.core.toys import table, toy_pair

SETTINGS = Settings(temperature=1.0, num_draft_tokens=3, max_new_tokens=24, seed=5)
PROMPT = [3, 1, 2]


class Lender:
    """A GPU lender. ``die_after``: items after which the process is killed, as one that runs over its time.

    ``refusal`` is raised instead of lending. ``exit_codes`` are those of the processes that ended.
    """

    def __init__(self, die_after: int | None = None, refusal: Exception | None = None):
        self.die_after, self.refusal = die_after, refusal
        self.declared: list[int] = []
        self.exit_codes: list[int | None] = []

    def GPU(self, *, duration: Callable[..., int]) -> Callable:
        return lambda task: self._decorated(task, duration)

    def _decorated(self, task: Callable, duration: Callable[..., int]) -> Callable[..., Iterator]:
        def on_gpu(*arguments) -> Iterator:
            self.declared.append(duration(*arguments))
            if self.refusal is not None:
                raise self.refusal
            context = multiprocessing.get_context("fork")
            here, there = context.Pipe()
            work = (task, pickle.dumps(arguments), there, here, self.die_after)
            process = context.Process(target=_work, args=work, daemon=True)
            process.start()
            there.close()
            try:
                while (kind := here.recv_bytes()) == b"item":
                    yield pickle.loads(here.recv_bytes())
                    here.send_bytes(b"go on")
                assert kind == b"end"
            except EOFError:
                message = "GPU task aborted"
                raise gr.Error(message, title="ZeroGPU worker error", print_exception=False) from None
            finally:
                here.close()  # which the process takes for a stop
                process.join(30)
                self.exit_codes.append(process.exitcode)

        return on_gpu


def _work(task: Callable, arguments: bytes, there, here, die_after: int | None) -> None:
    here.close()
    items = task(*pickle.loads(arguments))
    for count, item in enumerate(items):
        if count == die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        there.send_bytes(b"item")
        there.send_bytes(pickle.dumps(item))
        try:
            there.recv_bytes()
        except EOFError:
            items.close()
            return
    there.send_bytes(b"end")


def real_engine(**changes) -> Engine:
    pair = toy_pair(table(1, 26), table(2, 26), **changes)
    pair.info = dataclasses.replace(pair.info, device="cuda")
    return Engine(pair, cache_bytes=0)


@pytest.fixture
def lend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[zero_gpu.ZeroGpuEngine, Lender]]:
    """``lend(inner, **lender)`` is ``inner`` behind ZeroGPU, as on such a Space, and the lender."""

    def lend(inner: Engine, **options) -> tuple[zero_gpu.ZeroGpuEngine, Lender]:
        lender = Lender(**options)
        monkeypatch.setattr(zero_gpu, "_reply_on_gpu", zero_gpu._on_gpu(lender))
        monkeypatch.setattr(zero_gpu, "_inner", None)
        return zero_gpu.engine(inner), lender

    return lend


def told(rounds: list[Round]) -> list[tuple]:
    return [(token.id, token.fate, token.text) for round_ in rounds for token in round_.tokens]


def test_a_reply_from_the_gpu_process_is_the_one_written_here(lend):
    here = real_engine().generate(PROMPT, SETTINGS)
    rounds = list(here)
    engine, lender = lend(real_engine())
    there = engine.generate(PROMPT, SETTINGS, domain="code")
    assert there.prefill_seconds is there.reused_tokens is there.reply is None
    assert told(list(there)) == told(rounds)
    assert there.reply.token_ids == here.reply.token_ids and there.reply.text == here.reply.text
    assert there.reply.finish_reason == here.reply.finish_reason == "length"
    assert there.prefill_seconds > 0 and there.reused_tokens == 0
    assert (there.prompt_tokens, there.settings) == (3, SETTINGS)
    assert lender.exit_codes == [0] and engine.pair is engine._inner.pair and not engine.busy


class OnlyRecords(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        assert module == "core.records", f"{module}.{name} crosses the process boundary"
        return super().find_class(module, name)


def crosses(value: object) -> object:
    return OnlyRecords(io.BytesIO(pickle.dumps(value))).load()


def test_only_records_and_numbers_cross(monkeypatch):
    monkeypatch.setattr(zero_gpu, "_inner", real_engine())
    arguments = (PROMPT, dataclasses.replace(SETTINGS, stop=("zz",)), "auto")
    assert crosses(arguments) == arguments
    items = list(zero_gpu.gpu_reply(*arguments))
    assert [crosses(item) for item in items] == items
    assert isinstance(items[-1][3], Reply) and sum(item[2] is not None for item in items) == len(items)


def test_a_reply_that_ends_without_a_round_still_arrives(lend):
    def broken(ids):
        raise RuntimeError("no such kernel")

    pair = toy_pair(broken, table(2, 26))
    pair.info = dataclasses.replace(pair.info, device="cuda")
    engine, _ = lend(Engine(pair))
    generation = engine.generate([4], SETTINGS)
    assert list(generation) == []
    assert generation.reply.finish_reason == "error" and "no such kernel" in generation.reply.error


def test_stop_while_the_process_writes_ends_it_and_keeps_what_was_written(lend):
    engine, lender = lend(real_engine())
    cancel = threading.Event()
    generation = engine.generate(PROMPT, SETTINGS, cancel=cancel)
    rounds = [next(generation), next(generation)]
    cancel.set()
    assert list(generation) == []
    reply = generation.reply
    assert reply.finish_reason == "cancelled" and reply.error is None and reply.num_rounds == 2
    assert reply.text == "".join(t.text for r in rounds for t in r.tokens if t.emitted) == reply.visible_text
    assert lender.exit_codes == [0]  # it closed its generator and ended by itself


def test_closing_ends_the_process_and_asks_for_none_when_it_was_not_begun(lend):
    engine, lender = lend(real_engine())
    generation = engine.generate(PROMPT, SETTINGS)
    next(generation)
    generation.close()
    assert generation.reply.finish_reason == "cancelled" and generation.reply.num_rounds == 1
    assert lender.exit_codes == [0]
    generation = engine.generate(PROMPT, SETTINGS)
    generation.close()
    assert generation.reply.finish_reason == "cancelled" and generation.reply.text == ""
    assert len(lender.declared) == 1


def test_a_reply_that_was_stopped_before_it_began_asks_for_no_gpu(lend):
    engine, lender = lend(real_engine())
    cancel = threading.Event()
    cancel.set()
    generation = engine.generate(PROMPT, SETTINGS, cancel=cancel)
    assert list(generation) == [] and generation.reply.finish_reason == "cancelled"
    assert lender.declared == []


def test_an_over_run_ends_with_the_partial_text_and_is_logged(lend, tmp_path: Path, caplog):
    inner = Engine(chat_pair(device="cuda"))
    engine, lender = lend(inner, die_after=2)
    store = Store(tmp_path / "redline.db")
    loader = types.SimpleNamespace(state=LoadingState("Ready.", engine=engine))
    desk = Desk(loader, store)
    conversation = desk.new()
    answer = desk.ask(conversation, "hello", SETTINGS, "auto", record=True)
    assert answer.done.wait(60)
    assert answer.error is None  # not a fault of the program
    assert answer.reply.finish_reason == "error" and answer.reply.error == zero_gpu.ABORTED
    assert answer.text == answer.reply.text != "" and len(answer.rounds) == 2
    assert lender.exit_codes == [-signal.SIGKILL]
    assert "aborted on the GPU after 2 rounds" in caplog.text
    (message,) = store.conversation(conversation.key).messages[1:]
    (stored,) = message.replies
    assert (stored.text, stored.finish_reason, stored.error) == (answer.text, "error", zero_gpu.ABORTED)
    assert len(stored.rounds) == 2


def test_a_visitor_without_quota_reads_why(lend):
    said = "You have exceeded your free ZeroGPU quota (26s requested vs. 10s left). Try again in 1:02:03. "
    engine, _ = lend(real_engine(), refusal=gr.Error(said, title="ZeroGPU quota exceeded"))
    generation = engine.generate(PROMPT, SETTINGS)
    assert list(generation) == [] and generation.reply.text == ""
    assert generation.reply.finish_reason == "error"
    assert generation.reply.error.endswith("(26s requested vs. 10s left). Try again in 1:02:03.")
    assert generation.reply.reused_tokens is None  # nobody looked


def test_nx_09_a_gpu_without_memory_is_named(lend):
    """``spaces`` passes on the name of what was raised in the process."""
    engine, _ = lend(real_engine(), refusal=gr.Error("OutOfMemoryError", title="ZeroGPU worker error"))
    generation = engine.generate(PROMPT, SETTINGS)
    assert list(generation) == [] and generation.reply.error == zero_gpu.NO_MEMORY


def test_a_prompt_that_cannot_be_answered_asks_for_no_gpu(lend):
    engine, lender = lend(real_engine(context_length=8))
    for prompt in ([], [1] * 8):
        with pytest.raises(PromptError):
            engine.generate(prompt, SETTINGS)
    assert lender.declared == []


def test_the_declared_time_follows_the_reply_and_stays_small(lend):
    engine, lender = lend(real_engine())
    list(engine.generate(PROMPT, SETTINGS))
    assert lender.declared == [6]  # 5 + 0.003 + 24 / 25, rounded up

    def declared(prompt: int, new: int) -> int:
        return zero_gpu.gpu_seconds([0] * prompt, Settings(max_new_tokens=new), "auto")

    assert declared(100, Settings().max_new_tokens) < 56  # a visitor with 56 s left is served
    assert declared(100, 128) < declared(100, 512) < declared(8000, 512)
    assert declared(30_000, 8192) == zero_gpu.MOST_SECONDS < 300


def test_a_pair_on_the_cpu_needs_no_gpu(lend):
    pair = toy_pair(table(1, 26), table(2, 26))
    inner = Engine(pair)
    engine, lender = lend(inner)
    assert engine is inner


@pytest.mark.parametrize(
    ("variable", "package", "there"),
    [
        ("true", True, True),
        ("1", True, True),
        ("", True, False),
        ("false", True, False),
        ("true", False, False),
    ],
)
def test_zerogpu_is_there_when_package_and_environment_say_so(monkeypatch, variable, package, there):
    monkeypatch.setenv("SPACES_ZERO_GPU", variable)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "0")
    monkeypatch.setitem(sys.modules, "spaces", types.SimpleNamespace(GPU=Lender().GPU) if package else None)
    fresh = importlib.util.module_from_spec(importlib.util.find_spec("app.serving.zero_gpu"))
    fresh.__spec__.loader.exec_module(fresh)
    assert fresh.active() is there
    assert os.environ["HF_DEACTIVATE_ASYNC_LOAD"] == str(int(there))  # weights are read in the main thread
    inner = real_engine()
    assert (fresh.engine(inner) is inner) is not there
