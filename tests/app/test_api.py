"""``/chat`` and ``/pair`` as gradio_client calls them, on a served page with the scripted engine.

Cases UI-08 (two callers at once) and UI-09 (shapes of history).
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import gradio as gr
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError

from app import api
from app.chat.desk import Desk
from app.page import build, launch
from app.serving.loading import Loader, LoadingState
from core.engine.loop import Engine
from core.record.store import Store
from core.settings import VERIFIERS
from tests.app.driver import free_port
from tests.app.letters import chat_pair
from tests.app.toy import PAIR, ToyEngine

OFFERED = ["model", "ngram", "recycling", "plain"]  # by the toy pair


class Service:
    """A page that holds nothing but the endpoints, and a client of it."""

    def __init__(self, engine, folder: Path):
        self.engine = engine
        state = LoadingState("Ready.", engine=engine)
        self.desk = Desk(SimpleNamespace(state=state), Store(folder / "redline.db"))
        with gr.Blocks(analytics_enabled=False) as self.page:
            api.add(self.desk)
        port = free_port()
        launch(self.page, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{port}"
        self.client = self.another_client()

    def another_client(self) -> Client:
        return Client(self.url, verbose=False)

    def chat(self, *arguments, **options) -> str:
        return self.client.predict(*arguments, api_name="/chat", **options)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    served: list[Service] = []

    def start(engine) -> Service:
        served.append(Service(engine, tmp_path))
        return served[-1]

    yield start
    for service in served:
        service.client.close()
        service.page.close(verbose=False)


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Iterator[Service]:
    """One page for the tests that only ask."""
    service = Service(ToyEngine("One two three four five six seven."), tmp_path_factory.mktemp("api"))
    yield service
    service.client.close()
    service.page.close(verbose=False)


@pytest.fixture(scope="module")
def letters(tmp_path_factory) -> Iterator[Service]:
    """The same over the real engine."""
    service = Service(Engine(chat_pair()), tmp_path_factory.mktemp("letters"))
    yield service
    service.client.close()
    service.page.close(verbose=False)


def test_both_endpoints_are_named_typed_and_described(toy):
    named = toy.client.view_api(return_format="dict", print_info=False)["named_endpoints"]
    assert set(named) == {"/chat", "/pair"}
    parameters = {p["parameter_name"]: p for p in named["/chat"]["parameters"]}
    assert list(parameters)[:3] == ["message", "history", "system"]
    assert not parameters["message"]["parameter_has_default"]
    assert parameters["temperature"]["python_type"]["type"] == "float"
    for name in ("num_draft_tokens", "auto_draft_tokens"):  # what is usual depends on the device
        assert parameters[name]["parameter_has_default"] and parameters[name]["parameter_default"] is None
    assert parameters["verifier"]["parameter_default"] == "token"
    assert named["/chat"]["returns"][0]["python_type"]["type"] == "str"
    assert "seed" in named["/chat"]["description"] and named["/pair"]["description"]


def test_the_page_opens_these_two_and_keeps_its_own_events_to_itself(toy):
    loader = Loader(lambda spec, progress: toy.engine)
    loader.start(wait=True)
    page = build(Desk(loader, toy.desk.store))
    assert set(page.get_api_info(all_endpoints=True)["named_endpoints"]) == {"/chat", "/pair"}
    assert page.get_api_info(all_endpoints=True)["unnamed_endpoints"] == {}


def test_a_reply_arrives_whole_or_as_it_grows(toy):
    assert toy.chat("Count.") == "One two three four five six seven."
    job = toy.client.submit("Count.", api_name="/chat")
    texts = list(job)
    assert texts[-1] == job.result() == "One two three four five six seven."
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:], strict=False))


def test_a_reply_can_be_followed_while_it_is_written(serve):
    gate = threading.Event()
    service = serve(ToyEngine("One two three four five six seven eight nine ten eleven.", gate=gate))
    job = service.client.submit("Count.", api_name="/chat")
    first = next(iter(job))
    assert "One two" in first and "eleven" not in first
    gate.set()
    assert job.result(30).endswith("eleven.")


def test_a_call_that_is_given_up_frees_the_engine(serve):
    service = serve(ToyEngine("One two three four five six seven eight nine ten.", gate=threading.Event()))
    job = service.client.submit("Count.", api_name="/chat")
    next(iter(job))
    assert service.engine.busy
    job.cancel()
    deadline = time.monotonic() + 30
    while service.engine.busy:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_it_says_what_runs_and_how_loading_stands(toy):
    told = toy.client.predict(api_name="/pair")
    assert told == {"loaded": True, "sentence": "Ready.", **dataclasses.asdict(PAIR), "drafters": OFFERED}
    loading = LoadingState("Reading the weights.", 0.5)
    assert api.describe(SimpleNamespace(loading=loading)) == {
        "loaded": False,
        "sentence": "Reading the weights.",
    }


HISTORIES = [
    (
        [
            {
                "role": "user",
                "metadata": None,
                "options": None,
                "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}],
            },
            {"role": "assistant", "content": None},
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "gone"},
        ],
        ["hi", "there", "go", "gone"],
    ),
    ([["a", "b"]], ["<user>a</user>", "<assistant>b</assistant>"]),
    (
        [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": "x"}],
        ["<system>Rhyme.</system>"],
    ),
    (None, []),
]


@pytest.mark.parametrize(("history", "told"), HISTORIES)
def test_the_history_reaches_the_prompt_as_plain_text_in_any_shape(toy, history, told):
    toy.chat("And now?", history)
    prompt = toy.engine.prompts[-1]
    assert "'type'" not in prompt and "None" not in prompt
    assert prompt.endswith("And now?</user>\n<assistant>")
    places = [prompt.index(text) for text in told]
    assert places == sorted(places)


def test_the_system_prompt_comes_first(toy):
    toy.chat("Go.", [["a", "b"]], "Be brief.")
    assert toy.engine.prompts[-1].startswith("<system>Be brief.</system>\n<user>a</user>")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temperature": 3}, "Temperature must be a number from 0 to 2, not 3."),
        ({"num_draft_tokens": 2.5}, "Draft tokens (K) must be a whole number from 0 to 16, not 2.5."),
        ({"verifier": "lucky"}, f"Verifier must be one of {', '.join(VERIFIERS)}, not 'lucky'."),
        ({"drafter": "eagle"}, f"This pair has no drafter 'eagle': choose one of {', '.join(OFFERED)}."),
        ({"seed": -7}, "Seed must be a whole number"),
        ({"history": ["hello"]}, "Message 1 of the history needs a role and a content"),
        ({"history": [{"role": "tool", "content": "x"}]}, "role 'tool'"),
        ({"message": "  \n"}, "The message is empty; please write something."),
        ({"message": [{"type": "file", "file": {"path": "x.png"}}]}, "The message must be text."),
        ({"message": 5}, "The message must be text."),
        ({"system": 5}, "The system prompt must be text."),
        ({"system": ["x"]}, "The system prompt must be text."),
        ({"drafter": {}}, "The drafter must be text."),
        ({"stop": 5}, "Stop strings must be text or a list of texts, not 5."),
        ({"record": "no"}, "Record must be true or false, not 'no'."),
    ],
)
def test_what_cannot_be_answered_gets_one_sentence(toy, options, sentence):
    asked = len(toy.engine.prompts)
    with pytest.raises(AppError) as caught:
        toy.chat(**{"message": "Go.", **options})
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    assert len(toy.engine.prompts) == asked


def test_a_reply_that_breaks_off_gives_what_there_is_and_says_why(serve):
    service = serve(ToyEngine("One two three four five six seven eight nine ten.", fail_after=2))
    job = service.client.submit("Count.", api_name="/chat")
    texts = []
    with pytest.raises(AppError, match="The target gave no usable distribution"):
        for text in job:
            texts.append(text)
        job.result()
    assert texts[-1].startswith("One two three")


def test_nothing_is_recorded_unless_it_is_asked_for(toy):
    toy.chat("Secret.", [["a", "b"]])
    assert toy.desk.store.list_conversations() == ()
    toy.chat("Keep this.", [["a", "b"]], "Be brief.", record=True, seed=4)
    (summary,) = toy.desk.store.list_conversations()
    stored = toy.desk.store.conversation(summary.id)
    question, answer = stored.messages
    assert (stored.system_prompt, question.content) == ("Be brief.", "Keep this.")
    assert answer.content == "One two three four five six seven."
    assert answer.replies[0].settings.seed == 4 and answer.replies[0].rounds


def test_settings_reach_the_engine(letters):
    greedy = letters.chat("abc", temperature=0, max_new_tokens=12)
    assert len(greedy) == 12 and letters.chat("abc", temperature=0, max_new_tokens=12, seed=9) == greedy
    assert letters.chat("abc", temperature=0, max_new_tokens=12, num_draft_tokens=0) == greedy
    letters.chat("abc", max_new_tokens=3, auto_draft_tokens=True, verifier="block", record=True)
    (summary,) = letters.desk.store.list_conversations()
    (reply,) = letters.desk.store.conversation(summary.id).messages[1].replies
    assert reply.settings.auto_draft_tokens and reply.settings.verifier == "block"
    cut = letters.chat("abc", temperature=0, max_new_tokens=12, stop=[greedy[5:7]])
    assert cut == greedy[: greedy.index(greedy[5:7])]


def test_on_a_card_k_is_automatic_unless_it_is_told(serve):
    service = serve(ToyEngine("One two three.", info=dataclasses.replace(PAIR, device="cuda")))
    service.chat("Count.", record=True)
    service.chat("Count.", num_draft_tokens=2, record=True)
    service.chat("Count.", auto_draft_tokens=False, record=True)
    told = [
        service.desk.store.conversation(one.id).messages[1].replies[0].settings
        for one in service.desk.store.list_conversations()
    ]
    ks = {(settings.num_draft_tokens, settings.auto_draft_tokens) for settings in told}
    assert ks == {(8, True), (2, False), (3, False)}


def test_two_callers_at_once_get_their_own_replies_and_seeds_hold(letters):
    """Case UI-08, over the real engine."""
    asked = {"a": ("my word is apple", 1), "b": ("my word is pear", 2)}

    def ask(name: str, client: Client) -> str:
        message, seed = asked[name]
        history = [[message, "yes"]]
        return client.predict(
            "what is my word", history, temperature=1, max_new_tokens=60, seed=seed, api_name="/chat"
        )

    clients = {name: letters.another_client() for name in asked}
    alone = {name: ask(name, clients[name]) for name in asked}
    together: dict[str, list[str]] = {name: [] for name in asked}

    def often(name: str) -> None:
        together[name] = [ask(name, clients[name]) for _ in range(3)]

    threads = [threading.Thread(target=often, args=(name,)) for name in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert alone["a"] != alone["b"]
    assert together == {name: [alone[name]] * 3 for name in asked}
    for client in clients.values():
        client.close()
