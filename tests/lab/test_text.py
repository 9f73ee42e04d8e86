"""How numbers, sizes, times and commands are written."""

import re
import shlex
from pathlib import Path

import angular_lab
from angular_lab.text import (
    clock,
    command,
    counted,
    estimated_time,
    measured_time,
    short_bytes,
    short_number,
)


def test_numbers_have_at_most_three_digits() -> None:
    numbers = {
        0: "0", 0.02: "0.02", -1500: "-1.5k", 512: "512", 950.4: "950", 999.4: "999", 999.5: "1k",
        9123: "9.12k", 614_400: "614k", 999.7e3: "1M", 1.25e6: "1.25M", 999.6e6: "1B",
        2.5e9: "2.5B", 3e12: "3T",
    }  # fmt: skip
    assert {x: short_number(x) for x in numbers} == numbers


def test_bytes() -> None:
    sizes = {0: "0 bytes", 999: "999 bytes", 1500: "1.5 kB", 999.8e6: "1 GB", 2e12: "2 TB"}
    assert {x: short_bytes(x) for x in sizes} == sizes


def test_times() -> None:
    times = (42.9, 310, 11_110, 183_900, float("inf"))
    assert [clock(x) for x in times] == ["0:42", "5:10", "3:05:10", "2d 03:05", "?"]
    assert [measured_time(x) for x in (7.24, 754, 3723)] == ["7.2 s", "12:34", "1:02:03"]
    estimates = {0.3: "under a second", 1.2: "1 second", 42: "42 seconds", 5400: "1.5 hours",
                 3e8: "9.5 years", 3e10: "951 years", 3.2e10: "1k years"}  # fmt: skip
    assert {x: estimated_time(x) for x in estimates} == estimates


def test_one_is_singular() -> None:
    assert [counted(x, "run") for x in (0, 1, 2, 1200)] == [
        "0 runs",
        "1 run",
        "2 runs",
        "1,200 runs",
    ]


def test_a_command_can_be_copied() -> None:
    folder = Path("my runs/it's")
    assert shlex.split(command("resume", folder, "--from", 3)) == [
        "angular-lab", "resume", str(folder), "--from", "3",
    ]  # fmt: skip
    assert command("export", "a/b", "--out", "FOLDER") == "angular-lab export a/b --out FOLDER"


def test_formatters_are_defined_once() -> None:
    names = "clock|counted|plural|duration|measured_time|estimated_time|short_(number|count|bytes)"
    source = Path(angular_lab.__file__).parent
    found = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if re.search(rf"^def ({names})\(\w+: (int|float)\b", path.read_text(), re.M)
    }
    assert found == {"text.py"}


def test_no_printed_command_has_an_unquoted_path() -> None:
    source = Path(angular_lab.__file__).parent
    unquoted = re.compile(r"angular-lab [a-z-]+ \{[^}]*(folder|path|run|out)\b")
    assert not [path for path in source.rglob("*.py") if unquoted.search(path.read_text())]
