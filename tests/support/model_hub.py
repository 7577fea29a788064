"""A stand-in for one model repository of the hub, on the loopback, to which huggingface_hub uploads, and from which it
reads."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

REPO = "acme/moe-nvfp4-csf"
COMMIT = "c" * 40


class ModelHub:
    """One model repository. It answers the requests of huggingface_hub for uploading a folder and reading headers by
    range."""

    def __init__(self, repo_id: str = REPO) -> None:
        self.repo_id = repo_id
        self.files: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.sent = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> ModelHub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: ModelHub

    def log_message(self, *_: object) -> None:
        """Keep the tests' output clean."""

    def do_HEAD(self) -> None:
        self._get(body=False)

    def do_GET(self) -> None:
        self._get(body=True)

    def _get(self, *, body: bool) -> None:
        path, repo = unquote(urlsplit(self.path).path).strip("/"), self.hub.repo_id
        if match := re.fullmatch(rf"{repo}/resolve/[^/]+/(.+)", path):
            self._file(match[1], body)
        elif re.fullmatch(rf"api/models/{repo}(/revision/[^/]+)?", path):
            siblings = [{"rfilename": name} for name in sorted(self.hub.files)]
            self._json({"id": repo, "sha": COMMIT, "siblings": siblings})
        else:
            self._refuse("RepoNotFound")

    def _file(self, name: str, body: bool) -> None:
        if name not in self.hub.files:
            return self._refuse("EntryNotFound")
        content, status = self.hub.files[name], 200
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if match := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            begin, end = int(match[1]), min(int(match[2]) + 1, len(content))
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
            content, status = content[begin:end], 206
        self.hub.sent += len(content) * body
        self._send(status, content, headers, body)

    def do_POST(self) -> None:
        path, repo = unquote(urlsplit(self.path).path).strip("/"), self.hub.repo_id
        data = self._body()
        if path == "api/repos/create":
            self._json({"url": f"{self.hub.url}/{repo}", "name": repo, "id": repo})
        elif path == "api/validate-yaml":  # of the model card
            self._json({"errors": [], "warnings": []})
        elif path == f"api/models/{repo}/preupload/main":
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(data)["files"]
            ]
            self._json({"files": modes})
        elif path == f"{repo}.git/info/lfs/objects/batch":
            objects = [
                item | {"actions": {"upload": {"href": f"{self.hub.url}/blobs/{item['oid']}"}}}
                for item in json.loads(data)["objects"]
            ]
            self._json({"transfer": "basic", "objects": objects})
        elif path == f"api/models/{repo}/commit/main":
            for line in data.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    self.hub.files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    self.hub.files[value["path"]] = self.hub.blobs[value["oid"]]
            self._json({"commitUrl": f"{self.hub.url}/{repo}/commit/{COMMIT}", "commitOid": COMMIT})
        else:
            self._refuse("RepoNotFound")

    def do_PUT(self) -> None:
        self.hub.blobs[self.path.rsplit("/", 1)[-1]] = self._body()
        self._send(200, b"", {}, True)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _json(self, document: object) -> None:
        self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"}, True)

    def _refuse(self, code: str) -> None:
        self._send(404, b"", {"X-Error-Code": code, "X-Error-Message": code}, False)

    def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)
