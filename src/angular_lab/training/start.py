"""A run from start to end: fresh, resumed or branched off another."""

import sys
from dataclasses import replace
from math import inf
from pathlib import Path

import torch

import angular_muown
from angular_lab.config.overrides import keys
from angular_lab.config.spec import Spec
from angular_lab.data.prepare import prepare_stdlib, stdlib_place
from angular_lab.data.shards import Manifest
from angular_lab.run_folder import RunDir, base_versions
from angular_lab.training import build, checkpoint
from angular_lab.training.loggers import check_loggers
from angular_lab.training.nonfinite import NotFinite
from angular_lab.training.ranks import Ranks, start_ranks
from angular_lab.training.signals import PREEMPTED, Preempted
from angular_lab.training.trainer import Trainer

STDLIB, STDLIB_FOLDER = "stdlib", Path("data/stdlib")
# What to do about a damaged checkpoint.
RESUME_AT = "continue with --resume {}; trunk and sweep do so once the damaged folder is removed"
BRANCH_AT = "branch with --at {}"


def data_place(spec: Spec) -> Path:
    """Where its tokens lie, or will lie once they are made."""
    return stdlib_place(STDLIB_FOLDER) if spec.data == STDLIB else Path(spec.data)


def check_place(spec: Spec) -> None:
    if spec.data != STDLIB and not Path(spec.data).is_dir():
        raise ValueError(f"data={spec.data}: no such folder; make one with angular-lab prepare")


def data_folder(spec: Spec, ranks: Ranks) -> Path:
    check_place(spec)
    if spec.data == STDLIB:
        if ranks.first:
            prepare_stdlib(STDLIB_FOLDER)
        ranks.barrier()
        prepare_stdlib(STDLIB_FOLDER)  # made by now, unless this is another machine's disk
    return data_place(spec)


def train(
    spec: Spec,
    out: Path | RunDir,
    resume: bool = False,
    device: str = "",
    until: float = inf,
    models: build.Models | None = None,
    resume_step: int | None = None,
) -> RunDir:
    """Run a spec in a folder. With `resume`, continue where it stopped; a finished run returns.
    With `resume_step` as well, continue from that checkpoint and replace what came after it.
    At `until`, on the monotonic clock, the run is saved and left like one that got SIGTERM.
    A folder that the caller has claimed stays claimed."""
    ranks = build.tensor_ranks(spec, start_ranks(device))
    run = out if isinstance(out, RunDir) else RunDir(out)
    if not run.started:
        _check_new(spec, ranks)
    if not (run.started and run.done):
        _check_loggers(spec, ranks)
    mine = ranks.first and not run.claimed
    if mine:
        run.claim()
    ranks.barrier()
    try:
        if run.started:
            _check_resumable(spec, run, resume)
        if resume_step is not None:
            checkpoint.find(run.checkpoints, resume_step)
        elif run.started and run.done:
            if ranks.first:
                print(f"{run.path} is finished already", file=sys.stderr)
            return run
        trainer = Trainer(spec, run, ranks, _tokens(spec, run, ranks), until, models)
        ranks.barrier()  # all have looked before one writes
        if ranks.first:  # and only now: a spec that cannot run leaves no run
            _write_spec(trainer)
            run.clear_records()
        _restore(trainer, resume_step)
        _take_steps(trainer)
        return run
    finally:
        if mine:
            run.release()


def _check_loggers(spec: Spec, ranks: Ranks) -> None:
    """Only the first rank logs, and only its machine needs a key; all of them raise."""
    problem = ""
    if ranks.first:
        try:
            check_loggers(spec)
        except ValueError as error:
            problem = str(error)
    if problem := ranks.gather(problem)[0]:
        raise ValueError(problem)


def _check_new(spec: Spec, ranks: Ranks) -> None:
    """Refuse what cannot become a run, before anything is written."""
    spec.check()
    check_place(spec)
    if spec.tensor > 1 and ranks.world == 1:
        raise ValueError(
            f"tensor={spec.tensor} in one process: start it with torchrun --nproc-per-node "
            f"{spec.tensor}, or leave tensor at 1"
        )


def _tokens(spec: Spec, run: RunDir, ranks: Ranks) -> Path:
    """Return the folder of the run's tokens; a resumed run needs those that it was started on."""
    data = data_folder(spec, ranks)
    if run.started and run.read_data() != fingerprint(data):
        raise ValueError(f"{run.path} was started on other tokens than {data} holds now")
    return data


def _write_spec(trainer: Trainer) -> None:
    run, spec = trainer.run, trainer.spec
    if run.started:
        run.show_like(spec)
    else:
        run.write_spec(spec, versions(trainer.ranks), fingerprint(data_place(spec)))


def _take_steps(trainer: Trainer) -> None:
    """Train, and leave a record in the run folder if the run ends before its last step."""
    run, first = trainer.run, trainer.ranks.first
    try:
        trainer.train()
    except Preempted:
        if first:
            run.record_stop(PREEMPTED, trainer.step)
        raise
    except NotFinite as error:
        if first:
            run.record_divergence(str(error))
        raise


def fingerprint(data: Path) -> str:
    """Of its tokens; "" for shards without a manifest."""
    manifest = Manifest.load(data)
    return manifest.fingerprint if manifest else ""


def versions(ranks: Ranks) -> dict[str, str]:
    cuda = ranks.device.type == "cuda"
    return {
        **base_versions(),
        "angular_muown": angular_muown.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "ranks": str(ranks.world),
    }


def _restore(trainer: Trainer, step: int | None) -> None:
    """From the run's checkpoint at `step` or its newest, else from its parent's, else from the
    start. What the run logged and saved after that step is removed."""
    run, ranks = trainer.run, trainer.ranks
    if checkpoint.steps(run.checkpoints):
        _load(trainer, checkpoint.find(run.checkpoints, step), RESUME_AT)
    elif trainer.spec.parent:
        _load(trainer, _branch_point(run, trainer.spec), BRANCH_AT)
    ranks.barrier()  # all have read before one removes
    if ranks.first:
        run.reopen()
        # Checkpoints first: a later one without its log lines would leave a gap in the log.
        checkpoint.drop_after(run.checkpoints, trainer.step)
        run.rewind(trainer.step)
        checkpoint.clean(run.checkpoints)
    ranks.barrier()


def _load(trainer: Trainer, source: Path, how: str) -> None:
    try:
        trainer.restore(source)
    except checkpoint.DamagedError as error:
        raise error.advise(how) from None
    if trainer.ranks.first:
        print(f"{trainer.run.path}: continues after step {trainer.step}", file=sys.stderr)


def _branch_point(run: RunDir, spec: Spec) -> Path:
    source = checkpoint.step_folder(_parent(run, spec).checkpoints, spec.parent_step)
    if not source.exists():
        raise ValueError(f"{source} is gone: {run.path} cannot start from its parent")
    return source


def _parent(run: RunDir, spec: Spec) -> RunDir:
    """Where the spec says, or beside this run if the folder of runs was moved."""
    beside = run.path.parent / Path(spec.parent).name
    return RunDir(spec.parent if Path(spec.parent).exists() else beside)


def _check_resumable(spec: Spec, run: RunDir, resume: bool) -> None:
    if not resume:
        raise ValueError(
            f"{run.path} holds a run already: add --resume auto to go on, or choose another --out"
        )
    before = run.read_spec().shown_like(spec)
    if spec.parent and _parent(run, before).path.resolve() == _parent(run, spec).path.resolve():
        before = replace(before, parent=spec.parent)  # one folder by two names
    if before.data != spec.data and _has_tokens(run, spec):
        before = replace(before, data=spec.data)
    if before == spec:
        return
    differences = [
        f"{key}={_get(before, key)!r} (now {_get(spec, key)!r})"
        for key in keys(spec)
        if _get(before, key) != _get(spec, key)
    ]
    raise ValueError(
        f"{run.path} was started with {', '.join(differences)}: the same, or a new --out"
    )


def _has_tokens(run: RunDir, spec: Spec) -> bool:
    """Whether the spec's folder holds the run's tokens; False where nothing tells."""
    stored = run.read_data()
    return stored != "" and stored == fingerprint(data_place(spec))


def _get(spec: object, key: str) -> object:
    for part in key.split("."):
        spec = getattr(spec, part)
    return spec


def branch_spec(run: RunDir, at: int, decay: int) -> Spec:
    """The spec of a cool-down of `decay` steps that starts from the run's checkpoint at `at`."""
    spec = run.read_spec()
    kept = checkpoint.steps(run.checkpoints)
    if spec.schedule.kind == "wsd" and at > spec.steps - spec.decay_steps:
        raise ValueError(
            f"step {at} of {run.path} lies in its cool-down, which starts at "
            f"{spec.steps - spec.decay_steps}: a branch would raise the learning rate again"
        )
    if at not in kept:
        raise ValueError(
            f"{run.path} has no checkpoint at step {at}: it keeps {kept or 'none'}; pin branch "
            "points with pins=STEP,STEP"
        )
    if decay < 1:
        raise ValueError(f"a cool-down of {decay} steps: it must have at least one")
    return replace(
        spec,
        steps=at + decay,
        pins="",
        parent=str(run.path),
        parent_step=at,
        schedule=replace(spec.schedule, kind="wsd", decay_steps=decay),
    )


def trunk_spec(spec: Spec, ends: list[tuple[int, float]]) -> tuple[Spec, list[tuple[int, int]]]:
    """A constant-rate trunk with pinned branch points, and for each of `ends`, a horizon and the
    share of it that is cooled down, the branch as (start, length)."""
    branches: list[tuple[int, int]] = []
    for horizon, share in ends:
        length = round(share * horizon)
        if not 0 < length < horizon:
            raise ValueError(
                f"a cool-down of {share:g} of {horizon} steps has {length}: it must have at least "
                "one step and leave some"
            )
        branches.append((horizon - length, length))
    starts = sorted({start for start, _ in branches})
    trunk = replace(
        spec,
        steps=starts[-1],
        pins=",".join(map(str, starts)),
        schedule=replace(spec.schedule, kind="constant"),
    )
    return trunk, branches
