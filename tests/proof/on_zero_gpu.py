"""Runs replies through ZeroGPU's own package ``spaces``, with a scheduler of this process and no GPU.

What is real: the import that patches torch, loading a pair under its imitation of CUDA and packing it at
launch, the decorator, the forked worker and its queues, the calls to the scheduler, gradio's page and
client. What is stood in for: the scheduler, the few names that a CPU build of torch lacks, and sending
weights to the GPU; so the replies are those of a pair of tables. It ends with "everything as expected", or
with an assertion.

Run: ``SPACES_ZERO_GPU=true python -m tests.proof.on_zero_gpu`` where ``spaces`` is installed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

FOLDER = Path(tempfile.mkdtemp(prefix="redline-zero-gpu-"))


class Scheduler(BaseHTTPRequestHandler):
    """Grants each request. ``calls`` are (path, query), in order."""

    calls: list[tuple[str, dict[str, str]]] = []

    def do_POST(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.calls.append((parts.path, query))
        grant = {"idle": True, "nvidiaIndex": 0, "nvidiaUUID": "GPU-0", "allowToken": "token"}
        body = json.dumps(grant if parts.path == "/schedule" else {}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments) -> None:
        pass

    @classmethod
    def last(cls, path: str) -> dict[str, str]:
        return [query for called, query in cls.calls if called == path][-1]


def stand_in() -> None:
    """The scheduler's address, and what a CPU build of torch lacks. Before ``spaces`` is imported."""
    scheduler = ThreadingHTTPServer(("127.0.0.1", 0), Scheduler)
    threading.Thread(target=scheduler.serve_forever, daemon=True).start()
    control_group = FOLDER / "cgroup"
    control_group.write_text("0::/redline\n")
    os.environ.update(
        SPACES_ZERO_DEVICE_API_URL=f"http://127.0.0.1:{scheduler.server_port}",
        ZEROGPU_PROC_SELF_CGROUP_PATH=str(control_group),
        ZEROGPU_OFFLOAD_DIR=str(FOLDER / "tensors"),
        NO_PROXY="127.0.0.1,localhost",
        no_proxy="127.0.0.1,localhost",
    )
    import core  # noqa: F401  (sets how torch's threads wait, before torch is imported)

    import torch  # isort: skip

    if torch.version.cuda is None:
        torch.version.cuda = "13.0"
        torch._C._cuda_init = lambda: None
        torch.cuda._is_in_bad_fork = bool


def main() -> None:
    os.environ.update(REDLINE_HOME=str(FOLDER / "home"), HF_HUB_OFFLINE="1")
    stand_in()
    from tests.core.models_on_disk import write_pair

    models = write_pair(FOLDER, "qwen3")  # before CUDA is imitated
    import gradio as gr
    from gradio_client import Client

    from app import api
    from app.chat.desk import Desk
    from app.serving import zero_gpu
    from app.serving.loading import LoadingState
    from core.engine.loop import Engine
    from core.pairs.load import load_pair
    from core.pairs.spec import PairSpec
    from core.record.store import Store
    from core.records import Settings
    from tests.app.letters import chat_pair

    assert zero_gpu.active()
    loaded = load_pair(PairSpec("custom", *models, quantize="none", draft_quantize="none", device="cuda"))
    assert (loaded.info.device, loaded.info.dtype) == ("cuda", "bfloat16")

    import spaces.zero.torch

    spaces.zero.torch.init = lambda uuid: None
    spaces.zero.torch.move = lambda callback=None: None

    pair = chat_pair(device="cuda", context_length=2000)
    score = pair.target.logits
    pair.target.logits = lambda ids, cache: (time.sleep(0.03), score(ids, cache))[1]
    engine = zero_gpu.engine(Engine(pair))
    assert isinstance(engine, zero_gpu.ZeroGpuEngine)
    state = LoadingState("Ready.", engine=engine)
    with gr.Blocks(analytics_enabled=False) as page:
        api.add(Desk(types.SimpleNamespace(state=state), Store(FOLDER / "redline.db")))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    page.queue().launch(
        server_name="127.0.0.1", server_port=port, quiet=True, prevent_thread_lock=True, ssr_mode=False
    )
    # ZeroGPU ends a Space in which it finds no decorated function at launch.
    assert Scheduler.calls[0][0] == "/startup-report"
    assert any((FOLDER / "tensors").iterdir())  # the loaded pair, packed for the GPU processes
    client = Client(f"http://127.0.0.1:{port}", verbose=False)

    # The same reply as here.
    asked = {"temperature": 0, "max_new_tokens": 30}
    here = Engine(chat_pair(context_length=2000)).generate(
        pair.tokenizer("hello")["input_ids"], Settings(**asked)
    )
    list(here)
    assert client.predict("hello", **asked, api_name="/chat") == here.reply.text
    assert Scheduler.last("/schedule")["durationSeconds"] == str(
        zero_gpu.gpu_seconds([0] * 5, Settings(**asked), "")
    )
    assert Scheduler.last("/release")["fail"] == "false"

    # Stop: the process, which served the first reply too, ends this one early and is released.
    generation = engine.generate([1, 2, 3], Settings(temperature=1, max_new_tokens=1500))
    next(generation), next(generation)
    generation.close()
    assert (generation.reply.finish_reason, generation.reply.num_rounds) == ("cancelled", 2)
    assert Scheduler.last("/release")["fail"] == "false"
    assert [path for path, _ in Scheduler.calls].count("/allow") == 1

    # Over-run: the process is killed in the middle, as ZeroGPU does it.
    job = client.submit("hello", temperature=1, max_new_tokens=1500, api_name="/chat")
    texts = iter(job)
    written = [next(texts)]
    os.kill(int(Scheduler.last("/allow")["pid"]), signal.SIGKILL)
    try:
        written.extend(texts)
        job.result()
        raise AssertionError("the reply ended as if nothing had happened")
    except Exception as error:
        assert str(error) == zero_gpu.ABORTED, repr(error)
    assert written[-1] and Scheduler.last("/release")["fail"] == "true"
    print("everything as expected", flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # the page's threads and the worker's end with the process
