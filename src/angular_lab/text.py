"""How numbers, sizes, times and commands are written for a person."""

import shlex
from math import isfinite

DAY = 86_400  # seconds
ROUNDS_UP = 0.9995  # of a unit: with three digits this is the unit itself


def counted(number: int, noun: str) -> str:
    """Return 1 run, or 1,200 runs."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def short_number(value: float) -> str:
    """Return 512, 9.1k, 614k, 2.5M or 1.2B; small numbers as they are."""
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= ROUNDS_UP * unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.3g}"


def short_bytes(size: float) -> str:
    """Return 512 kB, 2.5 MB or 1.2 GB."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= ROUNDS_UP * unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} bytes"


def clock(seconds: float) -> str:
    """Return 0:42, 5:10, 3:05:10 or 2d 03:05."""
    if not isfinite(seconds):
        return "?"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def measured_time(seconds: float) -> str:
    """Return a time that was measured: 7.2 s, 12:34 or 1:02:03."""
    return f"{seconds:.1f} s" if seconds < 60 else clock(seconds)


def estimated_time(seconds: float) -> str:
    """Return a time that is only estimated, in the largest unit that it fills: 3.2 hours."""
    if seconds > 1000 * DAY:
        years = seconds / (365.25 * DAY)
        if years >= 1000:
            return f"{years / 1000:,.0f}k years"
        return f"{years:.1f} years" if years < 10 else f"{years:.0f} years"
    for unit, size in (("days", DAY), ("hours", 3600), ("minutes", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return counted(round(seconds), "second") if seconds >= 1 else "under a second"


def command(*words: object) -> str:
    """Return a command of the lab that can be copied into a shell."""
    return shlex.join(["angular-lab", *map(str, words)])
