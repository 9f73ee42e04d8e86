"""A run goes on with the tokens that it began with, whatever their folder is called now."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from angular_lab.run_folder import RunFolder
from angular_lab.training import checkpoint
from angular_lab.training.start import branch_spec, train
from tests.lab.runs import lines, tiny, train_on


def test_a_run_does_not_go_on_with_other_tokens(data: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    shutil.copytree(data, corpus)
    train(tiny(corpus, steps=4), tmp_path / "run")
    manifest, done = corpus / "manifest.json", tmp_path / "run" / "DONE"
    written = manifest.read_text()
    done.unlink()
    manifest.write_text(written.replace("standard library", "same text elsewhere"))
    train(tiny(corpus, steps=4), tmp_path / "run", resume=True)
    done.unlink()
    manifest.write_text(written.replace('"sha256": "', '"sha256": "0'))
    with pytest.raises(ValueError, match="other tokens"):
        train(tiny(corpus, steps=4), tmp_path / "run", resume=True)


def test_a_run_is_of_its_tokens_whatever_their_folder_is_called(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun under a relative path, it goes on under an absolute one, and on a copy."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(data, "corpus")
    shutil.copytree(data, "copy")
    run, whole = tmp_path / "run", tmp_path / "whole"
    train(tiny(Path("corpus")), run)
    train(tiny(data), whole)
    for place in ("./corpus", str(tmp_path / "corpus"), "copy"):
        (run / "DONE").unlink()
        for step in (9, 12):
            shutil.rmtree(checkpoint.step_folder(run / "checkpoints", step), ignore_errors=True)
        train(replace(tiny(data), data=place), run, resume=True)
        assert RunFolder(run).done
        assert lines(run) == lines(whole)
        assert RunFolder(run).read_spec().data == "corpus", "as it was begun"
    with pytest.raises(ValueError, match=r"started with steps=12 \(now 13\): the same"):
        train(tiny(data, steps=13), run, resume=True)


def test_ranks_agree_on_it(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "copy")
    train(tiny(data, steps=4), tmp_path / "run")
    (tmp_path / "run" / "DONE").unlink()
    train_on(2, tiny(tmp_path / "copy", steps=4), tmp_path / "run")
    assert RunFolder(tmp_path / "run").done


def test_a_cool_down_goes_on_where_the_tokens_were_moved(data: Path, tmp_path: Path) -> None:
    """It begins with its trunk's folder of tokens, and goes on with the new one."""
    corpus, moved = tmp_path / "corpus", tmp_path / "moved"
    shutil.copytree(data, corpus)
    trunk = train(tiny(corpus), tmp_path / "trunk")
    spec = branch_spec(trunk, 8, 2)
    run = train(spec, tmp_path / "branch")
    before = lines(run.path)
    (run.path / "DONE").unlink()
    shutil.rmtree(run.checkpoints)
    corpus.rename(moved)
    train(replace(spec, data=str(moved)), run.path, resume=True)
    assert lines(run.path) == before


@pytest.mark.parametrize("other", ["tokens", "no manifest", "nowhere"])
def test_a_run_does_not_go_on_in_a_folder_with_other_tokens(
    data: Path, tmp_path: Path, other: str
) -> None:
    """Nor where nothing tells that they are the same."""
    corpus, place = tmp_path / "corpus", tmp_path / "other"
    shutil.copytree(data, corpus)
    if other != "nowhere":
        shutil.copytree(data, place)
    manifest = place / "manifest.json"
    if other == "tokens":
        manifest.write_text(manifest.read_text().replace('"sha256": "', '"sha256": "0'))
    if other == "no manifest":
        manifest.unlink()
        (corpus / "manifest.json").unlink()
    train(tiny(corpus, steps=4), tmp_path / "run")
    (tmp_path / "run" / "DONE").unlink()
    with pytest.raises(ValueError, match=rf"data='{corpus}' \(now '{place}'\)"):
        train(tiny(place, steps=4), tmp_path / "run", resume=True)
