"""Documents: the same ones from every kind of file, and errors that name the file."""

import bz2
import gzip
import json
import lzma
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from angular_lab.data.corpus import documents, hf_documents, stdlib_documents

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".xz": lzma.compress, ".gz": partial(gzip.compress, mtime=0), ".bz2": bz2.compress,
    ".zst": zstandard.compress,
}  # fmt: skip
KINDS = [base + suffix for base in (".txt", ".jsonl") for suffix in COMPRESS] + [".parquet"]
# A byte order mark at the start of a file is not part of the text.
TEXTS = st.lists(
    st.text(st.characters(exclude_characters="\ufeff", exclude_categories=["Cs"]), min_size=1)
    | st.sampled_from(["two\nlines\n", "\r\n x \r", "a <|endoftext|> inside", "\u2028", " \n"]),
    max_size=6,
)
EXAMPLES = ["first\nsecond", "zwei\n\n", "drei \u00e9\u4e16\U0001f600", "four"]


def write(folder: Path, kind: str, texts: list[str]) -> Path:
    """Write one file of the kind given by its suffixes."""
    path = folder / f"docs{kind}"
    if kind == ".parquet":
        parquet.write_table(pa.table({"n": list(range(len(texts))), "text": texts}), path)
        return path
    if kind.startswith(".jsonl"):
        content = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts)
    else:
        content = "\n<|endoftext|>\n".join(texts)
    path.write_bytes(COMPRESS[path.suffix if kind.count(".") > 1 else ""](content.encode()))
    return path


@settings(max_examples=40)
@given(texts=TEXTS)
def test_every_kind_of_file_gives_the_same_documents(tmp_path_factory, texts) -> None:
    folder = tmp_path_factory.getbasetemp()
    visible = [text for text in texts if text.strip()]
    for kind in KINDS:
        assert list(documents(write(folder, kind, texts))) == visible, kind


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"one\r\n<|endoftext|>\r\ntwo\r\n\r\n<|endoftext|>\r\n", ["one", "two\r\n"]),
        ("program.py", b"x = 1\r\ny = 2\n\n", ["x = 1\r\ny = 2\n\n"]),
        ("bom.jsonl", b'\xef\xbb\xbf{"text": "a"}\n\n', ["a"]),
        ("bom.txt", b"\xef\xbb\xbfb", ["b"]),
        *(
            (f"frames.txt{suffix}", pack(b"one ") + pack(b"two"), ["one two"])
            for suffix, pack in COMPRESS.items()
        ),
    ],
)
def test_a_file_is_split_only_at_separators(tmp_path, name, content, expected) -> None:
    (tmp_path / name).write_bytes(content)
    assert list(documents(str(tmp_path / name))) == expected


def test_a_folder_is_read_in_sorted_order_without_hidden_files(tmp_path) -> None:
    for name, kind in (("b", ".jsonl.zst"), ("a/deep", ".txt.gz"), ("c", ".parquet")):
        (tmp_path / name).mkdir(parents=True)
        write(tmp_path / name, kind, [f"{name} {text}" for text in EXAMPLES])
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.txt").write_text("hidden")
    (tmp_path / ".DS_Store").write_bytes(b"\xff\xfe")
    expected = [f"{name} {text}" for name in ("a/deep", "b", "c") for text in EXAMPLES]
    assert list(documents(tmp_path)) == expected


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (".txt", ".jsonl")])
def test_a_truncated_or_foreign_file_is_an_error(tmp_path, kind) -> None:
    path = write(tmp_path, kind, [str(i) * 50 for i in range(2000)])
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], content[:-3], b"not what its name says"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{path} cannot be read"):
            list(documents(path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text"', "line 2 is not JSON"),
        (
            "a.jsonl",
            b'\n{"body": "a", "id": 1}',
            r"line 2 has no text under 'text'; .*'body', 'id'",
        ),
        ("a.jsonl", b'{"text": 5}', "line 1 has no text"),
        ("a.jsonl", b'["text"]', "line 1 has no text .* list"),
    ],
)
def test_errors_name_the_file_and_the_line(tmp_path, name, content, message) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{tmp_path / name}.* {message}"):
        list(documents(tmp_path))


def test_the_key_names_a_field_or_a_column(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "a"}\n')
    parquet.write_table(
        pa.table({"body": ["b", None, "c"], "n": [1, 2, 3]}), tmp_path / "b.parquet"
    )
    assert list(documents(tmp_path, key="body")) == ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"has no column 'text'; it has \['body', 'n'\]"):
        list(documents(tmp_path / "b.parquet"))
    with pytest.raises(ValueError, match="column 'n' holds int, not text"):
        list(documents(tmp_path / "b.parquet", key="n"))
    with pytest.raises(ValueError, match="nowhere does not exist"):
        documents(tmp_path / "nowhere")  # at the call, not at the first document


@pytest.mark.parametrize(
    ("kind", "module"), [(".txt.zst", "pyarrow"), (".parquet", "pyarrow"), ("hub", "datasets")]
)
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, kind, module) -> None:
    local = kind != "hub"
    texts = documents(write(tmp_path, kind, EXAMPLES)) if local else hf_documents("some/dataset")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{module}: pip install -e '\.\[lab\]'"):
        next(texts)


def test_a_dataset_gives_the_same_documents(tmp_path, monkeypatch) -> None:
    """The datasets library reads a local file here, because the hub may be out of reach."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = str(write(tmp_path, ".parquet", [*EXAMPLES, " "]))
    assert list(hf_documents("parquet", data_files=path)) == EXAMPLES
    with pytest.raises(ValueError, match="dataset parquet has no column 'body'; it has"):
        next(hf_documents("parquet", column="body", data_files=path))


def test_a_dataset_is_streamed(monkeypatch) -> None:
    import datasets

    calls: list[tuple] = []

    def load(*names: object, **options: object) -> list[dict[str, str]]:
        calls.append((names, options))
        if len(calls) > 1:
            raise ConnectionError("no route")
        return [{"body": "a"}, {"body": "b"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert list(hf_documents("owner/set", "part", "validation", "body")) == ["a", "b"]
    assert calls == [(("owner/set", "part"), {"split": "validation", "streaming": True})]
    with pytest.raises(ValueError, match=r"owner/set \(part\), split 'train', cannot be opened"):
        next(hf_documents("owner/set", "part"))


def test_the_standard_library_is_its_source_files_without_tests() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    texts = list(stdlib_documents())
    assert len(texts) > 400
    names = ("argparse.py", "asyncio/base_events.py", "json/decoder.py", "zipapp.py")
    positions = [texts.index((root / name).read_text("utf-8")) for name in names]
    assert positions == sorted(positions)
    assert not any("import pytest" in text for text in texts), "site-packages is left out"
    tests = [path for name in ("test", "unittest") for path in (root / name).rglob("test_a*.py")]
    assert not {path.read_bytes().decode("utf-8", "replace") for path in tests} & set(texts)


def test_heavy_packages_are_imported_only_when_needed() -> None:
    """Training needs numpy alone; preparation needs neither torch nor the readers of formats."""
    code = (
        "import sys, numpy; before = set(sys.modules); import angular_lab.data.batches; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(*new - {'angular_lab', 'numpy'} - set(sys.stdlib_module_names)); "
        "import angular_lab.data.prepare; "
        "print(*{'torch', 'pyarrow', 'datasets', 'tokenizers'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not run.stdout.split()
