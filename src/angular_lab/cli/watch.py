"""The command that follows running experiments: watch."""

import argparse
import logging
import webbrowser
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path

HOST, PORT = "127.0.0.1", 8765
log = logging.getLogger(__name__)


def watch(arguments: argparse.Namespace) -> None:
    """Serve the page until Ctrl-C."""
    from angular_lab.watch.server import make_server

    folders = arguments.folders or [Path()]
    with make_server(folders, arguments.host, arguments.port) as server:
        if not _is_loopback(str(server.server_address[0])):
            log.warning(
                "warning: --host %s: everyone who reaches this machine can read the losses and "
                "settings of these runs",
                arguments.host,
            )
        listed = ", ".join(str(folder.resolve()) for folder in folders)
        print(f"{server.url} shows the runs below {listed}; Ctrl-C ends it", flush=True)
        if arguments.open:
            webbrowser.open(server.url)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print()


def _is_loopback(host: str) -> bool:
    return ip_address(host).is_loopback


def add_watch(add: Callable[..., argparse.ArgumentParser]) -> None:
    sub = add("watch", watch, "serve a local page that follows running experiments")
    sub.add_argument("folders", type=Path, nargs="*", metavar="folder", help="with runs at any "
                     "depth; default: the working directory")  # fmt: skip
    sub.add_argument("--port", type=int, default=PORT, help=f"default: {PORT}; 0: any free one")
    sub.add_argument("--host", default=HOST, help=f"address to listen on; default: {HOST}, which "
                     "only this machine reaches")  # fmt: skip
    sub.add_argument("--open", action="store_true", help="open the page in a browser")
