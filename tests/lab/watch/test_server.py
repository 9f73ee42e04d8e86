"""The server of `angular-lab watch`: what it says about runs, and what it refuses."""

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from angular_lab import run_folder
from angular_lab.cli.main import main
from angular_lab.errors import UserError
from angular_lab.inspect.listing import list_runs
from angular_lab.run_folder import RunFolder
from angular_lab.watch.live import LiveRun, LiveRuns
from angular_lab.watch.server import Server, is_allowed, make_server
from tests.lab.report.made import choosing, spec_of, write_run


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "git_state", dict)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for name in ("muon", "angular_muown"):
        write_run(tmp_path / "store" / name, spec_of(name), 3.0)
    return tmp_path / "store"


@pytest.fixture
def server(store: Path) -> Iterator[Server]:
    with make_server([store], port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: Server, path: str, host: str = "localhost", **headers: str) -> tuple[int, bytes]:
    """Ask without the corrections that a browser or a library makes to a path."""
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
    try:
        connection.putrequest("GET", path, skip_host=True, skip_accept_encoding=True)
        for name, value in {"Host": host, **headers}.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def ask(server: Server, path: str) -> Any:
    status, body = get(server, path)
    assert status == 200, body
    return json.loads(body)


def test_the_list_is_that_of_ls(store: Path) -> None:
    """Also after a run has grown, was set back, and was finished."""
    choosing(store / "sweep")
    runs = LiveRuns([store])
    growing = RunFolder(store / "muon")
    for change in (
        lambda: None,
        lambda: growing.append(growing.metrics_path, {"step": 400, "tokens": 1, "val_loss": 1.5}),
        lambda: growing.rewind(200),
        lambda: growing.record_divergence("the loss is nan"),
        lambda: growing.reopen(),
    ):
        change()
        expected = {line.folder: line for line in list_runs(store, [])}
        listed = {run["folder"]: run for run in runs.listing()["runs"]}
        assert listed.keys() == expected.keys()
        assert len({run["id"] for run in listed.values()}) == len(listed)
        keys = ("label", "optimizer", "lr", "seed", "step", "steps", "tokens", "last_loss",
                "best_loss", "state", "reason")  # fmt: skip
        for folder, line in expected.items():
            assert {k: listed[folder][k] for k in keys} == {k: getattr(line, k) for k in keys}
            assert listed[folder]["age"] == pytest.approx(line.age, abs=5)


def test_speed_and_remaining_time(store: Path) -> None:
    run = RunFolder(store / "live")
    run.claim()
    try:
        run.write_spec(spec_of("muon"), {"device": "cpu"})
        for step in range(10, 110, 10):
            run.append(run.metrics_path, {"step": step, "tokens": step, "loss": 3.0})
            line = {"step": step, "seconds": 2.0 * step, "tokens_per_second": 500.0}
            run.append(run.timing_path, line)
        (live,) = (x for x in LiveRuns([store]).listing()["runs"] if x["folder"] == str(run.path))
    finally:
        run.release()
    assert (live["state"], live["loss"], live["tokens_per_second"]) == ("running", 3.0, 500.0)
    assert live["remaining"] == pytest.approx((400 - 100) * 2.0)  # two seconds a step


def test_a_sweep_has_a_title_and_progress(tmp_path: Path) -> None:
    store = choosing(tmp_path / "small")
    for source in (store, store / "runs"):
        (sweep,) = LiveRuns([source]).listing()["sweeps"]
        assert sweep["title"] == "A sweep for a test"
        assert sweep["finished"] == sweep["planned"] == len(sweep["runs"]) > 1
    next((store / "runs").glob("*/DONE")).unlink()
    (after,) = LiveRuns([store]).listing()["sweeps"]
    assert after["finished"] == sweep["finished"] - 1


def test_a_damaged_run_is_reported_and_the_others_shown(server: Server, store: Path) -> None:
    (store / "muon" / "spec.json").write_text("{")
    answer = ask(server, "/api/runs")
    assert [run["optimizer"] for run in answer["runs"]] == ["angular_muown"]
    assert "spec.json cannot be read" in answer["warnings"][0]


def test_a_file_that_goes_away(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(run: LiveRun) -> dict[str, Any]:
        raise FileNotFoundError("STOPPED")

    monkeypatch.setattr(LiveRun, "summary", fail)
    status, body = get(server, "/api/runs")
    assert (status, json.loads(body)) == (500, {"error": "STOPPED"})
    assert capfd.readouterr().err == ""


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    for part in ("a", "b"):
        write_run(tmp_path / part / "muon", spec_of("muon"), 3.0)
    runs = LiveRuns([tmp_path / "a", tmp_path / "b", tmp_path / "a"])
    ids = {run["id"] for run in runs.listing()["runs"]}
    assert ids == {str(tmp_path / part / "muon") for part in ("a", "b")}
    assert all(runs.series(key, "0")["series"]["loss"] for key in ids)


def test_curves_are_sent_once(server: Server, store: Path) -> None:
    path = "/api/metrics?run=muon&after="
    first = ask(server, f"{path}0")  # without a list before: the page was open already
    assert len(first["series"]["loss"][0]) == 40
    assert ask(server, path + first["cursor"])["series"] == {}
    run = RunFolder(store / "muon")
    run.append(run.metrics_path, {"step": 410, "tokens": 1, "loss": 2.5})
    second = ask(server, path + first["cursor"])
    assert second["series"]["loss"] == [[410], [2.5]]
    assert not second["restarted"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/metrics?run=nothing", 400),
        ("/api/metrics", 400),
        ("/api/metrics?run=muon&after=x", 400),
        ("/api/metrics?run=../../etc&after=0", 400),
        ("/api/metrics?self=2", 400),  # a key that Python would take for an argument
        ("/spec.json", 404),
        ("/muon/spec.json", 404),
        ("/../store/muon/spec.json", 404),
        ("/%2e%2e/store/muon/spec.json", 404),
        ("//etc/passwd", 404),
        ("/watch.js/../../live.py", 404),
    ],
)
def test_nothing_else_is_served(server: Server, path: str, status: int) -> None:
    answered, body = get(server, path)
    assert answered == status
    assert b"optim" not in body
    assert b"root:" not in body


def test_unknown_keys_are_ignored(server: Server) -> None:
    assert len(ask(server, "/api/runs?self=2&key=x")["runs"]) == 2
    assert ask(server, "/api/metrics?run=muon&after=0&self=2&key=x")["series"]


def test_only_get(server: Server) -> None:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
    connection.request("POST", "/api/runs", body="{}")
    assert connection.getresponse().status == 501
    connection.close()


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("localhost:9999", True),  # through a tunnel
        ("127.0.0.1:8765", True),
        ("[::1]:8765", True),
        ("192.168.0.7", True),
        ("my-machine:8765", True),
        ("", False),
        ("evil.example", False),
        ("localhost.evil.example:8765", False),
        ("127.0.0.1.evil.example", False),
    ],
)
def test_the_host_of_a_request(host: str, allowed: bool) -> None:
    """The name of another site may resolve to this machine."""
    assert is_allowed(host, "my-machine") == allowed


def test_all_addresses_of_the_machine(store: Path) -> None:
    with make_server([store], host="0.0.0.0", port=0) as server:
        assert urlsplit(server.url).hostname == socket.gethostname().lower()


def test_another_site_reads_nothing(server: Server) -> None:
    for path in ("/", "/api/runs", "/api/metrics?run=muon"):
        status, body = get(server, path, host="evil.example")
        assert status == 403
        assert b"muon" not in body


def test_pages_are_complete_and_compressed(server: Server) -> None:
    page = get(server, "/")[1].decode()
    for name in ("watch.js", "chart.js", "watch.css", "chart.css", "colors.css"):
        assert name in page
        assert get(server, f"/{name}")[0] == 200
    assert b"--c0:" in get(server, "/colors.css")[1]
    compressed = get(server, "/chart.js", **{"Accept-Encoding": "gzip"})[1]
    assert len(compressed) < 0.5 * len(get(server, "/chart.js")[1])


def test_bad_arguments(
    server: Server, store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    port = server.server_address[1]
    for arguments, message in (
        ([str(store), "--port", str(port)], f"--port {port}: cannot listen on 127.0.0.1"),
        ([str(store), "--port", "70000"], "--port 70000: it must be between 0 and 65535"),
        ([str(store), "--port", "0", "--host", "no.such.host.invalid"], "--host no.such.host"),
        ([str(tmp_path / "nothing")], "nothing is not a folder"),
    ):
        assert main(["watch", *arguments]) == 2
        assert message in capfd.readouterr().err


def test_a_folder_without_runs_is_watched(tmp_path: Path) -> None:
    runs = LiveRuns([tmp_path])
    assert runs.listing()["runs"] == []
    write_run(tmp_path / "muon", spec_of("muon"), 3.0)
    assert len(runs.listing()["runs"]) == 1
    with pytest.raises(UserError, match="there is no such run"):
        runs.series("adamw", "0")


def test_the_command_without_torch(store: Path) -> None:
    """It prints the address, answers, and ends with 0 at Ctrl-C."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from angular_lab.cli.main import main\n"
        f"sys.exit(main(['watch', {str(store)!r}, '--port', '0']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            url = urlsplit(line.split()[0])
            assert str(store) in line
            connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=30)
            connection.request("GET", "/api/runs")
            assert len(json.load(connection.getresponse())["runs"]) == 2
            connection.close()
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
