"""`angular-lab sweep` continues from the kept archives."""

import json
from pathlib import Path

import pytest

from angular_lab.experiments.comparison import experiment
from angular_lab.run_folder import trunk_name
from angular_lab.sweeps.sweep import Sweep
from evidence.kept import RESULTS, unpack

ARCHIVES = sorted((RESULTS / "s").glob("*.tar.xz"))
# Variants whose options the library no longer has.
REMOVED = {"column-gains", "exact-angle", "row-second-moment", "tangent-momentum"}


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name.partition(".")[0])
def test_finished_runs_of_an_archive_are_recognized(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = archive.name.partition(".")[0]
    unpack(archive, tmp_path)
    root = tmp_path / f"{name}-s"
    data = "data/one-pass" if name.startswith("one-pass") else "data/mixture"
    monkeypatch.chdir(tmp_path)
    Path(data).mkdir(parents=True)  # a sweep with runs to make requires its corpus
    entries = json.loads((root / "sweep.json").read_text())["entries"]
    sweep = Sweep(experiment(name, "s"), root, data)
    planned = {entry.folder.name for entry in sweep.entries}
    done = {trunk_name(entry) for entry in entries if entry["status"] == "done"}
    assert done
    removed = {folder.partition("-lr")[0] for folder in done - planned}
    assert removed == (REMOVED if name == "leads" else set())
    if removed:  # sweep.json is not rewritten without them
        with pytest.raises(ValueError, match=f"{len(removed)} finished run"):
            sweep.check()
        return
    sweep.check()
    with pytest.raises(ValueError, match=rf"{len(done)} finished run.*: give --data {data}, or"):
        Sweep(experiment(name, "s"), root).check()
