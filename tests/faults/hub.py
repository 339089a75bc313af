"""A Hugging Face hub on this machine with one dataset, which breaks off downloads when it is asked to."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

COMMIT = "0" * 39 + "1"


class Hub:
    """Serves the files of one dataset. `broken` is the probability that a download of data breaks off."""

    def __init__(self, dataset: str, files: dict[str, bytes], random: Random) -> None:
        self.dataset, self.files, self.random = dataset, files, random
        self.broken, self.broke = False, 0
        self.url = ""

    def entry(self, name: str) -> dict[str, Any]:
        return {"type": "file", "path": name, "oid": etag(self.files[name]), "size": len(self.files[name])}


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *given: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if "/paths-info/" in self.path:
                wanted = re.findall(r"[\w./-]+", body.decode())
                return self._json([hub.entry(name) for name in hub.files if name in wanted])
            return self._json({}, 404)

        def do_GET(self) -> None:
            path = self.path.partition("?")[0].replace("%2F", "/")
            if found := re.fullmatch(rf"/datasets/{hub.dataset}/resolve/[^/]+/(.*)", path):
                return self._file(found[1])
            if found := re.fullmatch(rf"/api/datasets/{hub.dataset}/tree/[^/]+(/.*)?", path):
                below = (found[1] or "").strip("/")
                return self._json([hub.entry(name) for name in hub.files if name.startswith(below)])
            if re.fullmatch(rf"/api/datasets/{hub.dataset}(/revision/[^/]+)?", path):
                siblings = [{"rfilename": name} for name in hub.files]
                about = {"id": hub.dataset, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
                return self._json(about)
            return self._json({}, 404)

        def _json(self, value: Any, code: int = 200) -> None:
            self._send(json.dumps(value).encode(), code, {"Content-Type": "application/json"})

        def _file(self, name: str) -> None:
            if name not in hub.files:
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            content, code = hub.files[name], 200
            facts = {"ETag": f'"{etag(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                first, last = int(span[1]), int(span[2] or len(content) - 1)
                facts["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
                content, code = content[first : last + 1], 206
            self._send(content, code, facts, hub.broken and name.endswith(".parquet"))

        def _send(self, content: bytes, code: int, headers: dict[str, str], broken: bool = False) -> None:
            self.send_response(code)
            for name, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if broken:
                hub.broke += 1
                self.wfile.write(content[: hub.random.randrange(len(content))])
                self.close_connection = True
                return
            self.wfile.write(content)

    return Handler


@contextmanager
def serve(dataset: str, folder: Path, random: Random) -> Iterator[Hub]:
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    hub = Hub(dataset, files, random)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
