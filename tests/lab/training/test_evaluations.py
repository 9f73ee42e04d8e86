"""angular-lab eval: a run's losses on other text."""

import json
import shutil
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from angular_lab.cli.main import main
from angular_lab.config.spec import ModelSpec
from angular_lab.data.corpus import END_OF_TEXT
from angular_lab.data.prepare import TOKENIZER, prepare
from angular_lab.data.tokenizer import BytesTokenizer, load_tokenizer, train_tokenizer
from angular_lab.evaluations import read_evaluations
from angular_lab.inspect.changes import describe_run
from angular_lab.report.single_runs import single_section
from angular_lab.run_folder import RunFolder, read_run
from angular_lab.sample import load_run
from angular_lab.training.start import train
from tests.lab.runs import tiny

TEXTS = [
    f"The café of number {i} opens at {i % 24} o'clock, naïve as it is. " * 4 for i in range(60)
]


@pytest.fixture(scope="module")
def bytes_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("evaluations") / "run"
    train(tiny(data, average=(3,)), out, device="cpu")
    return out


@pytest.fixture
def run(bytes_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(bytes_run, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def words_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on tokens that stand for several bytes each."""
    folder = tmp_path_factory.mktemp("words")
    prepare(TEXTS, train_tokenizer(TEXTS, 300), folder / "data", val_fraction=0.3, workers=1,
            progress=False)  # fmt: skip
    model = ModelSpec(vocabulary=300, sequence=32, layers=1, width=16, heads=2, mlp=32)
    train(tiny(folder / "data", steps=2, model=model), folder / "run", device="cpu")
    return folder / "run"


def evaluate(capsys: pytest.CaptureFixture[str], *words: Any) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["eval", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def fails(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    assert main(["eval", *map(str, words)]) == 2
    return capsys.readouterr().err


def test_the_runs_own_folder_has_the_loss_that_training_logged(
    run: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default, eval predicts as many tokens as an evaluation during training."""
    logged = {m.step: m for m in RunFolder(run).read_metrics()}
    (last,) = evaluate(capsys, run, "--on", data)
    assert last["loss"] == logged[12].get("val_loss")
    assert last["tokens"] == 256
    (earlier,) = evaluate(capsys, run, "--on", data, "--step", 8)
    assert earlier["loss"] == logged[8].get("val_loss")
    (average,) = evaluate(capsys, run, "--on", data, "--average", 3)
    assert average["loss"] == pytest.approx(logged[12].get("val_loss_averaged_3"), rel=1e-6)
    assert [(e.step, e.average) for e in read_evaluations(run, [])] == [
        (12, None),
        (8, None),
        (12, 3),
    ]


@pytest.mark.parametrize("precision", ["bf16", "bf16_weights", "fp32"])
def test_the_loss_is_the_logged_one_in_every_precision(
    precision: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny(data, steps=4, precision=precision), tmp_path / "run", device="cpu")
    (result,) = evaluate(capsys, tmp_path / "run", "--on", data, "--device", "cpu")
    assert result["loss"] == RunFolder(tmp_path / "run").read_metrics()[-1].get("val_loss")


def test_values_follow_from_a_plain_computation(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(f"naïve café\n{END_OF_TEXT}\n" + "second document, " * 5)
    documents = ["naïve café", "second document, " * 5]
    ids = [256, *documents[0].encode(), 256, *documents[1].encode()]
    model, nats = load_run(run), 0.0
    for start in range(0, len(ids) - 1, 32):
        window = torch.tensor([ids[start : start + 33]])
        with torch.no_grad():
            guess = torch.log_softmax(model(window[:, :-1]).double(), -1)
        nats -= guess[0].gather(1, window[0, 1:, None]).sum().item()
    (result,) = evaluate(capsys, run, "--on", text)
    size = sum(len(document.encode()) for document in documents)
    assert (result["tokens"], result["bytes"]) == (len(ids) - 1, size)
    assert result["loss"] == pytest.approx(nats / (len(ids) - 1))
    assert result["bits_per_byte"] == pytest.approx(nats / log(2) / size)
    assert result["perplexity"] == pytest.approx(exp(result["loss"]))


def test_bytes_are_those_of_the_text_and_not_of_the_tokens(
    words_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(words_run).read_spec().data
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in TEXTS))
    from_text, from_folder = evaluate(
        capsys, words_run, "--on", text, "--on", folder, "--tokens", "1M"
    )
    assert from_text["bytes"] == sum(len(document.encode()) for document in TEXTS)
    manifest = json.loads((Path(folder) / "manifest.json").read_text())["splits"]["val"]
    assert from_folder["bytes"] == manifest["bytes"]
    assert from_folder["tokens"] == manifest["tokens"] - 1
    (cut,) = evaluate(capsys, words_run, "--on", text, "--tokens", 50)
    tokenizer = load_tokenizer(str(Path(folder) / TOKENIZER))
    ids = [
        i
        for n, d in enumerate(TEXTS)
        for i in ([tokenizer.end_of_text] * (n > 0) + tokenizer.encode(d))
    ][:50]
    ends = [n for n, i in enumerate(ids) if i == tokenizer.end_of_text]
    whole = sum(len(document.encode()) for document in TEXTS[: len(ends)])
    rest = ids[ends[-1] + 1 :] if ends else ids
    assert cut["bytes"] == pytest.approx(whole + len(tokenizer.decode(rest).encode()), abs=2)
    assert np.isfinite(cut["loss"])


def test_an_evaluation_replaces_an_earlier_one_of_the_same_tokens_and_weights(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text " * 40)
    for tokens in (64, 100, 64):
        evaluate(capsys, run, "--on", text, "--tokens", tokens)
    found = read_evaluations(run, [])
    assert [result.tokens for result in found] == [100, 64], "another part of the text is kept"
    assert len(RunFolder(run).evaluations_path.read_text().splitlines()) == 2
    text.write_text("other text " * 40)
    evaluate(capsys, run, "--on", text, "--tokens", 64)
    assert len(read_evaluations(run, [])) == 3


def test_evaluations_are_shown(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "shown.txt"
    text.write_text("some text " * 40)
    (result,) = evaluate(capsys, run, "--on", text)
    assert main(["eval", str(run), "--on", str(text)]) == 0
    printed = capsys.readouterr().out
    read = read_run(run, [])
    assert read is not None
    (_, table) = single_section([read], "single", "Single runs").tables
    assert "val_bits_per_byte" in (table.note or "")
    for shown in (printed, describe_run(read), table.markdown()):
        assert "shown.txt" in shown
        assert f"{result['bits_per_byte']:.4f}" in shown


def test_a_folder_of_text_is_evaluated_as_its_documents(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of their names, as `prepare` reads them."""
    folder, text = tmp_path / "texts", tmp_path / "all.txt"
    (folder / "more").mkdir(parents=True)
    (folder / "a.txt").write_text("naïve café " * 4)
    (folder / "more" / "b.jsonl").write_text(json.dumps({"text": "a second document"}) + "\n")
    (folder / ".hidden").write_bytes(b"\xff")
    text.write_text("naïve café " * 4 + f"\n{END_OF_TEXT}\na second document")
    whole, single = evaluate(capsys, run, "--on", folder, "--on", text)
    assert {**whole, "on": "", "data": ""} == {**single, "on": "", "data": ""}
    (cut,) = evaluate(capsys, run, "--on", folder, "--tokens", 10)
    assert (cut["data"], cut["tokens"]) == (whole["data"], 10), "the same text, and less of it"
    (folder / "more" / "b.jsonl").write_text(json.dumps({"text": "a third document"}) + "\n")
    (changed,) = evaluate(capsys, run, "--on", folder, "--tokens", 10)
    assert changed["data"] != whole["data"]
    (folder / "empty").mkdir()
    assert "it has no text to evaluate" in fails(capsys, run, "--on", folder / "empty")


def test_a_resumed_run_forgets_evaluations_of_steps_that_it_takes_again(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text " * 40)
    for step in (8, 12):
        evaluate(capsys, run, "--on", text, "--step", step)
    RunFolder(run).rewind(8)
    assert [evaluation.step for evaluation in read_evaluations(run, [])] == [8]


def test_errors_say_what_to_do(
    run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    prepare(TEXTS, train_tokenizer(TEXTS, 257), other, val_fraction=0.3, workers=1, progress=False)
    message = fails(capsys, run, "--on", other)
    assert f"angular-lab prepare TEXT --tokenizer {data / TOKENIZER}" in message
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "file").write_bytes(b"\xff")
    for words, expected in (
        (["--on", tmp_path / "binary"], "binary/file cannot be read"),
        (["--on", tmp_path / "nowhere"], "it does not exist"),
        (["--on", tmp_path / "empty.txt"], "it has no text to evaluate"),
        (["--on", data, "--step", 7], "has no checkpoint at step 7; it has 8, 9, 12"),
        (["--on", data, "--device", "tpu"], "device"),
        (["--on", data, "--average", 5], "average=5 is not one of the averages"),
    ):
        assert expected in fails(capsys, run, *words)
    assert not RunFolder(run).evaluations_path.exists()


def test_bytes_tokenizer_counts_cut_characters() -> None:
    assert BytesTokenizer().count_bytes([*"é".encode()][:1]) == 1
