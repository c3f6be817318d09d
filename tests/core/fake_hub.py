"""A model hub on this machine, spoken to by the real huggingface_hub: enough of it to look up and fetch.

    hub = FakeHub()
    hub.add("owner/name", {"config.json": b"...", "model.safetensors": b"..."})
    with connected(hub, monkeypatch, tmp_path / "cache"):
        ...

``hub.fail`` answers paths that contain a text with a status and headers; ``hub.requests`` lists what was
asked for.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class FakeHub:
    """``repositories`` by name: files and what ``model_info`` says beside them."""

    def __init__(self):
        self.repositories: dict[str, tuple[dict[str, bytes], dict]] = {}
        self.failures: dict[str, tuple[int, dict[str, str]]] = {}
        self.cut: str | None = None  # a file that breaks off half-way
        self.requests: list[str] = []

    def add(self, repo: str, files: dict[str, bytes], **info) -> str:
        """Adds a repository, or a new commit of one; gives the commit."""
        self.repositories[repo] = (files, info)
        return self.commit(repo)

    def commit(self, repo: str) -> str:
        digest = hashlib.sha1()
        for name, content in sorted(self.repositories[repo][0].items()):
            digest.update(name.encode() + content)
        return digest.hexdigest()

    def fail(self, text: str, status: int, **headers: str) -> None:
        self.failures[text] = (status, {name.replace("_", "-"): value for name, value in headers.items()})

    @contextmanager
    def serving(self) -> Iterator[str]:
        """The hub's address while it runs."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer(head=True)

    def do_GET(self) -> None:
        self._answer(head=False)

    def _answer(self, head: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        for text, (status, headers) in self.hub.failures.items():
            if text in path:
                return self._send(status, b"", headers, head)
        owner, name, *rest = path.removeprefix("/api/models").strip("/").split("/")
        repo = f"{owner}/{name}"
        if repo not in self.hub.repositories:
            return self._send(401, b"", {"X-Error-Code": "RepoNotFound"}, head)
        files, info = self.hub.repositories[repo]
        commit = self.hub.commit(repo)
        if rest[1:] and rest[1] not in ("main", commit):
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"}, head)
        if path.startswith("/api/"):
            siblings = [_sibling(name, content) for name, content in files.items()]
            said = {"id": repo, "sha": commit, "siblings": siblings, **info}
            return self._send(200, json.dumps(said).encode(), {"Content-Type": "application/json"}, head)
        content = files["/".join(rest[2:])]
        digest = hashlib.sha256(content).hexdigest()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest}"'}
        cut = not head and self.hub.cut is not None and path.endswith(self.hub.cut)
        return self._send(200, content, headers, head, cut)

    def _send(self, status: int, body: bytes, headers: dict[str, str], head: bool, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if not head:
            self.wfile.write(body[: len(body) // 2] if cut else body)


def _sibling(name: str, content: bytes) -> dict:
    sibling = {"rfilename": name, "size": len(content), "blobId": hashlib.sha1(content).hexdigest()}
    if name.endswith((".safetensors", ".bin", ".gguf")):  # what the hub keeps as large files
        digest = hashlib.sha256(content).hexdigest()
        sibling["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
    return sibling


@contextmanager
def connected(hub: FakeHub, monkeypatch, cache: Path) -> Iterator[FakeHub]:
    """huggingface_hub asks ``hub`` and keeps its cache in ``cache``."""
    with hub.serving() as address:
        connect(monkeypatch, address, cache)
        yield hub


def connect(monkeypatch, address: str, cache: Path) -> None:
    """Points huggingface_hub, which the tests' settings keep offline, at an address and a cache."""
    from huggingface_hub import constants, hf_api

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(hf_api.api, "endpoint", address)
