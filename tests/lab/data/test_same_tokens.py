"""A run resumes with the tokens that it started with, under any name of their folder."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from angular_lab.data.prepare import prepare
from angular_lab.data.tokenizer import load_tokenizer
from angular_lab.run_folder import RunFolder
from angular_lab.training import checkpoint
from angular_lab.training.start import branch_spec, train
from tests.lab.runs import lines, tiny, train_on


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    texts = [f"document {i}: " + "abcdefg " * (i % 20) for i in range(200)]
    out = tmp_path / "corpus"
    prepare(texts, load_tokenizer("bytes"), out, val_fraction=0.2, workers=1, progress=False,
            source="a list")  # fmt: skip
    return out


def edit(manifest: Path, old: str, new: str) -> None:
    manifest.write_text(manifest.read_text().replace(old, new))


def test_the_same_tokens_may_be_in_another_folder(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started with a relative path, a run resumes with an absolute one, and with a copy."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(corpus, "copy")
    edit(Path("copy/manifest.json"), "a list", "the same documents from elsewhere")
    run = tmp_path / "run"
    train(tiny(Path("corpus")), run)
    metrics = lines(run)
    for path in ("./corpus", str(corpus), "copy"):
        (run / "DONE").unlink()
        for step in (9, 12):
            shutil.rmtree(checkpoint.step_folder(run / "checkpoints", step), ignore_errors=True)
        train(replace(tiny(corpus), data=path), run, resume=True)
        assert RunFolder(run).done
        assert lines(run) == metrics
        assert RunFolder(run).read_spec().data == "corpus", "as it was started"
    with pytest.raises(ValueError, match=r"started with steps=12 \(now 13\): give the same"):
        train(tiny(corpus, steps=13), run, resume=True)
    (run / "DONE").unlink()
    train_on(2, tiny(tmp_path / "copy"), run)
    assert RunFolder(run).done, "two ranks agree that the tokens are the same"


def test_a_cooldown_resumes_after_the_tokens_were_moved(corpus: Path, tmp_path: Path) -> None:
    """It starts with the folder of its trunk, and resumes with the new one."""
    trunk = train(tiny(corpus), tmp_path / "trunk")
    spec = branch_spec(trunk, 8, 2)
    run = train(spec, tmp_path / "branch")
    metrics = lines(run.path)
    (run.path / "DONE").unlink()
    shutil.rmtree(run.checkpoints)
    corpus.rename(tmp_path / "moved")
    train(replace(spec, data=str(tmp_path / "moved")), run.path, resume=True)
    assert lines(run.path) == metrics


@pytest.mark.parametrize("change", ["same folder", "other folder", "no manifest", "no folder"])
def test_a_run_does_not_resume_with_other_tokens(corpus: Path, tmp_path: Path, change: str) -> None:
    """Nor without a manifest, which would show that they are the same."""
    folder = corpus if change == "same folder" else tmp_path / "other"
    if change == "no manifest":
        (corpus / "manifest.json").unlink()
    if change in ("other folder", "no manifest"):
        shutil.copytree(corpus, folder)
    train(tiny(corpus, steps=2, eval_every=None), tmp_path / "run")
    (tmp_path / "run" / "DONE").unlink()
    if change in ("same folder", "other folder"):
        edit(folder / "manifest.json", '"sha256": "', '"sha256": "0')
    message = "other tokens" if folder == corpus else rf"data={corpus} \(now {folder}\)"
    with pytest.raises(ValueError, match=message):
        train(tiny(folder, steps=2, eval_every=None), tmp_path / "run", resume=True)
