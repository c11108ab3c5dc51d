"""A real S3 server in this process (moto under werkzeug), and faults in front of it. For tests."""

import logging
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from s3fs import S3FileSystem
from werkzeug.serving import make_server

BUCKET = "bucket"
_ERRORS = {500: b"<Error><Code>InternalError</Code></Error>", 503: b"<Error><Code>SlowDown</Code></Error>"}


class Fault:
    """A fault in the next `times` requests of `method` whose path and query contain `part`, after `skip` of them.

    `what`: an HTTP status, `cut` (half the body under the full length), or `flip` (one bit of the body).
    """

    def __init__(self, method: str, part: str, what: int | str, times: int = 10**9, skip: int = 0) -> None:
        self.method, self.part, self.what, self.times, self.skip = method, part, what, times, skip
        self.hits = 0

    def takes(self, environment: dict[str, Any]) -> bool:
        address = f"{environment['PATH_INFO']}?{environment.get('QUERY_STRING', '')}"
        if environment["REQUEST_METHOD"] != self.method or self.part not in address:
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.hits += self.hits < self.times
        self.times -= 1
        return self.times >= 0


class Faults:
    """A WSGI application in front of another."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        self.rules: list[Fault] = []

    def __call__(self, environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        fault = next((rule for rule in self.rules if rule.takes(environment)), None)
        if fault is None:
            return self._application(environment, start)
        if isinstance(fault.what, int):
            environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
            body = _ERRORS.get(fault.what, b"")
            start(f"{fault.what} Injected", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]
        body = bytearray(b"".join(self._application(environment, start)))
        if fault.what == "cut":
            return [bytes(body[: len(body) // 2])]
        if body:
            body[len(body) // 2] ^= 1
        return [bytes(body)]


def s3_client(endpoint: str) -> dict[str, str]:
    """The variables under which `s3://` leads to a server of the tests, and to no other."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "testtest",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextmanager
def s3_server() -> Generator[Faults]:
    """A bucket; `s3://bucket/...` leads there while the block runs."""
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    faults = Faults(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, faults, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_client(f"http://127.0.0.1:{server.port}").items():
            patch.setenv(name, value)
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        patch.setattr(S3FileSystem, "retries", 1)  # of s3fs itself, with growing pauses
        S3FileSystem.clear_instance_cache()
        try:
            with suppress(FileExistsError):  # moto keeps it as long as the process
                S3FileSystem().mkdir(BUCKET)
            yield faults
        finally:
            faults.rules = []
            S3FileSystem.clear_instance_cache()
            server.shutdown()
            server.server_close()
            thread.join()
