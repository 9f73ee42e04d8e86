"""The command prepare: its tokenizer, its summary, errors in its options, runs on its data."""

import json
from pathlib import Path

import pytest

from angular_lab.cli.main import main
from angular_lab.data import tokenizer
from angular_lab.experiments.comparison import experiment, planned
from tests.lab.runs import SMALL


def command(folder: Path, kind: str, *options: str) -> list[str]:
    source = folder / "corpus.txt"
    source.write_text("\n<|endoftext|>\n".join(f"document {i} says hello" for i in range(200)))
    out = str(folder / "data")
    return ["prepare", str(source), "--tokenizer", kind, "--out", out, "--workers", "1", *options]


@pytest.mark.parametrize(("fraction", "few"), [("0.01", True), ("0.5", False)])
def test_the_splits_are_reported_and_so_is_a_small_one(tmp_path, capsys, fraction, few) -> None:
    assert main(command(tmp_path, "bytes", "--val-fraction", fraction)) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == str(tmp_path / "data")
    splits = json.loads((tmp_path / "data" / "manifest.json").read_text())["splits"]
    for name, split in splits.items():
        summary = f"{name}: {split['tokens']:,} tokens, {split['documents']} documents"
        assert summary in printed.err
    assert ("fewer than 20 documents for validation" in printed.err) == few


def test_a_trained_tokenizer_is_reused_and_models_get_its_vocabulary(tmp_path, monkeypatch) -> None:
    assert main(command(tmp_path, "train:300", "--val-fraction", "0.1")) == 0
    monkeypatch.setattr(tokenizer, "train_tokenizer", lambda *_: pytest.fail("trained again"))
    assert main(command(tmp_path, "train:300", "--val-fraction", "0.1")) == 0
    data = str(tmp_path / "data")
    run = ["train", "nano", f"data={data}", *SMALL, "steps=2", "model.vocabulary=300"]
    assert main([*run, "model.sequence=16", "--out", str(tmp_path / "run")]) == 0
    for name in ("teaser", "width"):
        usual, larger = experiment(name, "nano"), planned(name, "nano", data)
        assert {arm.spec.model.vocabulary for arm in usual.arms} == {257}
        assert {arm.spec.model.vocabulary for arm in larger.arms} == {300}
    assert planned("teaser", "s", data) == experiment("teaser", "s"), "its vocabulary is larger"


def test_a_vocabulary_must_be_a_number(tmp_path, capsys) -> None:
    assert main(command(tmp_path, "train:many")) == 2
    assert "--tokenizer train:many: give the size" in capsys.readouterr().err


def test_another_column_is_another_corpus(tmp_path, capsys) -> None:
    source = tmp_path / "docs.jsonl"
    rows = [{"a": f"first {i} " * 9, "b": f"second {i} " * 9} for i in range(60)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare = ["prepare", str(source), "--tokenizer", "bytes", "--val-fraction", "0.2"]
    prepare += ["--out", str(tmp_path / "data"), "--workers", "1"]
    assert main([*prepare, "--column", "a"]) == 0
    assert main([*prepare, "--column", "b"]) == 2
    assert "[b]" in capsys.readouterr().err


def test_a_single_text_can_be_trained_on(tmp_path, capsys) -> None:
    """The commonest first corpus: one file without separators between documents."""
    (tmp_path / "book.txt").write_text("\n".join(f"line {i} of a book" for i in range(300)))
    out = tmp_path / "data"
    command = ["prepare", str(tmp_path / "book.txt"), "--tokenizer", "bytes", "--workers", "1"]
    assert main([*command, "--out", str(out), "--val-fraction", "0.05"]) == 0
    assert "validation has the last 280 tokens of the last document" in capsys.readouterr().err
    run = ["train", "nano", f"data={out}", *SMALL, "--out", str(tmp_path / "run")]
    assert main([*run, "--device", "cpu"]) == 0
    assert main([*command, "--out", str(tmp_path / "none"), "--val-fraction", "0"]) == 0
    assert "no validation split (--val-fraction 0), and training needs one" in (
        capsys.readouterr().err
    )
