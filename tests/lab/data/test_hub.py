"""Look-ups on a hub that cannot be reached."""

import socket
import time

import pytest

from angular_lab.data import hub
from angular_lab.data.corpus import hf_documents
from angular_lab.data.tokenizer import load_tokenizer

RETRIES = 6  # seconds; huggingface_hub alone waits 1 + 2 + 4 + 8 + 8 between its attempts


@pytest.fixture
def closed_port(monkeypatch) -> None:
    """A hub whose port refuses connections."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("closed_port")
def test_look_ups_offline_fail_at_once() -> None:
    constants = pytest.importorskip("huggingface_hub").constants
    before = constants.HF_HUB_OFFLINE
    pytest.importorskip("datasets")
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"tokenizer 'owner/name' .* this machine is offline"):
        load_tokenizer("owner/name")
    with pytest.raises(
        ValueError, match=r"the dataset owner/name, split 'train', cannot be opened"
    ):
        next(hf_documents("owner/name"))
    assert time.monotonic() - began < RETRIES
    assert constants.HF_HUB_OFFLINE == before, "a later look-up asks again"


@pytest.mark.usefixtures("closed_port")
def test_a_hub_is_reachable_by_its_port_or_through_a_proxy(monkeypatch) -> None:
    assert not hub.is_reachable()
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert hub.is_reachable(), "the proxy decides"
    monkeypatch.delenv("http_proxy")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert hub.is_reachable()
