"A server on this machine that publishes files as Zenodo and Mendeley Data do, with faults: broken connections, changed files, wrong checksums."

import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class RecordServer:
    "Files by their paths; a context manager."

    def __init__(self, files: Mapping[str, bytes]):
        self.files = dict(files)
        self.claimed: dict[str, str] = {}  # path -> checksum that the record states instead of the right one
        self.cut: dict[str, list[int]] = {}  # path -> lengths after which the next answers break off
        self.status = 0  # of all answers, if not 0
        self.requests: list[str] = []  # path of each request of a file
        self.listings = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.answer(self)

            def log_message(self, *words: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def __enter__(self) -> "RecordServer":
        return self

    def __exit__(self, *error: Any) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def _checksum(self, path: str, kind: str) -> str:
        return self.claimed.get(path, hashlib.new(kind, self.files[path]).hexdigest())

    def _zenodo(self) -> Any:
        return {
            "files": [
                {
                    "key": path,
                    "size": len(data),
                    "checksum": f"md5:{self._checksum(path, 'md5')}",
                    "links": {"self": f"{self.url}/data/{path}"},
                }
                for path, data in self.files.items()
            ]
        }

    def _folders(self) -> list[dict[str, str]]:
        names = sorted(
            {"/".join(p.split("/")[:k]) for p in self.files for k in range(1, len(p.split("/")))} - {""}
        )
        return [
            {"id": f"id-{name}", "name": name.split("/")[-1]}
            | ({"parent_id": f"id-{name.rpartition('/')[0]}"} if "/" in name else {})
            for name in names
        ]

    def _mendeley(self, folder: str) -> list[dict[str, Any]]:
        inside = [
            p for p in self.files if p.rpartition("/")[0] == folder.removeprefix("id-").replace("root", "")
        ]
        return [
            {
                "filename": path.rpartition("/")[2],
                "size": len(self.files[path]),
                "content_details": {
                    "sha256_hash": self._checksum(path, "sha256"),
                    "download_url": f"{self.url}/data/{path}",
                },
            }
            for path in inside
        ]

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        at = urlsplit(request.path)
        path = unquote(at.path)
        if self.status:
            request.send_error(self.status)
        elif path.startswith("/data/"):
            self._send_file(request, path.removeprefix("/data/"))
        else:
            self.listings += 1
            if path == "/zenodo":
                body: Any = self._zenodo()
            elif path.startswith("/mendeley/folders/"):
                body = self._folders()
            else:
                body = self._mendeley(parse_qs(at.query)["folder_id"][0])
            data = json.dumps(body).encode()
            request.send_response(200)
            request.send_header("Content-Length", str(len(data)))
            request.end_headers()
            request.wfile.write(data)

    def _send_file(self, request: BaseHTTPRequestHandler, path: str) -> None:
        data = self.files[path]
        self.requests.append(path)
        cuts = self.cut.get(path, [])
        request.send_response(200)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        end = cuts.pop(0) if cuts else len(data)
        request.wfile.write(data[:end])
        request.close_connection = True
