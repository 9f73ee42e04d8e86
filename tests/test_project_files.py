"""Files around the packages: workflows, issue forms, the lock, and what make reports."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import angular_muown

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text())
FORMS = sorted(path.name for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()


def _locked() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ("github-workflows", ".github/workflows/check.yml"),
        ("dependabot", ".github/dependabot.yml"),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
        *(("github-issue-forms", f".github/ISSUE_TEMPLATE/{name}") for name in FORMS),
        ("citation-file-format", "CITATION.cff"),
    ],
)
def test_files_match_their_schemas(schema: str, path: str) -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    run = subprocess.run([*check, path], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def _commands() -> list[str]:
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    return [step["run"] for step in steps if "run" in step]


def test_commands_of_the_workflow_exist() -> None:
    """Its make targets and test files are in the repository."""
    text = "\n".join(_commands())
    files = re.findall(r"tests/[\w/.]+", text)
    assert files
    assert all((ROOT / name).exists() for name in files)
    targets = set(re.findall(r"make (\w[\w-]*)", text))
    assert targets >= {"check", "test"}
    for target in targets:
        assert re.search(rf"^{target}:", MAKEFILE, flags=re.MULTILINE), f"make {target}"


def test_code_of_the_workflow_runs() -> None:
    (code,) = re.findall(r'python -c "(.*?)"', "\n".join(_commands()), flags=re.DOTALL)
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_supported_versions_are_tested() -> None:
    """The workflow runs every Python of the classifiers and the lowest torch that is declared."""
    tested = set(WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["python"])
    declared = [x for x in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", x)]
    assert {x.rsplit(" ", 1)[1] for x in declared} <= tested
    assert PROJECT["requires-python"] == f">={min(tested, key=Version)}"
    (torch,) = PROJECT["dependencies"]
    floor = torch.removeprefix("torch>=")
    assert f"'torch=={floor}.*'" in "\n".join(_commands())


def test_the_lock_covers_the_development_environment() -> None:
    """Every version is exact, within the declared range, without a path or a local build."""
    locked = {re.sub(r"[-_.]+", "-", name).lower(): x for name, x in _locked().items()}
    assert all(re.fullmatch(r"[\w.]+", version) for version in locked.values())
    extras = PROJECT["optional-dependencies"]
    for line in [*PROJECT["dependencies"], *(x for extra in extras.values() for x in extra)]:
        required = Requirement(line)
        name = re.sub(r"[-_.]+", "-", required.name).lower()
        if name != PROJECT["name"]:
            assert required.specifier.contains(locked[name]), f"{line}: {locked[name]} is locked"


def test_the_hook_runs_the_locked_ruff() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (ruff,) = (repo for repo in hooks if repo["repo"].endswith("ruff-pre-commit"))
    assert ruff["rev"] == f"v{_locked()['ruff']}"


def test_the_changelog_begins_with_this_version() -> None:
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert first is not None
    assert first[1] == angular_muown.__version__


@pytest.mark.parametrize(
    ("python", "message"),
    [
        (None, "missing-python not found: install Python 3.11 or later"),
        (
            '[ "$1" = --version ] && echo "Python 3.9.2"',
            "Python 3.9.2, and 3.11 or later is needed",
        ),
        ('case "$*" in *ensurepip*) exit 1;; esac', "install its venv package"),
    ],
)
def test_make_says_in_one_line_what_is_missing(
    tmp_path: Path, python: str | None, message: str
) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "hosts.txt"):
        shutil.copy(ROOT / name, tmp_path)
    interpreter = "missing-python"
    if python is not None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{python}\n")
        path.chmod(0o755)
        interpreter = str(path)
    make = ["make", "--no-print-directory", "demo", f"PYTHON={interpreter}"]
    run = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode != 0
    first, *rest = run.stderr.splitlines()
    assert message in first
    assert len(rest) == 1, "make's own line about the target"
    assert "***" in rest[0]
    assert run.stdout == ""
    assert not (tmp_path / ".venv").exists()
