"""The wheel, in a clean environment: what a user gets who installs the package next to torch."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow
# Tests of the library that need torch, pytest, hypothesis and, for the references, numpy.
QUICK = ("test_laws.py", "test_parity.py", "test_contract.py")
SELECTED = ("-m", "not slow and not gpu and not fuzz", "-k", "not TangentPolar")
ONE_STEP = """
import sys, warnings
import torch  # warns that it has no numpy
warnings.simplefilter("error")
import angular_muown
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
optimizer = angular_muown.AngularMuown.for_model(model, lr=0.02, head=None)
before = model[0].weight.detach().clone()
model(torch.ones(2, 8)).square().mean().backward()
optimizer.step()
assert not torch.equal(model[0].weight, before)
assert "numpy" not in sys.modules
print(angular_muown.__file__)
"""


def _with_requirements(names: Iterable[str]) -> dict[str, Path]:
    """Return the distributions with all that they require, and the folder of each."""
    found: dict[str, Path] = {}
    todo = list(names)
    while todo:
        installed = distribution(todo.pop())
        name = installed.metadata["Name"]
        if name in found:
            continue
        found[name] = Path(str(installed.locate_file("")))
        for line in installed.requires or ():
            required = Requirement(line)
            if required.marker is None or required.marker.evaluate({"extra": ""}):
                todo.append(required.name)
    return found


class CleanEnvironment:
    """A virtual environment that links to chosen packages of this one: torch takes no time."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False)
        self.bin = folder / "bin"
        (self.packages,) = folder.glob("lib/python*/site-packages")

    def add(self, *names: str) -> None:
        """Link to the distributions and to all that they require."""
        for name, source in _with_requirements(names).items():
            for entry in {file.parts[0] for file in distribution(name).files or ()} - {".."}:
                link = self.packages / entry
                if not link.exists():
                    link.symlink_to(source / entry)

    def install(self, wheel: Path) -> None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        target = ["--python", str(self.bin / "python")]
        subprocess.run([*pip, *target, "install", "--quiet", "--no-deps", str(wheel)], check=True)

    def run(self, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment, without anything from the source tree."""
        env = {key: x for key, x in os.environ.items() if not key.startswith(("PYTHON", "PYTEST"))}
        first = str(self.bin / command[0])
        return subprocess.run(
            [first, *command[1:]], cwd=cwd, env=env, capture_output=True, text=True
        )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    made = subprocess.run([*build, str(ROOT)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    environment = CleanEnvironment(tmp_path_factory.mktemp("clean"))
    environment.add("torch")
    environment.install(wheel)
    return environment


def test_the_wheel_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    """Every file of the packages, templates and type markers included; no tests, no caches."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    files = (path for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert names == {path.relative_to(source).as_posix() for path in files}
    assert {"angular_muown/py.typed", "angular_lab/report/templates/page.html"} <= names


def test_the_library_takes_a_step_with_torch_alone(clean: CleanEnvironment, tmp_path: Path) -> None:
    for package in ("numpy", "matplotlib", "pytest"):
        missing = clean.run("python", "-c", f"import {package}", cwd=tmp_path)
        assert "ModuleNotFoundError" in missing.stderr, f"{package} in a clean environment"
    step = clean.run("python", "-c", ONE_STEP, cwd=tmp_path)
    assert step.returncode == 0, step.stderr
    assert Path(step.stdout.strip()).is_relative_to(clean.packages)


def test_the_lab_says_what_to_install(clean: CleanEnvironment, tmp_path: Path) -> None:
    for arguments in (("--help",), ("train", "nano")):
        answer = clean.run("angular-lab", *arguments, cwd=tmp_path)
        assert answer.returncode == 2
        assert answer.stdout == ""
        assert answer.stderr == (
            "error: angular-lab needs matplotlib, numpy, tqdm: install angular-muown with its lab "
            "extra, for example pip install '.[lab]'\n"
        )


def test_the_quick_tests_pass_against_the_wheel(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("tests")
    environment = CleanEnvironment(folder / "venv")
    environment.add("torch", "numpy", "pytest", "hypothesis")
    environment.install(wheel)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    gpu\n    fuzz\n")
    files = [f"tests/library/{name}" for name in QUICK]
    run = environment.run("python", "-m", "pytest", "-q", *SELECTED, *files, cwd=folder)
    assert run.returncode == 0, run.stdout + run.stderr
