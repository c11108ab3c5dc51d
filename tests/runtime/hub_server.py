"""A model hub on loopback: the routes that huggingface_hub asks when it downloads a repository's files, and one about
its leave."""

import hashlib
import json
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """`repos`: name -> folder. `gated`: names whose files nobody may have. `rejected`: tokens that aren't valid.
    `asked`: (method, path), in order.

    No file's content is sent before `expected` processes have asked which commit a revision is.
    """

    repos: dict[str, Path]
    gated: set[str] = field(default_factory=set[str])
    rejected: set[str] = field(default_factory=set[str])
    asked: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    url: str = ""
    expected: int = 0

    def wait_for_all(self) -> None:
        deadline = time.monotonic() + 60
        while sum("/revision/" in path for _, path in self.asked) < self.expected and time.monotonic() < deadline:
            time.sleep(0.01)

    def downloads(self, file: str) -> int:
        return sum(method == "GET" and path.endswith(f"/{file}") for method, path in self.asked)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a GET."""
        parts = path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo, kind, revision = "/".join(parts[2:4]), parts[4], "/".join(parts[5:])
        else:
            repo, kind, revision = "/".join(parts[:2]), parts[2], parts[3]
        if repo not in self.repos:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"Repository not found"
        if kind == "auth-check":
            return (403, {"X-Error-Code": "GatedRepo"}, b"Restricted") if repo in self.gated else (200, {}, b"OK")
        if revision not in ("main", "v1", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"Revision not found"
        if kind == "revision":
            return 200, {}, json.dumps({"id": repo, "sha": COMMIT, "siblings": []}).encode()
        if kind == "tree":
            files = sorted(path for path in self.repos[repo].rglob("*") if path.is_file())
            return 200, {}, json.dumps([_entry(self.repos[repo], file) for file in files]).encode()
        if repo in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"Access to this model is restricted"
        content = (self.repos[repo] / "/".join(parts[4:])).read_bytes()
        return 200, {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": COMMIT}, content


def _entry(folder: Path, file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    return {"type": "file", "path": str(file.relative_to(folder)), "size": len(content), "oid": _oid(content)}


def _oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serve(hub: Hub) -> Generator[Hub]:
    """Answer for `hub` until the block ends; its `url` goes into HF_ENDPOINT."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hub.asked.append((self.command, self.path))
            status, headers, body = hub.answer(self.path)
            if self.headers.get("Authorization", "").removeprefix("Bearer ") in hub.rejected:
                status, headers, body = 401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b""
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                if "/resolve/" in self.path:
                    hub.wait_for_all()
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Nothing on the console."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
