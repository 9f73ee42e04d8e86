"""The optimizer state has the bytes per parameter that documents state."""

import pytest

from evidence.memory import CASES, state_bytes, table


@pytest.mark.parametrize("columns", [64, 256])
@pytest.mark.parametrize("name", CASES)
def test_state_has_the_documented_bytes(name: str, columns: int) -> None:
    formula, make = CASES[name]
    whole, _, per_row = formula.partition(" + ")
    expected = int(whole) + (int(per_row.removesuffix("/n")) / columns if per_row else 0)
    assert state_bytes(make, 128, columns) == pytest.approx(expected)


def test_the_table_shows_what_was_measured() -> None:
    rows = {row[0]: row[2] for row in table()[1:]}
    assert rows["torch.optim.AdamW"] == "8.000"
    assert rows["AngularMuown"] == "4.008"
