"An S3 server of moto in a thread, with faults: throttled, denied, removed and replaced objects."

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BUCKET, SECRET = "pipes", "MARKER0SECRET0KEY0WJALRX"


class ObjectServer:
    "WSGI server around moto; `environment` is what clients need."

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = {
            "AWS_ACCESS_KEY_ID": "AKIAMARKERKEYID00000",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
        self.gets: list[str] = []  # keys of requested objects
        self.n_throttled = 0  # requests of objects that are to be answered by 503
        self.denied: Callable[[str, str], bool] = lambda method, key: False
        self.on_get: Callable[[str], None] = lambda key: None  # before an object is sent
        self._lock = threading.Lock()
        self.client: Any = None

    def connect(self) -> None:
        "Make the bucket, empty."
        import boto3  # type: ignore[import-untyped]

        self.client = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="x",
            aws_secret_access_key="y",
        )
        self.client.create_bucket(Bucket=BUCKET)

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=key)

    def put_folder(self, folder: Path, prefix: str) -> str:
        "Store all files of a folder; return the URL."
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())
        return f"s3://{BUCKET}/{prefix}"

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        from urllib.parse import unquote

        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        _bucket, _, key = unquote(path.encode("latin-1").decode()).lstrip("/").partition("/")
        from_boto = "Boto3" in environ.get("HTTP_USER_AGENT", "")
        if from_boto:
            return self._app(environ, start)
        if environ.get("HTTP_AUTHORIZATION", "").startswith("Bearer"):
            del environ["HTTP_AUTHORIZATION"]  # of Google's clients; moto knows signatures only
        if self.denied(method, key):
            body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            start("403 Forbidden", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]
        if method == "GET" and key:
            with self._lock:
                self.gets.append(key)
                slow = self.n_throttled > 0
                self.n_throttled -= slow
            if slow:
                body = (
                    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
                )
                start(
                    "503 Slow Down", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
                )
                return [body]
            self.on_get(key)
        return self._app(environ, start)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def stored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    "Serve the files of a folder as objects; yields their URL."
    server = ObjectServer()
    try:
        server.connect()
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server.put_folder(folder, uuid.uuid4().hex)  # the servers of a process share their objects
    finally:
        server.close()
