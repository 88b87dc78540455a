"""A stand-in for the Hugging Face hub: the few answers that its real clients ask for to stream one data set."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(name: str, files: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve data set ``name`` at one commit, with branch main and tag v1. Gives the address and the paths asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self._answer()

        def do_HEAD(self):
            self._answer()

        def do_POST(self):
            wanted = self.rfile.read(int(self.headers["Content-Length"])).decode()
            self._answer(wanted)

        def _answer(self, posted=""):
            path = unquote(urlsplit(self.path).path)
            asked.append(path)
            api, resolve = f"/api/datasets/{name}", f"/datasets/{name}/resolve/"
            if path.startswith(resolve):
                revision, _, file = path.removeprefix(resolve).partition("/")
                if file in files and revision in (COMMIT, "main", "v1"):
                    return self._send(200, files[file], file)
                return self._fail("EntryNotFound")
            if path != api and not path.startswith(api + "/"):
                return self._fail("RepoNotFound")
            kind, _, rest = path.removeprefix(api).strip("/").partition("/")
            revision, _, folder = rest.partition("/")
            if revision not in ("", COMMIT, "main", "v1"):
                return self._fail("RevisionNotFound")
            found = [
                {"type": "file", "path": file, "size": len(data), "oid": f"{len(data):040x}"}
                for file, data in files.items()
                if (f'"{file}"' in posted if kind == "paths-info" else file.startswith(folder))
            ]
            if kind in ("tree", "paths-info"):
                return self._send(200, json.dumps(found).encode())
            siblings = [{"rfilename": file} for file in files]
            return self._send(200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode())

        def _fail(self, code):
            self._send(404, b"{}", error=code)

        def _send(self, status, data, file="", error=""):
            asked_range = self.headers.get("Range")
            total = len(data)
            if file and asked_range:
                first, _, last = asked_range.removeprefix("bytes=").partition("-")
                start, stop = int(first), int(last or total - 1) + 1
                status, data = 206, data[start:stop]
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if file and asked_range:
                self.send_header("Content-Range", f"bytes {start}-{start + len(data) - 1}/{total}")
            if file:
                self.send_header("ETag", f'"{total:040x}"')
                self.send_header("Accept-Ranges", "bytes")
            self.send_header("X-Repo-Commit", COMMIT)
            if error:
                self.send_header("X-Error-Code", error)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
