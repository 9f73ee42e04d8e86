"""A run and the named run that it started from: what was changed, and where it stands."""

from typing import Any

from angular_lab.config.named_runs import NAMED_RUNS
from angular_lab.config.overrides import as_typed, differences
from angular_lab.config.spec import Spec, get
from angular_lab.evaluations import read_evaluations
from angular_lab.inspect.listing import Summary, age, summarize
from angular_lab.report.tables import text_table
from angular_lab.run_folder import Run
from angular_lab.text import command

# set by the commands `branch` and `trunk`, not by hand
NOT_TYPED = ("name", "parent", "parent_step")


def base_of(spec: Spec) -> tuple[str, Spec]:
    """Return the named run that a spec started from; the defaults if it has another name."""
    if spec.name in NAMED_RUNS:
        return f"the named run {spec.name}", NAMED_RUNS[spec.name]()
    return "the defaults", Spec()


def changed(spec: Spec) -> dict[str, tuple[str, str]]:
    """Return the settings that differ from the named run: its value, and the run's own."""
    _, base = base_of(spec)
    names = [key for key in differences(base, spec) if key not in NOT_TYPED]
    return {key: (as_typed(get(base, key)), as_typed(get(spec, key))) for key in names}


def describe_run(run: Run) -> str:
    """Return where a run stands, and what differs from its named run, as text."""
    name, _ = base_of(run.spec)
    changes = changed(run.spec)
    parts = [_facts(run, summarize(run))]
    if changes:
        rows = [
            {"": key, run.spec.name: old, "this run": new} for key, (old, new) in changes.items()
        ]
        parts.append(f"Settings that differ from {name}\n{_indented(text_table(rows))}")
    else:
        parts.append(f"No setting differs from {name}.")
    if evaluations := read_evaluations(run.folder, []):
        listed = text_table([evaluation.row for evaluation in evaluations])
        parts.append("Evaluations on other text\n" + _indented(listed))
    if command := _command(run.spec, changes):
        parts.append(f"The same run again\n  {command}")
    return "\n\n".join(parts)


def _indented(table: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in table.splitlines())


def _facts(run: Run, summary: Summary) -> str:
    info = run.info
    losses = "none yet"
    if summary.last_loss is not None:
        losses = f"{summary.last_loss:.4f}, best {summary.best_loss:.4f}"
    facts: dict[str, Any] = {
        "run": run.folder,
        "state": f"{summary.state}, last wrote {age(summary.age)} ago",
        "reason": summary.reason,
        "steps": f"{summary.step:,} of {summary.steps:,}",
        "tokens": f"{summary.tokens:,}",
        "val loss": losses,
        "parent": f"{run.spec.parent} at step {run.spec.parent_step:,}" if run.spec.parent else "",
        "data": f"{run.spec.data}, fingerprint {info.data[:12] or 'unknown'}",
        "versions": ", ".join(f"{key} {value}" for key, value in info.versions.items()),
        "commit": f"{info.git.get('commit', '')[:12]}{_with_changes(info.git)}",
    }
    return "\n".join(f"{key:10}{value}" for key, value in facts.items() if str(value))


def _with_changes(git: dict[str, Any]) -> str:
    return ", with uncommitted changes" if git.get("changed") else ""


def _command(spec: Spec, changes: dict[str, tuple[str, str]]) -> str:
    """Return the command that trains the same run; "" where there is no single one."""
    if spec.parent or spec.name not in NAMED_RUNS or spec.optim.retired:
        return ""
    return command("train", spec.name, *(f"{key}={value}" for key, (_, value) in changes.items()))
