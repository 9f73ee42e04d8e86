"""AngularMuown and its family: Muon with the angle of every step made explicit."""

from angular_muown.engine import Engine
from angular_muown.monitor import AngleMonitor
from angular_muown.optimizers import (
    AngularMuown,
    Hyperball,
    MagnitudeDirection,
    Muon,
    Muown,
    NorMuon,
    NorMuown,
    create,
)
from angular_muown.params.options import Group
from angular_muown.params.plan import Plan, plan
from angular_muown.schedules import (
    averaging,
    cosine,
    cosine_schedule,
    inverse_polynomial,
    linear,
    linear_schedule,
    matching_lr,
    ramp,
    wsd,
    wsd_schedule,
)
from angular_muown.update import Recipe

__version__ = "0.2.0"
__all__ = [
    "AngleMonitor",
    "AngularMuown",
    "Engine",
    "Group",
    "Hyperball",
    "MagnitudeDirection",
    "Muon",
    "Muown",
    "NorMuon",
    "NorMuown",
    "Plan",
    "Recipe",
    "averaging",
    "cosine",
    "cosine_schedule",
    "create",
    "inverse_polynomial",
    "linear",
    "linear_schedule",
    "matching_lr",
    "plan",
    "ramp",
    "wsd",
    "wsd_schedule",
]
