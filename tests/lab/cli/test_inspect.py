"""ls, compare, show of a run and doctor, on real runs; numbers recomputed from metrics.jsonl."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from angular_lab.cli.main import main
from angular_lab.config.spec import OptimSpec
from angular_lab.inspect import doctor as examination
from angular_lab.inspect.comparison import losses_at_equal_tokens, tokens_to_equal_loss
from angular_lab.inspect.listing import age, find_run, is_locked
from angular_lab.run_folder import RunFolder
from angular_lab.training.start import branch_spec, fingerprint, train
from tests.lab.runs import stopped_copy, tiny


@pytest.fixture(scope="module")
def store(data, tmp_path_factory) -> Path:
    """Three finished runs: two that differ in the optimizer, and one with another batch."""
    folder = tmp_path_factory.mktemp("inspect") / "runs"
    muon = OptimSpec(name="muon", lr=0.01)
    for name, changes in {
        "own": {},
        "muon": {"optim": muon},
        "wide": {"batch": 6, "seed": 1, "optim": muon, "eval_every": 3},
    }.items():
        spec = tiny(data, **changes)
        out = folder / spec.folder_name(fingerprint(data))
        train(spec, out, device="cpu")
        (folder / name).symlink_to(out.name)
    return folder


@pytest.fixture
def runs(store, tmp_path, monkeypatch) -> Path:
    """A copy to damage, in the working directory."""
    shutil.copytree(store, tmp_path / "runs", symlinks=True)
    monkeypatch.chdir(tmp_path)
    return Path("runs")


def own(runs: Path, name: str = "own") -> Path:
    return runs / os.readlink(runs / name)


def evaluations(folder: Path) -> list[tuple[int, float]]:
    """Read tokens and validation losses without the lab."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["tokens"], line["val_loss"]) for line in lines if "val_loss" in line]


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch) -> None:
    """Fix the width, which comes from the environment: xdist's workers have 80 columns."""
    monkeypatch.setenv("COLUMNS", "100")


def printed(capsys, *command: str | Path, code: int = 0) -> str:
    assert main([*map(str, command)]) == code
    return capsys.readouterr().out


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


# -- ls and --version ----------------------------------------------------------------------------


def test_ls_prints_a_line_for_every_run(runs, capsys) -> None:
    folder = own(runs)
    os.utime(folder / "metrics.jsonl", (time.time() + 60,) * 2)  # the last to write
    head, *lines = printed(capsys, "ls").splitlines()
    assert head.split() == [
        "run", "label", "optimizer", "lr", "seed", "steps", "tokens", "last", "best", "state", "age"
    ]  # fmt: skip
    assert len(lines) == 3, "a link is not another run"
    curve = evaluations(folder)
    last, best = f"{curve[-1][1]:.4f}", f"{min(x for _, x in curve):.4f}"
    digest = folder.name[-8:]
    assert lines[-1].split() == [
        digest, "nano", "angular_muown", "0.02", "0", "12/12", "1.54k", last, best, "finished", "0s"
    ]  # fmt: skip


def test_ls_as_json_has_the_full_values(runs, capsys) -> None:
    lines = {line["id"]: line for line in json.loads(printed(capsys, "ls", "--json"))}
    folder = own(runs, "wide")
    line = lines[folder.name[-8:]]
    assert line["folder"] == str(folder)
    assert (line["step"], line["steps"], line["tokens"]) == (12, 12, 12 * 6 * 32)
    assert line["last_loss"] == evaluations(folder)[-1][1]
    assert line["best_loss"] == min(x for _, x in evaluations(folder))


def test_ls_shows_the_state(runs, capsys) -> None:
    def state() -> str:
        lines = json.loads(printed(capsys, "ls", "--json"))
        return next(line["state"] for line in lines if line["folder"] == str(folder))

    folder = own(runs)
    assert state() == "finished"
    (folder / "DONE").unlink()
    assert state() == "failed"
    holder = RunFolder(folder)
    holder.claim()
    assert state() == "running"
    holder.release()
    holder.record_stop(75, 8)
    assert state() == "stopped"
    holder.record_divergence("the loss of step 9 is nan")
    assert state() == "failed"
    assert f"{folder.name[-8:]} failed: the loss of step 9 is nan" in printed(capsys, "ls")


def test_looking_at_a_lock_does_not_take_it(tmp_path) -> None:
    assert not is_locked(tmp_path)
    assert not (tmp_path / "LOCK").exists(), "looking makes no file"
    (tmp_path / "LOCK").touch()
    assert not is_locked(tmp_path)
    assert (tmp_path / "LOCK").exists(), "another process may be about to take it"
    assert RunFolder(tmp_path).try_claim()


@pytest.mark.parametrize("width", [100, 84])
def test_ls_fits_the_terminal(runs, capsys, monkeypatch, width) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    own(runs).rename(runs / "a-run-with-a-name-of-my-own-that-is-long-and-ends-in-x1")
    lines = printed(capsys, "ls").splitlines()
    assert max(map(len, lines)) <= width
    assert any(line.startswith("a-") and "x1 " in line for line in lines), "both ends are shown"


def test_ls_and_compare_do_not_import_torch(runs) -> None:
    for command in (["ls"], ["compare", "runs/own", "runs/muon"], ["show", "runs/own"]):
        code = (
            f"import sys; from angular_lab.cli.main import main; assert main({command}) == 0; "
            "assert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_ls_of_nothing_says_so(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["ls"]) == 0
    assert "no runs below" in capsys.readouterr().err
    assert main(["ls", "nowhere"]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err


def test_a_closed_pipe_is_not_an_error(runs) -> None:
    command = f"{sys.executable} -m angular_lab ls --json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_version(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    pattern = r"angular-lab \d+\.\d+\S* \(torch \d\S*, Python 3\.\d+\.\d+\)\n"
    assert re.fullmatch(pattern, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59, "59s"), (61, "1m"), (7200, "2h"), (86_400 * 3, "3d"), (86_400 * 21, "3w")],
)
def test_ages(seconds, text) -> None:
    assert age(seconds) == text


def test_a_run_is_found_by_the_beginning_of_its_id(runs) -> None:
    folder = own(runs)
    assert find_run(folder.name[-8:-2]) == folder
    assert find_run(f"runs/{folder.name[-8:]}") == folder
    shutil.copytree(folder, Path("copy") / folder.name)
    with pytest.raises(ValueError, match=r"matches 2 runs: copy/nano.*; give more characters"):
        find_run(folder.name[-8:])
    with pytest.raises(ValueError, match="neither a folder nor the id of a run"):
        find_run("xyz")
    with pytest.raises(ValueError, match="nowhere/x: no such folder"):
        find_run("nowhere/x")


# -- compare -----------------------------------------------------------------------------------


def test_compare_shows_only_settings_that_differ(runs, capsys) -> None:
    text = printed(capsys, "compare", "runs/own", "runs/muon")
    block = text[text.index("Settings") : text.index("Validation loss")]
    assert rows(block)[1:-1] == [
        ["A", "B"], ["optim.name", "angular_muown", "muon"], ["optim.lr", "0.02", "0.01"]
    ]  # fmt: skip


def test_losses_at_equal_tokens_are_those_of_the_logs(runs, capsys) -> None:
    ours, muon = dict(evaluations(runs / "own")), dict(evaluations(runs / "muon"))
    result = json.loads(printed(capsys, "compare", "runs/own", "runs/muon", "--json"))
    assert [row["tokens"] for row in result["losses"]] == sorted(ours)
    for row in result["losses"]:
        assert row["losses"] == {"A": ours[row["tokens"]], "B": muon[row["tokens"]]}
        assert row["interpolated"] == []
    text = printed(capsys, "compare", "runs/own", "runs/muon")
    last = max(ours)
    difference = muon[last] - ours[last]
    row = ["1.54k", f"{ours[last]:.4f}", f"{muon[last]:.4f}", f"{difference:+.4f}"]
    assert row in rows(text)


def test_a_loss_between_two_evaluations_is_interpolated_and_marked(runs, capsys) -> None:
    ours, wide = evaluations(runs / "own"), dict(evaluations(runs / "wide"))
    result = json.loads(printed(capsys, "compare", "runs/own", "runs/wide", "--json"))
    (row,) = (row for row in result["losses"] if row["tokens"] == 1024)
    assert row["losses"]["A"] == dict(ours)[1024]
    # 6 x 32 tokens a step, evaluated every third: 576 and 1152
    x = math.log(1024 / 576) / math.log(1152 / 576)
    assert row["losses"]["B"] == pytest.approx((1 - x) * wide[576] + x * wide[1152], rel=1e-12)
    assert row["interpolated"] == ["B"]
    text = printed(capsys, "compare", "runs/own", "runs/wide")
    assert f"{row['losses']['B']:.4f}~" in text
    assert "~ interpolated between two evaluations" in text
    assert "different lengths" in text
    assert "The seeds differ" in text


def test_tokens_to_equal_loss(runs, capsys) -> None:
    curves = {"A": evaluations(runs / "own"), "B": evaluations(runs / "muon")}
    result = json.loads(printed(capsys, "compare", "runs/own", "runs/muon", "--json"))
    worse = max(curves, key=lambda name: min(x for _, x in curves[name]))
    better = "B" if worse == "A" else "A"
    target = min(x for _, x in curves[worse])
    row = result["reached"][0]
    assert (row["loss"], row["of"]) == (target, worse)
    # the first two neighbours around the target, and the line over log(tokens) between them
    (x0, y0), (x1, y1) = next(
        (a, b)
        for a, b in zip(curves[better], curves[better][1:], strict=False)
        if b[1] <= target < a[1]
    )
    expected = math.exp(math.log(x0) + (y0 - target) / (y0 - y1) * math.log(x1 / x0))
    assert row["tokens"][better] == pytest.approx(expected, rel=1e-12)
    end = next(tokens for tokens, loss in curves[worse] if loss == target)
    assert row["tokens"][worse] == end
    text = printed(capsys, "compare", "runs/own", "runs/muon")
    assert f"({expected / end:.2f}x)" in text
    assert result["reached"][-1]["tokens"][worse] is None
    assert "- not reached" in text


def test_curves_that_start_below_a_loss_or_share_no_tokens() -> None:
    high, low = [(10, 5.0), (20, 4.0)], [(10, 3.0), (20, 3.5)]
    first, second = tokens_to_equal_loss({"A": high, "B": low})
    assert (first.loss, first.tokens, first.earlier) == (4.0, {"A": 20, "B": None}, ("B",))
    assert (second.loss, second.tokens, second.earlier) == (3.0, {"A": None, "B": 10}, ())
    assert losses_at_equal_tokens({"A": high, "B": [(30, 3.0)]}) == []
    (only,) = (row for row in tokens_to_equal_loss({"A": high, "B": [(30, 4.5)]}) if row.of == "B")
    assert only.tokens == {"A": pytest.approx(10 * 2**0.5), "B": 30}
    later = losses_at_equal_tokens({"A": high, "B": [(15, 4.0), (40, 3.0)]})
    assert [row.tokens for row in later] == [20]


def test_a_branch_is_compared_with_its_history(runs, capsys, data) -> None:
    folder = own(runs)
    spec = branch_spec(RunFolder(folder), 8, 2)
    train(spec, runs / "branch", device="cpu")
    result = json.loads(printed(capsys, "compare", "runs/branch", folder, "--json"))
    assert [row["tokens"] for row in result["losses"]] == [4 * 128, 8 * 128, 10 * 128]
    assert result["losses"][0]["losses"]["A"] == result["losses"][0]["losses"]["B"]
    assert result["settings"]["parent_step"] == {"A": "8", "B": "0"}
    assert "nano branch" in printed(capsys, "ls")


def test_losses_on_other_tokens_are_not_compared(runs, capsys) -> None:
    path = own(runs) / "spec.json"
    path.write_text(path.read_text().replace('"data": "', '"data": "0'))
    text = printed(capsys, "compare", "runs/own", "runs/muon")
    assert "Losses are not compared" in text
    assert "Validation loss" not in text
    assert "fingerprint of the data" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs/own"], "1 different run to compare: give 2 to 26"),
        (["runs/own", "./runs/own"], "1 different run to compare"),
        (["runs/own", "runs"], "runs is not a run folder: it has no spec.json"),
    ],
)
def test_compare_refuses(runs, capsys, words, message) -> None:
    assert main(["compare", *words]) == 2
    assert message in capsys.readouterr().err


# -- show of a run -----------------------------------------------------------------------------


def test_show_of_a_run_lists_what_differs_from_its_named_run(runs, capsys, data) -> None:
    text = printed(capsys, "show", "runs/muon")
    assert "Settings that differ from the named run nano" in text
    assert ["optim.name", "angular_muown", "muon"] in rows(text)
    assert ["steps", "300", "12"] in rows(text)
    assert "optim.momentum" not in text, "it does not differ"
    command = text.splitlines()[-1].split()
    assert command[:3] == ["angular-lab", "train", "nano"]
    assert main(["train", *command[2:], "--resume", "auto", "--device", "cpu"]) == 0
    assert "is already finished" in capsys.readouterr().err, "the command names the same run"


def test_show_of_a_run_takes_no_settings(runs, capsys) -> None:
    assert main(["show", "runs/own", "steps=3"]) == 2
    assert "show runs/own steps=3: a run has its settings already" in capsys.readouterr().err
    assert main(["show", "nanoo"]) == 2
    assert "unknown run 'nanoo': did you mean nano?" in capsys.readouterr().err


# -- doctor ------------------------------------------------------------------------------------


def findings(capsys, folder: Path, code: int) -> dict[str, list[dict[str, str]]]:
    """Return the findings by their parts, and check that the text has them, too."""
    content = json.loads(printed(capsys, "doctor", folder, "--json", code=code))
    assert content["sound"] == (code == 0)
    text = printed(capsys, "doctor", folder, code=code)
    by_part: dict[str, list[dict[str, str]]] = {}
    for finding in content["findings"]:
        if finding["part"] != "disk":  # other processes use it, too: the two calls may differ
            assert finding["text"] in text
        assert finding["advice"] in text
        by_part.setdefault(finding["part"], []).append(finding)
    return by_part


def wrong(found: dict[str, list[dict[str, str]]]) -> list[str]:
    return [part for part, several in found.items() for x in several if x["status"] == "wrong"]


def test_a_sound_run(runs, capsys) -> None:
    found = findings(capsys, own(runs), 0)
    assert {x["status"] for several in found.values() for x in several} == {"ok"}
    assert "nothing is wrong" in printed(capsys, "doctor", "runs/own")


def test_a_killed_run_can_continue(runs, capsys) -> None:
    folder = stopped_copy(own(runs), runs / "a killed run", 8)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 13, "to')
    found = findings(capsys, folder, 1)
    assert wrong(found) == ["state"]
    resume = f"angular-lab resume '{folder}': it continues after step 8"
    assert resume in found["state"][0]["advice"]
    assert found["LOCK"][0]["status"] == "note"
    assert "half-written" in found["logs"][0]["text"]
    assert train(RunFolder(folder).read_spec(), folder, resume=True, device="cpu").done
    assert wrong(findings(capsys, folder, 0)) == []


def test_a_lost_line_and_a_repeated_one(runs, capsys) -> None:
    path = own(runs) / "metrics.jsonl"
    lines = path.read_text().splitlines(True)
    path.write_text("".join(lines[:9] + lines[10:]))
    (finding,) = findings(capsys, own(runs), 1)["logs"]
    assert "lacks step 10, which timing.jsonl has" in finding["text"]
    assert "--from 9" in finding["advice"], "the cooldown starts there: it is kept"
    path.write_text("".join([*lines, lines[5]]))
    assert "step 6 after step 12" in findings(capsys, own(runs), 1)["logs"][0]["text"]
    path.write_text("".join([*lines[:4], "nonsense\n", *lines[5:]]))
    found = findings(capsys, own(runs), 1)["logs"]
    assert "line 5 is not a JSON object: 'nonsense" in found[0]["text"]
    path.write_text("".join(lines[:6]))
    (own(runs) / "timing.jsonl").unlink()
    assert "its log ends at step 6 of 12" in findings(capsys, own(runs), 1)["logs"][0]["text"]


def test_a_damaged_checkpoint(runs, capsys) -> None:
    newest = max(own(runs).glob("checkpoints/step_*"))
    part = next(newest.glob("__0_0*"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    bad, good = findings(capsys, own(runs), 1)["checkpoints"]
    assert "step 12: __0_0.distcp does not match its hash" in bad["text"]
    assert str(newest) in bad["advice"]
    assert "continues after step 9" in bad["advice"]
    assert good["status"] == "ok"
    (newest / ".metadata").write_bytes(b"no index")
    assert "its index cannot be read" in findings(capsys, own(runs), 1)["checkpoints"][0]["text"]


def test_missing_and_other_data(runs, capsys, data) -> None:
    path = own(runs) / "spec.json"
    text = path.read_text()
    path.write_text(text.replace(str(data), "gone"))
    found = findings(capsys, own(runs), 0)
    assert "gone is missing" in found["data"][0]["text"]
    (own(runs) / "DONE").unlink()
    RunFolder(own(runs)).record_stop(75, 12)
    assert wrong(findings(capsys, own(runs), 1)) == ["data"], "now the data is needed"
    content = json.loads(text)
    path.write_text(json.dumps({**content, "data": "0" * 64}))
    assert "holds other tokens" in findings(capsys, own(runs), 1)["data"][0]["text"]


def test_too_little_disk_space(runs, capsys, monkeypatch) -> None:
    folder = own(runs)
    (folder / "DONE").unlink()
    RunFolder(folder).record_stop(75, 12)
    sizes = [sum(f.stat().st_size for f in c.iterdir()) for c in folder.glob("checkpoints/step*")]
    usage = shutil.disk_usage(".")._replace(free=max(sizes) - 2000)
    monkeypatch.setattr(examination.shutil, "disk_usage", lambda _: usage)
    (finding,) = findings(capsys, folder, 1)["disk"]
    assert finding["advice"] == "free 2 kB more, or lower keep"


def test_an_unreadable_spec_and_no_run(runs, capsys) -> None:
    assert main(["doctor", "runs"]) == 2
    assert "runs is not a run folder" in capsys.readouterr().err
    (own(runs) / "spec.json").write_text("{")
    found = findings(capsys, own(runs), 1)
    assert wrong(found) == ["spec.json"]
    assert "backup" in found["spec.json"][0]["advice"]


def test_a_branch_whose_parent_is_gone(runs, capsys) -> None:
    parent = own(runs)
    spec = branch_spec(RunFolder(parent), 8, 2)
    branch = RunFolder(runs / "branch")
    train(spec, branch.path, device="cpu")
    assert findings(capsys, branch.path, 0)["parent"][0]["status"] == "ok"
    shutil.rmtree(branch.checkpoints)
    shutil.rmtree(parent / "checkpoints" / "step_00000008")
    branch.reopen()
    found = findings(capsys, branch.path, 1)
    assert "the branch cannot start" in found["parent"][0]["text"]
