"""A small Hub on loopback: enough of the real protocol for the unchanged client to download.

    with Hub() as hub:
        commit = hub.add("org/model", folder)
        ... # with the client's endpoint set to hub.url

It answers what the real one answers for missing, private and gated repos, wrong revisions and
tokens, redirects weights to another path as the real one redirects to its storage, and serves
ranges, so interrupted downloads go on. `requests` records method and path of all
that was asked.
"""

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".gguf", ".bin")  # stored apart from the repo, as LFS does


@dataclass
class Repo:
    """A repo: its commits (hash -> path -> bytes), and names for them."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    gated: bool = False  # readers: only `Hub.members`
    private: bool = False  # invisible to all but `Hub.members`


class Hub:
    """The server. `members` are the tokens that may read everything; `users` exist, no more."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.members = {"hf_member"}
        self.users = {"hf_user"}
        self.requests: list[str] = []
        self.broken = 0  # if not 0, every answer has this HTTP status
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def storage_url(self) -> str:
        """Another host name, as the real Hub's storage has: the client sends no token there."""
        return f"http://localhost:{self._server.server_port}"

    def add(
        self,
        name: str,
        content: Path | Mapping[str, bytes],
        *,
        branch: str = "main",
        gated: bool = False,
        private: bool = False,
    ) -> str:
        """Commit a folder or a {path: bytes} to a branch; return the commit's hash."""
        if isinstance(content, Path):
            files = (p for p in content.rglob("*") if p.is_file())
            content = {p.relative_to(content).as_posix(): p.read_bytes() for p in files}
        digest = hashlib.sha1(name.encode())
        for path, data in sorted(content.items()):
            digest.update(path.encode() + b"\0" + data)
        repo = self.repos.setdefault(name, Repo())
        repo.gated, repo.private = gated, private
        repo.commits[digest.hexdigest()] = dict(content)
        repo.names[branch] = digest.hexdigest()
        return digest.hexdigest()

    def sent(self, ending: str) -> bool:
        """Tell whether the content of any file with this ending was asked for."""
        return any(r.startswith("GET ") and r.endswith(ending) for r in self.requests)

    def __enter__(self) -> "Hub":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _HttpError(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        try:
            self._route(path)
        except _HttpError as error:
            extra = {"X-Error-Code": error.code, "X-Error-Message": error.message}
            self._send(error.status, b"", {k: v for k, v in extra.items() if v})
        except (BrokenPipeError, ConnectionResetError):  # the client went away, as it may
            self.close_connection = True

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _route(self, path: str) -> None:
        if self.hub.broken:
            raise _HttpError(self.hub.broken)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            repo, commit = self._find(found[1], found[2] or "main")
            siblings = [{"rfilename": p} for p in sorted(repo.commits[commit])]
            about = {"id": found[1], "sha": commit, "siblings": siblings, "private": repo.private}
            self._send_json(about | {"gated": "manual" if repo.gated else False, "tags": []})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            repo, commit = self._find(found[1], found[2])
            self._send_json([_entry(p, d) for p, d in sorted(repo.commits[commit].items())])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repo, commit = self._find(found[1], found[2], reading=True)
            self._send_file(repo, commit, found[1], found[3])
        elif found := re.fullmatch(r"/storage/([^/]+/[^/]+)/([^/]+)/(.+)", path):
            if "Authorization" in self.headers:
                raise _HttpError(400, message="a token travelled to the storage")
            self._send_bytes(self.hub.repos[found[1]].commits[found[2]][found[3]], {})
        else:
            raise _HttpError(404)

    def _find(self, name: str, revision: str, reading: bool = False) -> tuple[Repo, str]:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.members | self.hub.users:
            raise _HttpError(401, message="Invalid credentials in Authorization header")
        member = token in self.hub.members
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and not member):
            raise _HttpError(404 if token else 401, "RepoNotFound", "Repository not found")
        if repo.gated and reading and not member:  # what the repo holds may be seen by anybody
            raise _HttpError(403 if token else 401, "GatedRepo", "Access is restricted")
        commit = repo.names.get(revision, revision)
        if commit not in repo.commits:
            raise _HttpError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo, commit

    def _send_file(self, repo: Repo, commit: str, name: str, path: str) -> None:
        if path not in repo.commits[commit]:
            raise _HttpError(404, "EntryNotFound", "Entry not found")
        data = repo.commits[commit][path]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_git_oid(data)}"'}
        if path.endswith(LARGE):
            digest = hashlib.sha256(data).hexdigest()
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
            headers["Location"] = f"{self.hub.storage_url}/storage/{name}/{commit}/{path}"
            self._send(302, b"", headers)
        else:
            self._send_bytes(data, headers)

    def _send_bytes(self, data: bytes, headers: dict[str, str]) -> None:
        headers = headers | {"Accept-Ranges": "bytes"}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(asked[1]), int(asked[2] or len(data) - 1) + 1
            if start >= len(data):
                raise _HttpError(416)
            headers["Content-Range"] = f"bytes {start}-{min(stop, len(data)) - 1}/{len(data)}"
            self._send(206, data[start:stop], headers)
        else:
            self._send(200, data, headers)

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(path: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": path, "size": len(data)}
    entry["oid"] = _git_oid(data)
    if path.endswith(LARGE):
        digest = hashlib.sha256(data).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 130}
    return entry
