"""The Hugging Face hub: look-ups that fail at once where it cannot be reached.

Without this, huggingface_hub retries for half a minute before it reports that a machine is offline.
"""

import importlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

ENDPOINT = "https://huggingface.co"  # HF_ENDPOINT replaces it
PATIENCE = 5.0  # seconds to connect
PORTS = {"https": 443, "http": 80}
# modules that read the setting once, when they are imported
MODULES = ("huggingface_hub.constants", "datasets.config")


def is_reachable() -> bool:
    """True if a connection to the hub can be opened, or a proxy decides about that."""
    url = urlsplit(os.environ.get("HF_ENDPOINT") or ENDPOINT)
    if getproxies().get(url.scheme):
        return True
    try:
        port = url.port or PORTS.get(url.scheme, 443)
        socket.create_connection((url.hostname or "", port), PATIENCE).close()
    except OSError:
        return False
    return True


@contextmanager
def look_up() -> Iterator[None]:
    """Use only the local cache inside a `with` block if the hub cannot be reached."""
    modules = [] if is_reachable() else list(filter(None, map(_imported, MODULES)))
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:  # not installed: nothing will ask it
        return None
