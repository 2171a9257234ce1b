"""A Hugging Face hub on this machine, as much of it as reading and committing need."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub(ThreadingHTTPServer):
    """Repositories by name: their commits, each the whole content by path."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.commits: dict[str, list[dict[str, bytes]]] = {}
        self.tokens: set[str | None] = set()
        self.failing = 0
        """So many commits are refused from now on."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def files(self, repo: str) -> dict[str, bytes]:
        return self.commits[repo][-1]


@contextmanager
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def sha(number: int) -> str:
    return f"{number:040x}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, value: Any, code: int = 200, **headers: str) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(code)
        for name, text in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def missing(self, what: str) -> None:
        self.answer({"error": what}, 404, X_Error_Code=what)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if found := re.fullmatch(
            r"/api/(?:models|datasets)/([\w.-]+/[\w.-]+)(?:/(revision|tree)/([\w.-]+))?.*", path
        ):
            return self.about(found[1], tree=found[2] == "tree")
        if found := re.fullmatch(r"/(?:datasets/)?([\w.-]+/[\w.-]+)/resolve/([\w.-]+)/(.+)", path):
            return self.file(found[1], found[3])
        return self.missing("EntryNotFound")

    do_HEAD = do_GET

    def about(self, repo: str, *, tree: bool) -> None:
        self.server.tokens.add(self.headers.get("Authorization"))
        if not self.server.commits.get(repo):
            return self.missing("RepoNotFound")
        files = self.server.files(repo)
        if tree:
            return self.answer([
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ])  # fmt: skip
        siblings = [
            {"rfilename": name, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
            for name, data in files.items()
        ]
        return self.answer({"id": repo, "sha": sha(len(self.server.commits[repo])), "siblings": siblings})

    def file(self, repo: str, name: str) -> None:
        self.server.tokens.add(self.headers.get("Authorization"))
        if not self.server.commits.get(repo):
            return self.missing("RepoNotFound")
        data = self.server.files(repo).get(name)
        if data is None:
            return self.missing("EntryNotFound")
        commit = sha(len(self.server.commits[repo]))
        return self.answer(data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=commit)

    def do_POST(self) -> None:
        self.server.tokens.add(self.headers.get("Authorization"))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.server.commits.setdefault(repo, [])
            return self.answer({"url": f"{self.server.url}/{repo}", "id": repo})
        found = re.fullmatch(
            r"/api/(?:models|datasets)/([\w.-]+/[\w.-]+)/(preupload|commit)/([\w.-]+)", self.path
        )
        if found is None:
            return self.missing("EntryNotFound")
        if found[2] == "preupload":
            files = json.loads(body)["files"]
            return self.answer({"files": [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None} for f in files
            ]})  # fmt: skip
        if self.server.failing:
            self.server.failing -= 1
            return self.answer({"error": "out of order"}, 500)
        return self.commit(found[1], [json.loads(line) for line in body.splitlines()])

    def commit(self, repo: str, lines: list[Any]) -> None:
        commits = self.server.commits[repo]
        files = dict(commits[-1]) if commits else {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"].startswith("deleted"):
                folder = value["path"].rstrip("/")
                files = {n: d for n, d in files.items() if n != folder and not n.startswith(f"{folder}/")}
        commits.append(files)
        oid = sha(len(commits))
        self.answer(
            {"success": True, "commitUrl": f"{self.server.url}/{repo}/commit/{oid}", "commitOid": oid}
        )
