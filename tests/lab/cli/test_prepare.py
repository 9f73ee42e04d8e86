"""The command prepare: its tokenizer, its summary, and errors in its options."""

from pathlib import Path

import pytest

from angular_lab.cli.main import main
from angular_lab.data import tokenizer


def command(folder: Path, kind: str, *options: str) -> list[str]:
    source = folder / "corpus.txt"
    source.write_text("\n<|endoftext|>\n".join(f"document {i} says hello" for i in range(200)))
    out = str(folder / "data")
    return ["prepare", str(source), "--tokenizer", kind, "--out", out, "--workers", "1", *options]


@pytest.mark.parametrize(("fraction", "few"), [("0.01", True), ("0.5", False)])
def test_a_small_validation_split_is_reported(tmp_path, capsys, fraction, few) -> None:
    assert main(command(tmp_path, "bytes", "--val-fraction", fraction)) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == str(tmp_path / "data")
    assert "train: " in printed.err
    assert ("fewer than 20 documents for validation" in printed.err) == few


def test_a_trained_tokenizer_is_reused(tmp_path, monkeypatch) -> None:
    assert main(command(tmp_path, "train:300")) == 0
    monkeypatch.setattr(tokenizer, "train_tokenizer", lambda *_: pytest.fail("trained again"))
    assert main(command(tmp_path, "train:300")) == 0


def test_a_vocabulary_must_be_a_number(tmp_path, capsys) -> None:
    assert main(command(tmp_path, "train:many")) == 2
    assert "--tokenizer train:many: give the size" in capsys.readouterr().err
