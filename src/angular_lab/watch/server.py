"""The server of the page: its own files and two answers in JSON, for this machine only."""

import gzip
import json
import re
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from angular_lab.errors import UserError
from angular_lab.watch.live import LiveRuns

KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
EVERYWHERE = ("0.0.0.0", "::")  # all addresses of the machine
LARGE = 2000  # bytes: a larger answer is compressed, for pages that are seen through a tunnel
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    # Charts set colours in style attributes.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "img-src data:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
}


def page_files() -> dict[str, bytes]:
    """Return the files of the page by their address: all that the server ever sends of the disk."""
    own, shared = files("angular_lab.watch") / "assets", files("angular_lab.report") / "assets"
    return {
        "/": (own / "index.html").read_bytes(),
        "/watch.js": (own / "watch.js").read_bytes(),
        "/watch.css": (own / "watch.css").read_bytes(),
        "/chart.js": (shared / "chart.js").read_bytes(),
        "/chart.css": (shared / "chart.css").read_bytes(),
        "/colors.css": _colors((shared / "style.css").read_text()).encode(),
    }


def _colors(style: str) -> str:
    """Return the variables of the reports' style: both pages have the same colours."""
    found = re.search(r":root \{.*?^\}", style, re.DOTALL | re.MULTILINE)
    assert found is not None, "style.css begins with the page's colours"
    return found[0]


def is_allowed(host: str, own: str) -> bool:
    """True if a Host header names this machine by an address, as localhost or as `--host` does.

    A web page elsewhere could let its own name resolve to 127.0.0.1 and then read the answers.
    """
    name = urlsplit(f"//{host}").hostname or ""
    if name in ("localhost", own.lower()):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds that an idle connection stays open

    def __init__(self, runs: LiveRuns, own: str, sent: dict[str, bytes], *arguments: Any) -> None:
        self.runs, self.own, self.sent = runs, own, sent
        super().__init__(*arguments)

    def do_GET(self) -> None:
        if not is_allowed(self.headers.get("Host", ""), self.own):
            text = "open this page as http://localhost or by the address of the machine"
            return self._send(HTTPStatus.FORBIDDEN, text.encode(), "text/plain")
        url = urlsplit(self.path)
        if url.path in self.sent:
            kind = KINDS[Path(url.path).suffix or ".html"]
            return self._send(HTTPStatus.OK, self.sent[url.path], kind)
        answers: dict[str, Callable[[dict[str, str]], Any]] = {
            "/api/runs": lambda _: self.runs.listing(),
            "/api/metrics": lambda query: self.runs.series(
                query.get("run", ""), query.get("after", "")
            ),
        }
        if url.path not in answers:
            return self._send(HTTPStatus.NOT_FOUND, b"not found", "text/plain")
        try:
            status, content = HTTPStatus.OK, answers[url.path](_query(url.query))
        except UserError as error:
            status, content = HTTPStatus.BAD_REQUEST, {"error": str(error)}
        except OSError as error:  # a file went away while it was read; the page asks again
            status, content = HTTPStatus.INTERNAL_SERVER_ERROR, {"error": str(error)}
        self._send(status, json.dumps(content, allow_nan=False).encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        compressed = len(body) > LARGE and "gzip" in self.headers.get("Accept-Encoding", "")
        body = gzip.compress(body, compresslevel=1) if compressed else body
        self.send_response(status)
        encoding = {"Content-Encoding": "gzip"} if compressed else {}
        length = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in {**HEADERS, **length, **encoding}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent: a line every two seconds would bury what matters."""


def _query(text: str) -> dict[str, str]:
    return {key: values[-1] for key, values in parse_qs(text).items()}


class Server(ThreadingHTTPServer):
    daemon_threads = True  # an open tab does not keep the process alive

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore tabs that were closed in the middle of an answer."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        name = "localhost" if host in ("127.0.0.1", "::1") else str(host)
        name = socket.gethostname() if host in EVERYWHERE else name
        return f"http://{f'[{name}]' if ':' in name else name}:{port}/"


def make_server(folders: Sequence[Path], host: str = "127.0.0.1", port: int = 8765) -> Server:
    """Return a server that listens. Port 0 is any free one."""
    if not 0 <= port <= 65535:
        raise UserError(f"--port {port}: it must be between 0 and 65535")
    runs = LiveRuns(folders)
    try:
        own = socket.gethostname() if host in EVERYWHERE else host
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        kind = type("Server", (Server,), {"address_family": family})
        return kind((host, port), partial(Handler, runs, own, page_files()))
    except socket.gaierror:
        raise UserError(f"--host {host}: there is no such address") from None
    except OSError as error:
        raise UserError(
            f"--port {port}: cannot listen on {host} ({error.strerror}); choose another port, for "
            f"example --port {min(port + 1, 65535)}, or --port 0 for any that is free"
        ) from None
