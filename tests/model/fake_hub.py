"""A model hub on this machine: just enough of the real one's interface to fetch models from."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Models as folders by id, each the revision `main`; which of them are gated; which files were sent.

    tags: other revisions of all models, by name: commit and folder.
    """

    models: dict[str, Path] = field(default_factory=dict)
    tags: dict[str, tuple[str, Path]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    sent: list[str] = field(default_factory=list)
    url: str = ""

    def handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        parts = unquote(urlsplit(request.path).path).strip("/").split("/")
        listing = parts[:2] == ["api", "models"]
        parts = parts[2:] if listing else parts
        if len(parts) < 4:  # the client also asks for things that have nothing to do with models
            send(request, 404)
            return
        model, action, revision, rest = "/".join(parts[:2]), parts[2], parts[3], parts[4:]
        if model not in self.models:
            send(request, 401, error="RepoNotFound")
        elif (found := self.revision(model, revision)) is None:
            send(request, 404, error="RevisionNotFound")
        elif listing:
            send(request, 200, self.listing(model, action, *found))
        elif model in self.gated:
            send(request, 401, error="GatedRepo")
        elif not (file := found[1].joinpath(*rest)).is_file():
            send(request, 404, error="EntryNotFound", commit=found[0])
        else:
            if body:
                self.sent.append(file.name)
            send(request, 200, file.read_bytes(), body=body, commit=found[0])

    def revision(self, model: str, name: str) -> tuple[str, Path] | None:
        """Commit and folder of a revision by its name or commit."""
        known = {"main": (COMMIT, self.models[model]), **self.tags}
        return next((found for tag, found in known.items() if name in (tag, found[0])), None)

    def listing(self, model: str, action: str, commit: str, folder: Path) -> bytes:
        if action == "revision":
            return json.dumps({"id": model, "sha": commit, "siblings": []}).encode()
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return json.dumps([
            {
                "type": "file", "path": str(path.relative_to(folder)), "size": path.stat().st_size,
                "oid": etag(path.read_bytes()),
            }
            for path in files
        ]).encode()  # fmt: skip


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def send(
    request: BaseHTTPRequestHandler, status: int, content: bytes = b"", error: str | None = None, body: bool = True,
    commit: str = COMMIT,
) -> None:  # fmt: skip
    request.send_response(status)
    if error:
        request.send_header("X-Error-Code", error)
    request.send_header("X-Repo-Commit", commit)
    request.send_header("ETag", f'"{etag(content)}"')
    request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    if body:
        request.wfile.write(content)


class Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # clients may hang up when they have what they want
            super().handle_error(request, client_address)


@contextmanager
def running() -> Iterator[FakeHub]:
    hub = FakeHub()
    server = Server(("127.0.0.1", 0), hub.handler())
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
