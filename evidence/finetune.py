"""Fine-tuning: each method at the best of its grid, on a model that AngularMuown pre-trained and on
one that AdamW pre-trained."""

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from angular_lab.run_folder import RunFolder
from evidence.kept import RESULTS, Kept, Rows, read_json, unpack
from evidence.measures import Facts, spread

FILES = {"own": "finetune_h200", "adamw": "finetune_adamw_base_h200"}  # by who pre-trained
KEYS = {
    "AdamW, full": "adamw_full",
    "AngularMuown, full": "ours_full",
    "AngularMuown, full, WSD with kappa": "ours_full_kappa",
    "Muon, full": "muon_full",
    "AdamW, LoRA": "adamw_lora",
    "AngularMuown, LoRA": "ours_lora",
}
LOSSES = {"loss": "new", "prose_loss": "old"}
SHOWN = {  # settings as the library calls them
    "aux_ratio": lambda s: f"`aux_lr` {s['lr'] * s['aux_ratio']:.2g}",
    "b_ratio": lambda s: f"B {s['b_ratio']:g} x",
    "aux_lr": lambda s: f"`aux_lr` {s['aux_lr']:.2g}",
    "radius_lr": lambda s: f"`radius_lr` {s['radius_lr']:.2g}",
}
Row = dict[str, Any]


def _rows(base: str) -> dict[str, Row]:
    rows = {KEYS[row["method"]]: row for row in read_json(FILES[base])["summary"]}
    return {key: rows[key] for key in KEYS.values() if key in rows}


def facts(kept: Kept) -> Facts:
    rows = {base: _rows(base) for base in FILES}
    file = read_json(FILES["own"])
    trials = [t for base in FILES for t in read_json(FILES[base])["trials"]]
    [steps] = {t["steps"] for t in trials}
    return {
        "finetune": {
            **{base: {key: _method(row) for key, row in of.items()} for base, of in rows.items()},
            "trials": len(trials),
            "steps": steps,
            "train_tokens_M": file["text_tokens"]["train"] / 1e6,
            "held_out_tokens_M": file["text_tokens"]["val"] / 1e6,
            "before": {base: read_json(name)["base"]["loss"] for base, name in FILES.items()},
            "before_old": {b: read_json(name)["base"]["prose_loss"] for b, name in FILES.items()},
            "full_trials": _trials(rows, "full"),
            "lora_trials": {
                key: spread(rows[base][key]["trials_of_the_first_seed"] for base in FILES)
                for key in ("adamw_lora", "ours_lora")
            },
            "lora_lr_twice_the_best": min(_losses("adamw_lora", "lr", 0.016)),
            **_claims(rows),
            "bases_repeat_kept_runs": _bases_repeat(kept),
        }
    }


def _method(row: Row) -> Facts:
    found: Facts = {"settings": row["settings"]}
    for key, name in LOSSES.items():
        low, high = row[key]["minus_adamw_interval"]
        found[name] = row[key]["mean"]
        found[f"{name}_above_adamw"] = {"mean": row[key]["minus_adamw"], "low": low, "high": high}
    return found


def _trials(rows: dict[str, dict[str, Row]], mode: str) -> Facts:
    return spread(
        row["trials_of_the_first_seed"]
        for of in rows.values()
        for key, row in of.items()
        if f"_{mode}" in key
    )


def _losses(key: str, axis: str, value: float) -> Iterable[float]:
    """Return the losses of the trials of a method at a value of a setting."""
    for name in FILES.values():
        for trial in read_json(name)["trials"]:
            if KEYS[trial["method"]] == key and trial["settings"][axis] == value:
                yield trial["loss"]


def _claims(rows: dict[str, dict[str, Row]]) -> Facts:
    def ends(key: str, loss: str) -> list[tuple[float, float]]:
        found = (rows[base][key][loss]["minus_adamw_interval"] for base in FILES)
        return [(low, high) for low, high in found]

    others = [row for key, row in rows["own"].items() if key.endswith(("_full", "_kappa"))]
    radius = [max(losses) - min(losses) for losses in map(_radius_losses, FILES.values()) if losses]
    return {
        "adamw_lower_full": all(low > 0 for low, _ in ends("ours_full", "loss"))
        and min(others, key=lambda row: row["loss"]["mean"])["method"] == "AdamW, full",
        "ours_lower_lora": all(high < 0 for _, high in ends("ours_lora", "loss")),
        "ours_forgets_more_full": all(low > 0 for low, _ in ends("ours_full", "prose_loss")),
        "ours_forgets_less_lora": all(high < 0 for _, high in ends("ours_lora", "prose_loss")),
        "radius_effect_full": max(radius),
    }


def _radius_losses(name: str) -> list[float]:
    """Return the losses of full fine-tuning that differ from the best in `radius_lr` alone."""
    content = read_json(name)
    [best] = [r["settings"] for r in content["summary"] if r["method"] == "AngularMuown, full"]
    return [
        t["loss"]
        for t in content["trials"]
        if (t["method"], t["seed"]) == ("AngularMuown, full", 0)
        and all(t["settings"][axis] == best[axis] for axis in ("lr", "aux_lr"))
    ]


def _bases_repeat(kept: Kept) -> bool:
    """True if the bases have the logs of the kept runs with their settings, to the byte."""
    with TemporaryDirectory() as folder:
        unpack(RESULTS / "again" / "finetune-bases.tar.xz", Path(folder))
        runs = [RunFolder(path) for path in Path(folder).glob("runs/*")]
        return len(runs) == len(FILES) and all(
            run.metrics_path.read_bytes()
            == RunFolder(kept.runs / run.path.name).metrics_path.read_bytes()
            for run in runs
        )


def table(base: str) -> Rows:
    """Return the methods at their best, on the seeds that judge."""
    head = ["method", "chosen on seed 0", "new text", "minus AdamW", "old text"]
    rows = []
    for row in _rows(base).values():
        settings = row["settings"]
        chosen = [f"`lr` {settings['lr']:g}", *(SHOWN[a](settings) for a in settings if a != "lr")]
        cells = [row["method"].replace("kappa", "κ"), ", ".join(chosen)]
        rows.append([*cells, f"{row['loss']['mean']:.4f}", _gap(row, "loss")])
        rows[-1] += [f"{row['prose_loss']['mean']:.2f}", _gap(row, "prose_loss", 2)]
    return [[*head, "minus AdamW, old text"], *rows]


def _gap(row: Row, key: str, digits: int = 3) -> str:
    if row["method"].startswith("AdamW"):
        return "-"
    low, high = row[key]["minus_adamw_interval"]
    mean = row[key]["minus_adamw"]
    return f"{mean:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"
