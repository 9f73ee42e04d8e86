"""A sweep as a report sees it: which run is what, and which losses count."""

from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

from angular_lab.experiments.statistics import BestRate
from angular_lab.report.runs import Run


@dataclass(frozen=True)
class Member:
    """A line at a value with a seed: its trunk, where it has one, and its ends by horizon."""

    label: str
    axis: str
    value: float
    seed: int
    ends: dict[int, Run]
    trunk: Run | None
    diverged: bool
    longer: Run | None = None  # one more cool-down to the last horizon, of a larger share
    plans_longer: bool = False

    def final(self, horizon: int) -> tuple[int, float] | None:
        """Tokens and cooled-down loss; None where it did not get there."""
        run = self.ends.get(horizon)
        return None if run is None or self.diverged else run.final

    def cooled_longer(self, horizon: int) -> "Member":
        """As if the longer cool-down were its only end."""
        return replace(self, ends={horizon: self.longer} if self.longer else {}, longer=None)

    def read_from(self, window: float) -> "Member":
        ends = {horizon: run.read_from(window) for horizon, run in self.ends.items()}
        return replace(self, ends=ends)

    def lacks_longer(self, horizon: int) -> bool:
        """It was to have one, and that has neither an end nor a reason for none."""
        if not self.plans_longer or (self.longer is not None and self.longer.diverged):
            return False
        return self.cooled_longer(horizon).final(horizon) is None

    @property
    def normal(self) -> list[Run]:
        """What horizons, speeds and figures are about."""
        return [*([self.trunk] if self.trunk else []), *self.ends.values()]

    @property
    def runs(self) -> list[Run]:
        return [*self.normal, *([self.longer] if self.longer else [])]

    @property
    def name(self) -> str:
        return f"{self.label}, {short(self.axis)} {self.value:g}, seed {self.seed}"


@dataclass
class SweepData:
    folder: Path
    experiment: str
    scale: str
    title: str
    lines: list[str]
    horizons: list[int]
    seeds: list[int]
    members: list[Member] = field(default_factory=list)
    best: dict[str, BestRate] = field(default_factory=dict)  # by line, where one can be told
    warnings: list[str] = field(default_factory=list)
    settled_by: int | None = None  # the seed that chose the held rates, in another sweep
    key: str = ""  # of its files and ids, set where two folders have one name
    named: set[str] = field(default_factory=set)  # run folders that the manifest knows

    @property
    def name(self) -> str:
        return f"{self.experiment}, scale {self.scale}"

    @property
    def axis(self) -> str:
        """What the lines' values are of: of those with a grid, where others hold another."""
        swept = [member for member in self.members if self.has_grid(member.label)]
        axes = {short(member.axis) for member in swept or self.members}
        return axes.pop() if len(axes) == 1 else "value"

    def on_axis(self, label: str) -> bool:
        """Whether the line's values are of that, or all have to share a column."""
        own = {short(member.axis) for member in self.of_line(label)}
        return self.axis == "value" or own <= {self.axis}

    @property
    def chose(self) -> bool:
        """Whether a value had to be chosen: then the seed that chose it cannot judge it."""
        return any(self.has_grid(label) for label in self.lines)

    @property
    def chooser(self) -> int | None:
        """The seed that chose the values, here or in another sweep."""
        return self.seeds[0] if self.chose else self.settled_by

    @property
    def judges(self) -> list[int]:
        """Seeds that count in means and verdicts: not one that chose, unless it is the only one."""
        return [seed for seed in self.seeds if seed != self.chooser] or self.seeds

    def has_grid(self, label: str) -> bool:
        return len({member.value for member in self.of_line(label)}) > 1

    def at_edge(self, label: str) -> bool:
        """The best value lies at the edge of its grid: the optimum may lie outside."""
        return label in self.best and self.best[label].at_edge and self.has_grid(label)

    def of_line(self, label: str) -> list[Member]:
        return [member for member in self.members if member.label == label]

    def at_best(self, label: str) -> dict[int, Member]:
        """The line's members at its best value, by seed."""
        if label not in self.best:
            return {}
        found = {m.seed: m for m in self.of_line(label) if m.value == self.best[label].lr}
        return {seed: found[seed] for seed in sorted(found)}

    def cooled_longer(self) -> "SweepData | None":
        """The sweep with the longer cool-downs as its only ends, each line at the value that was
        chosen without them. None where there are none."""
        if not any(member.longer for member in self.members):
            return None
        last = self.horizons[-1]
        members = [member.cooled_longer(last) for member in self.members]
        return replace(self, horizons=[last], members=members)

    def read_from(self, window: float) -> "SweepData":
        """The sweep with the losses of an average in the place of the weights', each line at the
        value that was chosen without it."""
        return replace(self, members=[member.read_from(window) for member in self.members])

    def first_losses(self, label: str) -> dict[float, float]:
        """Losses at the last horizon by value: what the first seed chooses from."""
        losses: dict[float, float] = {}
        for member in self.of_line(label):
            if member.seed == self.seeds[0]:
                end = member.final(self.horizons[-1])
                if end is not None or member.diverged:
                    losses[member.value] = inf if end is None else end[1]
        return losses

    def judged(self, label: str, horizon: int) -> dict[int, float]:
        """Cooled-down losses by seed, from the judging seeds."""
        finals = {seed: m.final(horizon) for seed, m in self.at_best(label).items()}
        return {s: end[1] for s, end in finals.items() if end is not None and s in self.judges}

    def shown(self, label: str, horizon: int) -> dict[int, float]:
        """The judged losses; before there are any, those of the seed that chose the value."""
        finals = {seed: m.final(horizon) for seed, m in self.at_best(label).items()}
        return self.judged(label, horizon) or {s: e[1] for s, e in finals.items() if e is not None}

    def tokens(self, horizon: int) -> float | None:
        """Tokens at a horizon, as the runs say."""
        ends = (m.ends[horizon] for m in self.members if horizon in m.ends)
        return next((float(r.spec.steps * r.spec.tokens_per_step) for r in ends), None)

    def optimizer(self, label: str) -> str:
        runs = (run for member in self.of_line(label) for run in member.runs)
        return next((run.spec.optim.name for run in runs), label)

    @property
    def ours(self) -> str | None:
        """The line that the paper is about."""
        return next((x for x in self.lines if x.startswith("angular_muown")), None)


def short(axis: str) -> str:
    """optim.aux_lr is shown as aux_lr."""
    return axis.rpartition(".")[2]
