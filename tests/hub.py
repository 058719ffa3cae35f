"""A hub on the loopback address: it answers the hub's protocol with real files, and fails as hubs and networks do."""

import hashlib
import json
import re
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias

APART = (".safetensors", ".gguf")  # behind a redirect to another host, as files in LFS are
PLACE = re.compile(r"/(api/)?(models/|datasets/)?([^/]+/[^/?]+)(?:/(?:revision|(tree)|resolve)/([^/?]+)/?([^?]*))?")
Said: TypeAlias = tuple[int, dict[str, Any], bytes]


def tag(content: str | bytes) -> str:
    return hashlib.sha1(content if isinstance(content, bytes) else content.encode()).hexdigest()


class Hub(ThreadingHTTPServer):
    """Folders by repository and revision, what has been asked for, and what goes wrong."""

    breaks, slow = 0, 0.0  # transfers that are to end early; seconds to any answer

    def __init__(self, repositories: dict[str, dict[str, Path]]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.repositories, self.asked = repositories, list[str]()
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    """One connection."""

    server: Any
    protocol_version = "HTTP/1.1"
    log_message: Any = lambda *_: None

    def do_GET(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        time.sleep(self.server.slow)
        apart = self.path.startswith("/blob/")
        place: Any = PLACE.match(self.path)
        status, headers, content = self.file(Path(self.path[5:]), {}) if apart else self.said(*place.groups())
        self.send_response(status)
        for key, value in ({"Content-Length": len(content)} | headers).items():
            self.send_header(key, str(value))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else content)

    do_HEAD = do_GET

    def said(self, api: str, kind: str, name: str, tree: str, asked: str, file: str) -> Said:
        folders = self.server.repositories.get(f"{kind or 'models/'}{name}")
        if folders is None:
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        known = next((one for one in folders if (asked or "main") in (one, tag(name + one))), None)
        if known is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        commit, files = tag(name + known), {path.name: path for path in sorted(folders[known].iterdir())}
        if api and not file:
            told = {one: {"type": "file", "size": path.stat().st_size, "oid": ""} for one, path in files.items()}
            entries = [about | {"path": one, "rfilename": one} for one, about in told.items()]
            return 200, {}, json.dumps(entries if tree else {"id": name, "sha": commit, "siblings": entries}).encode()
        if api or file not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
        if name.endswith("gated"):
            return 401, {"X-Error-Code": "GatedRepo"}, b""
        path, about = files[file], {"X-Repo-Commit": commit, "ETag": '"of-the-pointer"'}
        etag = f'"{tag(path.read_bytes())}"'
        if path.suffix not in APART:
            return self.file(path, about | {"ETag": etag})
        about |= {"X-Linked-Size": path.stat().st_size, "X-Linked-ETag": etag}
        return 302, about | {"Location": self.server.endpoint.replace("127.0.0.1", "localhost") + f"/blob{path}"}, b""

    def file(self, path: Path, about: dict[str, Any]) -> Said:
        """A file, or its end from a byte on; a transfer that breaks gives half of the file, and nothing of such an end."""
        content, given = path.read_bytes(), re.match(r"bytes=(\d+)-$", self.headers.get("Range") or "")
        first, whole = int(given[1]) if given else 0, len(content)
        if self.command == "GET" and self.server.breaks and path.suffix in APART:
            self.server.breaks -= 1
            self.close_connection, content = True, content[: first or whole // 2]
        about |= {"Content-Length": whole - first, "Content-Range": f"bytes {first}-{whole - 1}/{whole}"}
        return 206 if given else 200, about, content[first:]
