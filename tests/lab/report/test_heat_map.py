"""The heat map of angles by layer."""

from math import isnan
from pathlib import Path

import pytest

from angular_lab.report.figures.heat_map import heat_map, layer_of, role_of
from angular_lab.report.figures.plots import Image, save
from angular_lab.report.figures.sweep_figures import sweep_figures
from angular_lab.report.read import collect
from angular_lab.report.report import make_report
from angular_lab.report.single_runs import HEAT_MAPS, single_section
from angular_lab.run_folder import Run, RunFolder, read_run
from tests.lab.report.made import OURS, choosing, spec_of, write_run

NAMES = [
    f"layers.{i}.{role}" for i in range(12) for role in ("attn.qkv.weight", "mlp.experts.down")
]


def write_angles(folder: Path, steps: range, names: list[str] = NAMES, scale: float = 1.0) -> None:
    run = RunFolder(folder)
    for step in steps:
        angles = {name: scale * (i + 1) / step for i, name in enumerate(names)}
        run.append(run.angles_path, {"step": step, "angles": angles})


def made(folder: Path) -> Run:
    run = read_run(write_run(folder, spec_of(), 3.0), [])
    assert run is not None
    return run


def image_of(runs: list[Run]) -> Image:
    figure = heat_map(runs, "key", "ours", [])
    assert figure is not None
    assert figure.panel.image is not None
    return figure.panel.image


def test_rows_are_grouped_by_kind_and_sorted_by_layer(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    write_angles(run.folder, range(10, 60, 10))
    image = image_of([run])
    assert image.groups == [("attn.qkv", 12), ("mlp.experts.down", 12)]
    assert image.edges == [5, 15, 25, 35, 45, 55]
    # the angle of parameter i at step s is (i + 1) / s, and each layer has two parameters
    assert [row[0] for row in image.rows[:3]] == pytest.approx([0.1, 0.3, 0.5])
    assert [row[0] for row in image.rows[12:15]] == pytest.approx([0.2, 0.4, 0.6])
    assert image.rows[0] == pytest.approx([1 / step for step in range(10, 60, 10)])


def test_names_of_parameters_divide_into_layer_and_kind() -> None:
    assert (layer_of("layers.11.attn.qkv.weight"), role_of("layers.11.attn.qkv.weight")) == (
        *(11, "attn.qkv"),
    )
    assert (layer_of("proj.weight"), role_of("proj.weight")) == (-1, "proj")


def test_what_was_not_measured_has_no_colour(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    write_angles(run.folder, range(10, 30, 10), NAMES[:2])
    write_angles(run.folder, range(30, 50, 10), NAMES[:1])
    folder = RunFolder(run.folder)
    folder.append(folder.angles_path, {"step": 50, "angles": {NAMES[0]: None}})
    image = image_of([run])
    assert [isnan(value) for value in image.rows[1]] == [False, False, True, True]
    assert heat_map([made(tmp_path / "none")], "key", "none", []) is None


def test_a_long_run_is_thinned(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    write_angles(run.folder, range(1, 1001), NAMES[:1])
    assert 200 <= len(image_of([run]).rows[0]) <= 300


def test_the_end_of_a_cooldown_does_not_take_all_colours(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    write_angles(run.folder, range(10, 400, 10), NAMES[:1])
    write_angles(run.folder, range(400, 401), NAMES[:1], scale=1e-6)
    lowest = image_of([run]).lowest
    assert lowest is not None
    assert 1 / 400 < lowest < 0.1 / 2


def test_a_sweep_shows_our_method_from_its_trunk_to_its_last_cooldown(tmp_path: Path) -> None:
    root = choosing(tmp_path / "store")
    for name in (OURS.replace("_", "-"), "adamw"):
        for folder in (root / "runs").glob(f"{name}-lr0.02-seed0*"):
            spec = RunFolder(folder).read_spec()
            # the trunk's angles after the branch point have no part in the path
            write_angles(folder, range(spec.parent_step + 20, 201, 20), scale=1 + spec.parent_step)
    (sweep,), _ = collect([root], [])
    figure = next(f for f in sweep_figures(sweep) if f.key.endswith("angles-by-layer"))
    assert "angular_muown at lr 0.02, seed 0" in figure.caption
    assert "layers 0 to 11 from top to bottom" in figure.caption
    image = figure.panel.image
    assert image is not None
    assert image.rows[0][:9] == pytest.approx([1 / s for s in range(20, 200, 20)])
    assert image.rows[0][9] == pytest.approx(181 / 200), "the cooldown starts at step 180"


def test_single_runs_have_a_heat_map_each_up_to_a_few(tmp_path: Path) -> None:
    runs = [made(tmp_path / f"run{i}") for i in range(HEAT_MAPS + 2)]
    for run in runs:
        write_angles(run.folder, range(10, 60, 10))
    figures = single_section(runs, "single", "Single runs").figures
    assert sum(figure.panel.image is not None for figure in figures) == HEAT_MAPS


@pytest.mark.usefixtures("drawn")
def test_it_is_one_picture_on_the_page(tmp_path: Path) -> None:
    """Thousands of rectangles would make the page slow."""
    run = made(tmp_path / "run")
    write_angles(run.folder, range(10, 400, 10))
    figure = heat_map([run], "cells", "ours", [])
    assert figure is not None
    text = save([figure.panel], tmp_path / "cells")
    assert text.count("<image") >= 1
    assert text.count("<path") < 60
    for label in ("attn.qkv", "mlp.experts.down", "mean angle (rad)"):
        assert f">{label}<" in text
    page = make_report([tmp_path / "run"], tmp_path / "report")
    assert "single-runs-1-angles-by-layer-1" in page.read_text()
