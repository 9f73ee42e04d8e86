"""Rules of the repository: function sizes, imports, links, and documented code that runs."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from angular_lab.data.prepare import prepare_stdlib
from angular_lab.training.start import STDLIB_FOLDER
from site_hooks.references import filled
from tests.programs import run_program

ROOT = Path(__file__).parents[1]
FOLDERS = "src", "evidence", "site_hooks"
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
# The packages that each file or folder of the integrations may import.
HOSTS = {
    "lightning": {"lightning"},
    "megatron": {"megatron"},
    "optax": {"jax", "optax"},
    "torchtitan": {"torchtitan"},
}
# Supported hosts that no integration imports: their objects are recognized without an import.
OTHER_HOSTS = {
    "accelerate", "flax", "peft", "tensorboard", "trackio", "transformers", "trl", "wandb",
}  # fmt: skip
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def test_functions_stay_short() -> None:
    for path in SOURCES:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                assert lines <= 40, f"{path}: {node.name} has {lines} lines"


def test_import_is_quick_and_compiles_nothing(tmp_path: Path) -> None:
    """Import the library in under 50 ms after torch, without loading a compiler or a host.

    Bytecode is cached between the imports, as it is for users.
    """
    heavy = {"torch._dynamo", "triton", *OTHER_HOSTS}.union(*HOSTS.values())
    code = (
        "import time, sys, torch\n"
        "start = time.process_time()\n"
        "import angular_muown\n"
        f"heavy = {heavy!r}\n"
        "print(time.process_time() - start, not heavy.isdisjoint(sys.modules))"
    )
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    seconds = []
    for _ in range(10):  # other processes can only make it slower
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
        )
        elapsed, *loaded = run.stdout.split()
        assert loaded == ["False"]
        seconds.append(float(elapsed))
        if seconds[-1] < 0.05:
            return
    pytest.fail(f"importing angular_muown took at least {min(seconds):.3f} s, ten times")


def test_the_library_depends_only_on_torch() -> None:
    """Only the kernels may import Triton, which torch installs for GPUs.

    Only an integration may import its host.
    """
    library = ROOT / "src" / "angular_muown"
    for path in library.rglob("*.py"):
        allowed = {"torch", "angular_muown", *sys.stdlib_module_names}
        folder, *inside = path.relative_to(library).with_suffix("").parts
        allowed |= {"triton"} if folder == "kernels" else set()
        allowed |= HOSTS.get(inside[0], set()) if folder == "integrations" else set()
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                assert name.split(".")[0] in allowed, f"{path} imports {name}"


def _python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_code_blocks_about_frameworks_are_self_contained() -> None:
    """Each block imports or defines every name that it uses."""
    folder = ROOT / "docs" / "how-to" / "frameworks"
    for block in [x for path in folder.glob("*.md") for x in _python_blocks(path.read_text())]:
        run = subprocess.run(
            [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "-"],
            input=block, capture_output=True, text=True,
        )  # fmt: skip
        assert run.returncode == 0, run.stdout


def _from_root(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="session")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare the text of the programs that train, once."""
    folder = tmp_path_factory.mktemp("stdlib")
    prepare_stdlib(folder)
    return folder


@pytest.mark.parametrize("path", DOCUMENTS, ids=_from_root)
def test_documented_code_runs(path: Path, tmp_path: Path, stdlib: Path) -> None:
    """Run all blocks of a document as one program."""
    code = "\n".join(_python_blocks(path.read_text()))
    if not code:
        pytest.skip(f"{path.name} has no Python")
    (tmp_path / STDLIB_FOLDER).parent.mkdir()
    (tmp_path / STDLIB_FOLDER).symlink_to(stdlib)
    script = tmp_path / "document.py"
    script.write_text(code)
    code, output = run_program(script)
    assert code == 0, output


def test_a_program_that_fails_or_warns_is_noticed(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    for text, code, output in (
        ("print(__name__)", 0, "__main__"),
        ("import sys; sys.exit(3)", 3, ""),
        ("raise ValueError('wrong')", 1, "ValueError: wrong"),
        ("import warnings; warnings.warn('old', DeprecationWarning)", 1, "DeprecationWarning: old"),
    ):
        script.write_text(text)
        actual, printed = run_program(script)
        assert actual == code
        assert output in printed
        script.with_suffix(".out").unlink()


def _prose(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def _anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a document.

    What the site fills in counts, too: there the link leads further.
    """
    titles = re.findall(r"^#+ (.+)$", _prose(filled(path.read_text())), flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.replace(" ", "-") for title in plain}


@pytest.mark.parametrize("path", [*DOCUMENTS, ROOT / "results" / "README.md"], ids=_from_root)
def test_links_resolve(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", _prose(path.read_text())):
        if not target.startswith("http"):
            linked = path.parent / target if target else path
            assert linked.exists(), target
            assert not anchor or anchor in _anchors(linked), f"{target}#{anchor}"


@pytest.mark.parametrize(
    ("name", "source", "allowed"),
    [
        ("The lab imports only the library's public names", "", {"integrations", "plan", "theory"}),
        ("The lab imports only the library's public names", "theory", set()),
        ("The theory stands on the stages alone", "", {"stages", "theory"}),
    ],
)
def test_import_contracts_cover_every_module(name, source, allowed) -> None:
    """Each contract forbids every module that is not explicitly allowed here."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (c for c in settings["contracts"] if c["name"] == name)
    package = ROOT / "src" / "angular_muown" / source
    entries = [*package.glob("[!_]*.py"), *(x.parent for x in package.glob("*/__init__.py"))]
    modules = {".".join(x.relative_to(ROOT / "src").with_suffix("").parts) for x in entries}
    forbidden = modules - {f"angular_muown.{x}" for x in allowed}
    assert forbidden
    assert forbidden <= set(contract["forbidden_modules"])
