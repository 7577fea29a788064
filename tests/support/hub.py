"""A stand-in for the kernels hub, on the loopback, for the real ``kernels.get_kernel``.

It answers the requests that kernels and huggingface_hub make to load one version of a kernel, with the headers that
they check: commit, ETag, length, and the error codes that distinguish an absent file from an absent repository.
"""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


def _git_object(kind: str, content: bytes) -> str:
    return hashlib.sha1(f"{kind} {len(content)}\0".encode() + content).hexdigest()


class Repository:
    """The files of one kernel repository, with one commit that its branches ``main`` and ``v<version>`` point to."""

    def __init__(self, root: Path, version: int = 1) -> None:
        """Take every file under ``root``, as ``build/torch-cpu/__init__.py``, except bytecode."""
        paths = sorted(path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        self.files = {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}
        self.oids = {path: _git_object("blob", content) for path, content in self.files.items()}
        self.commit = _git_object("commit", json.dumps(self.oids).encode())
        self.branches = ("main", f"v{version}")

    def tree(self, directory: str, recursive: bool) -> list[dict]:
        """What is in ``directory`` (``""`` is the top), and below it if ``recursive``."""
        prefix = f"{directory}/" if directory else ""
        entries = {}
        for path, content in self.files.items():
            if not path.startswith(prefix):
                continue
            parts = path.removeprefix(prefix).split("/")
            for depth in range(1, len(parts) if recursive else min(2, len(parts))):
                folder = prefix + "/".join(parts[:depth])
                entries[folder] = {"type": "directory", "path": folder, "oid": _git_object("tree", folder.encode())}
            if recursive or len(parts) == 1:
                entries[path] = {"type": "file", "path": path, "oid": self.oids[path], "size": len(content)}
        return list(entries.values())


class Hub:
    """Serves repositories by id, as a context manager; ``requests`` lists the requested paths."""

    def __init__(self, repositories: dict[str, Repository], *, trusted: bool = True) -> None:
        self.repositories = repositories
        self.trusted = trusted
        self.requests: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Hub:
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        """Keep the tests' output clean: ``Hub.requests`` has the paths."""

    def _answer(self, *, body: bool) -> None:
        url = urlsplit(self.path)
        self.hub.requests.append(url.path)
        match unquote(url.path).strip("/").split("/"):
            case ["api", "organizations", name, "overview"]:
                overview = {"name": name, "fullname": name, "avatarUrl": "", "trustedKernelPublisher": self.hub.trusted}
                self._json(overview, body)
            case ["api", "kernels", owner, name, what, *rest] if repo := self.hub.repositories.get(f"{owner}/{name}"):
                self._describe(repo, f"{owner}/{name}", what, rest, "recursive=true" in url.query.lower(), body)
            case ["kernels", owner, name, "resolve", revision, *rest] if repo := self.hub.repositories.get(
                f"{owner}/{name}"
            ):
                path = "/".join(rest)
                if revision not in (repo.commit, *repo.branches):
                    self._error("RevisionNotFound")
                elif path not in repo.files:
                    self._error("EntryNotFound")
                else:
                    headers = {"ETag": f'"{repo.oids[path]}"', "X-Repo-Commit": repo.commit}
                    self._send(200, repo.files[path], "application/octet-stream", headers, body)
            case _:
                self._error("RepoNotFound")

    def _describe(self, repo: Repository, name: str, what: str, rest: list[str], recursive: bool, body: bool) -> None:
        if what == "refs":
            branches = [
                {"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": repo.commit} for branch in repo.branches
            ]
            self._json({"branches": branches, "tags": [], "converts": []}, body)
        elif not rest or rest[0] not in (repo.commit, *repo.branches):
            self._error("RevisionNotFound")
        elif what == "revision":
            self._json({"id": name, "sha": repo.commit, "siblings": [{"rfilename": path} for path in repo.files]}, body)
        else:
            self._json(repo.tree("/".join(rest[1:]), recursive), body)

    def _json(self, value: object, body: bool) -> None:
        self._send(200, json.dumps(value).encode(), "application/json", {}, body)

    def _error(self, code: str) -> None:
        self._send(404, b"", "text/plain", {"X-Error-Code": code, "X-Error-Message": code}, body=False)

    def _send(self, status: int, content: bytes, kind: str, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)
