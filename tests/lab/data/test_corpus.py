"""Documents: the same ones from every kind of file, and errors that name the file."""

import bz2
import gzip
import json
import lzma
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from angular_lab.data.corpus import documents, hf_documents, stdlib_documents

SEPARATOR = "<|endoftext|>"
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".xz": lzma.compress, ".gz": gzip.compress, ".bz2": bz2.compress,
    ".zst": zstandard.compress,
}  # fmt: skip
# A byte order mark at the start of a file is no text, so none is asked for.
TEXTS = st.lists(
    st.text(st.characters(exclude_characters="\ufeff", exclude_categories=["Cs"]), min_size=1)
    | st.sampled_from(["two\nlines\n", "\r\n x \r", f"a {SEPARATOR} inside", "\u2028", " \n"]),
    max_size=6,
)
SOME = ["first\nsecond", "zwei\n\n", "drei \u00e9\u4e16\U0001f600", "four"]


def visible(texts: list[str]) -> list[str]:
    return [text for text in texts if text.strip()]


def write(folder: Path, kind: str, texts: list[str]) -> Path:
    """One file of the kind named by its suffixes."""
    base, _, packed = kind.rpartition(".") if kind.count(".") > 1 else (kind, "", "")
    path = folder / f"docs{kind}"
    if base == ".parquet":
        parquet.write_table(pa.table({"n": list(range(len(texts))), "text": texts}), path)
        return path
    if base == ".jsonl":
        content = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts)
    else:
        content = f"\n{SEPARATOR}\n".join(texts)
    path.write_bytes(COMPRESS[f".{packed}" if packed else ""](content.encode()))
    return path


KINDS = [base + packed for base in (".txt", ".jsonl") for packed in COMPRESS] + [".parquet"]


@given(texts=TEXTS)
def test_every_kind_of_file_gives_the_same_documents(tmp_path_factory, texts) -> None:
    folder = tmp_path_factory.mktemp("kinds")
    for kind in KINDS:
        assert list(documents(write(folder, kind, texts))) == visible(texts), kind


def test_windows_line_ends_separate_too(tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(f"one\r\n{SEPARATOR}\r\ntwo\r\n\r\n{SEPARATOR}\r\n".encode())
    assert list(documents(path)) == ["one", "two\r\n"]


def test_without_separators_a_file_is_one_document_to_the_byte(tmp_path) -> None:
    path = tmp_path / "program.py"
    path.write_bytes(b"x = 1\r\ny = 2\n\n")
    assert list(documents(str(path))) == ["x = 1\r\ny = 2\n\n"]


def test_a_byte_order_mark_is_no_text(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfb")
    assert list(documents(tmp_path)) == ["a", "b"]


def test_several_frames_are_one_file(tmp_path) -> None:
    for suffix in (".gz", ".xz", ".bz2", ".zst"):
        path = tmp_path / f"a.txt{suffix}"
        path.write_bytes(b"".join(COMPRESS[suffix](part) for part in (b"one ", b"two")))
        assert list(documents(path)) == ["one two"]


def test_a_folder_is_its_files_in_sorted_order(tmp_path) -> None:
    folders = [tmp_path / name for name in ("b", "a/deep", "c")]
    kinds = [".jsonl.zst", ".txt.gz", ".parquet"]
    for i, (folder, kind) in enumerate(zip(folders, kinds, strict=True)):
        folder.mkdir(parents=True)
        write(folder, kind, [f"{i} {text}" for text in SOME])
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.txt").write_text("hidden")
    (tmp_path / ".DS_Store").write_bytes(b"\xff\xfe")
    assert list(documents(tmp_path)) == [f"{i} {text}" for i in (1, 0, 2) for text in SOME]


def test_the_key_is_a_choice(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "a"}\n')
    parquet.write_table(pa.table({"content": ["b", None, "c"]}), tmp_path / "b.parquet")
    assert list(documents(tmp_path, key="content")) == ["a", "b", "c"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (".txt", ".jsonl")])
def test_a_truncated_file_is_an_error_and_not_a_shorter_one(tmp_path, kind) -> None:
    path = write(tmp_path, kind, [str(i) * 50 for i in range(2000)])
    content = path.read_bytes()
    for keep in (len(content) // 2, len(content) - 3):
        path.write_bytes(content[:keep])
        with pytest.raises(ValueError, match=f"{path} cannot be read"):
            list(documents(path))
    path.write_bytes(b"not what its name says")
    with pytest.raises(ValueError, match=f"{path} cannot be read"):
        list(documents(path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text"', "line 2 is no JSON"),
        (
            "a.jsonl",
            b'\n{"body": "a", "id": 1}',
            r"line 2 has no text under 'text'; .*'body', 'id'",
        ),
        ("a.jsonl", b'{"text": 5}', "line 1 has no text"),
        ("a.jsonl", b'["text"]', "line 1 has no text .* list"),
    ],
)
def test_what_is_no_text_is_named(tmp_path, name, content, message) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{tmp_path / name}.* {message}"):
        list(documents(tmp_path))


def test_columns_are_checked(tmp_path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"n": [1], "body": ["x"]}), path)
    with pytest.raises(ValueError, match=r"has no column 'text'; it has \['n', 'body'\]"):
        list(documents(path))
    with pytest.raises(ValueError, match="column 'n' holds int, not text"):
        list(documents(path, key="n"))


def test_a_missing_source_is_noticed_at_the_call(tmp_path) -> None:
    with pytest.raises(ValueError, match="nowhere does not exist"):
        documents(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("kind", "module"), [(".txt.zst", "pyarrow"), (".parquet", "pyarrow"), ("hub", "datasets")]
)
def test_missing_packages_are_named_with_the_extra(tmp_path, monkeypatch, kind, module) -> None:
    texts = (
        hf_documents("some/dataset") if kind == "hub" else documents(write(tmp_path, kind, SOME))
    )
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{module}: pip install -e '\.\[lab\]'"):
        next(texts)


def test_a_dataset_streams_the_same_documents(tmp_path, monkeypatch) -> None:
    """Read from a local file by the library itself; only its hub is out of reach here."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for kind, builder in ((".jsonl", "json"), (".parquet", "parquet")):
        path = write(tmp_path, kind, [*SOME, " "])
        assert list(hf_documents(builder, data_files=str(path))) == SOME
    with pytest.raises(ValueError, match="dataset json has no column 'body'; it has"):
        next(hf_documents("json", column="body", data_files=str(tmp_path / "docs.jsonl")))


def test_a_dataset_is_asked_for_as_a_stream(monkeypatch) -> None:
    import datasets

    asked: list[tuple] = []

    def load(*names: object, **options: object) -> list[dict[str, str]]:
        asked.append((names, options))
        return [{"body": "a"}, {"body": "b"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert list(hf_documents("owner/set", "part", "validation", "body")) == ["a", "b"]
    assert asked == [(("owner/set", "part"), {"split": "validation", "streaming": True})]

    def unreachable(*names: object, **options: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"owner/set \(part\), split 'train', cannot be opened"):
        next(hf_documents("owner/set", "part"))


def test_the_standard_library_is_its_files_without_tests() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    found = list(stdlib_documents())
    assert found == list(stdlib_documents())
    assert len(found) > 400
    for name in ("json/decoder.py", "asyncio/base_events.py", "argparse.py"):
        assert (root / name).read_text("utf-8") in found
    order = [
        found.index((root / name).read_text()) for name in ("ast.py", "json/tool.py", "zipapp.py")
    ]
    assert order == sorted(order)
    marker = "import pytest"  # this environment's packages, or somebody's tests
    assert sum(marker in text for text in found) == 0
    for excluded in ("test/test_json", "site-packages", "unittest/test", "lib2to3/tests"):
        for path in sorted((root / excluded).rglob("*.py"))[:20]:
            text = path.read_bytes().decode("utf-8", "replace")
            assert not text.strip() or text not in found


def test_reading_files_imports_no_torch() -> None:
    code = (
        "import sys, angular_lab.data.prepare as _; print(*({'torch', 'pyarrow'} & {*sys.modules}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not run.stdout.split()
