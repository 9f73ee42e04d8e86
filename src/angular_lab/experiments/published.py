"""The paper's numbers, for reports that put ours next to them.

Every entry names its source:

    P  the text, tables and appendix of the paper
    K  the published training code and configuration of Muown
    F  the published figures of AngularMuown, read to ±0.001
    S  the rules of the modded-nanogpt speedrun, optimization track

Losses are validation losses in nats. One seed each, without error bars. Optimizers have the names
of `OptimSpec.name`, and arms the labels of our experiments, so that a run finds its row.
"""

from dataclasses import dataclass
from typing import Literal

Source = Literal["P", "K", "F", "S"]
Curve = tuple[tuple[float, float], ...]  # (tokens, cooled-down loss), by tokens

# Labels of arms that the experiments and the checks of the paper's claims share.
KAPPA_1 = "angular_muown, kappa = 1"
MUON_DECAY = "muon, decay 0.1"
RMS_SCALE = "angular_muown, RMS scale"
SPECTRAL_SCALE = "angular_muown, spectral scale"

BILLION = 1e9
SMALL_RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)


@dataclass(frozen=True)
class TeaserRow:
    """An optimizer in the teaser figure: one trunk, four cooldown branches, 124M parameters."""

    optimizer: str
    rates: tuple[float, ...]  # P: the grid in the text and in the appendix' table
    best_rate: float  # P: underlined in the appendix' table
    losses: tuple[float, float, float, float]  # F: at TEASER_TOKENS

    @property
    def curve(self) -> Curve:
        return tuple(zip(TEASER_TOKENS, self.losses, strict=True))


@dataclass(frozen=True)
class Sweep:
    """A column of a table: the loss at every learning rate that was tried."""

    label: str
    losses: dict[float, float]  # by learning rate
    source: Source = "P"


TEASER_TOKENS = (2.5 * BILLION, 5 * BILLION, 7.5 * BILLION, 10 * BILLION)

TEASER: dict[str, TeaserRow] = {
    row.optimizer: row
    for row in (
        TeaserRow("adamw", SMALL_RATES, 2e-3, (3.150, 3.053, 3.008, 2.982)),
        TeaserRow("normuon", SMALL_RATES, 4e-3, (3.118, 3.029, 2.989, 2.964)),
        TeaserRow("muown", SMALL_RATES, 4e-3, (3.087, 3.008, 2.971, 2.949)),
        TeaserRow(
            "angular_muown", (5e-3, 1e-2, 2e-2, 4e-2, 8e-2), 4e-2, (3.071, 2.972, 2.928, 2.902)
        ),
    )
}

# P, below the teaser: "approximately". `statistics.speed_up` of the figure's numbers gives
# 2.15, 1.86 and 1.62.
CLAIMED_SPEED_UPS: dict[str, float] = {"adamw": 2.0, "normuon": 1.5, "muown": 1.5}

# P, the table of Qwen2-0.5B. kappa 1/t is best at the grid's edge: its optimum may lie above.
QWEN2: tuple[Sweep, ...] = (
    Sweep(
        "angular_muown",
        {4e-3: 2.862, 6e-3: 2.792, 8e-3: 2.749, 1e-2: 2.721, 2e-2: 2.662, 4e-2: 2.648},
    ),
    Sweep(
        KAPPA_1,
        {4e-3: 2.700, 6e-3: 2.694, 8e-3: 2.698, 1e-2: 2.708, 2e-2: 2.767, 4e-2: 2.873},
    ),
    Sweep(
        "normuon",
        {4e-3: 2.713, 6e-3: 2.701, 8e-3: 2.695, 1e-2: 2.692, 2e-2: 2.718, 4e-2: 2.749},
    ),
)  # fmt: skip

# P, the table of the 1.1B-A370M mixture. Both scales are best at the grid's edge, and P says so.
MOE: tuple[Sweep, ...] = (
    Sweep(RMS_SCALE, {3e-4: 2.6124, 6e-4: 2.5278, 1e-3: 2.4887, 2e-3: 2.4807}),
    Sweep(
        SPECTRAL_SCALE,
        {1e-3: 2.6952, 2e-3: 2.5901, 4e-3: 2.5198, 8e-3: 2.4914},
    ),
    Sweep("muon", {3e-4: 2.5297, 6e-4: 2.5255, 1e-3: 2.5263, 2e-3: 2.5353}),
)  # fmt: skip

WIDTH_RATES = tuple(2.0**-power for power in range(8, 2, -1))  # P: 2^-8 .. 2^-3

SPEEDRUN_TARGET = 3.28  # S: the validation loss to reach
SPEEDRUN_MARGIN = 0.004  # S: (target - mean) * sqrt(runs) must be at least this
SPEEDRUN_STEPS = 3075  # S: the entry of AngularMuown's preliminary version
