"""Values of an axis as they are typed: laws of ranges, and mistakes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from angular_lab.config.named_runs import named_run
from angular_lab.config.overrides import as_typed, override
from angular_lab.config.spec import CHANGEABLE, get
from angular_lab.errors import UserError
from angular_lab.experiments.axes import parse_setting

NANO = named_run("nano")
decimals = st.builds(lambda digits, e: float(f"{digits}e{e}"), st.integers(1, 9999), st.just(-6))


def values(word: str) -> list[object]:
    return list(parse_setting(NANO, word).values)


@given(low=decimals, factor=st.integers(101, 1000), steps=st.floats(0, 8))
def test_a_geometric_range(low: float, factor: int, steps: float) -> None:
    """It starts at the lower end, stays within its ends, and the next value would not."""
    ratio, high = factor / 100, low * (factor / 100) ** steps
    found = [float(str(x)) for x in values(f"optim.lr={low!r}:{high!r}:x{ratio!r}")]
    assert found[0] == low
    assert found[-1] <= high < found[-1] * ratio * 1.0001
    assert all(
        after / before == pytest.approx(ratio, rel=1e-4) for before, after in pairwise(found)
    )


@given(low=st.integers(-100, 100), step=st.integers(1, 50), count=st.integers(1, 30))
def test_an_arithmetic_range_in_hundredths(low: int, step: int, count: int) -> None:
    """0.1 three times is the number that is typed as 0.3."""
    expected = [(low + i * step) / 100 for i in range(count)]
    word = f"optim.beta1={low / 100!r}:{expected[-1]!r}:+{step / 100!r}"
    assert values(word) == expected


@given(first=st.integers(0, 500), count=st.integers(1, 20))
def test_integers(first: int, count: int) -> None:
    expected = list(range(first, first + count))
    assert values(f"seed={first}..{first + count - 1}") == expected
    assert values(f"seed={','.join(map(str, expected))}") == expected
    assert values(f"seed={first}:{first + count - 1}:+1") == expected


@given(st.lists(decimals, min_size=1, max_size=6, unique=True))
def test_a_list_is_what_overrides_make_of_its_parts(numbers: list[float]) -> None:
    texts = [repr(number) for number in numbers]
    single = [override(NANO, [f"optim.lr={text}"]).optim.lr for text in texts]
    assert values(f"optim.lr={','.join(texts)}") == single


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("optim.lr=0.005:0.04:x2", [0.005, 0.01, 0.02, 0.04]),
        ("optim.lr=0.001:0.1:x3.1623", [0.001, 0.0031623, 0.0100001, 0.0316234, 0.1]),
        ("optim.lr=0.005:0.03:x2", [0.005, 0.01, 0.02]),
        ("optim.lr=0.001,0.01:0.04:x2", [0.001, 0.01, 0.02, 0.04]),
        ("optim.lr=0.1:0.3:+0.1", [0.1, 0.2, 0.3]),
        ("model.width=1k:4k:x2", [1000, 2000, 4000]),
        ("model.width=100:200:x1.5", [100, 150]),
        ("optim.aux_lr=none,0.01", [None, 0.01]),
        ("optim.name=muon,adamw", ["muon", "adamw"]),
        ("optim.split_blocks=true,false", [True, False]),
        ("average=0.1,0.2", [(0.1, 0.2)]),  # a tuple is one value
        ("loggers=wandb,trackio", [("wandb", "trackio")]),
        ("data=a,b:c..d", ["a,b:c..d"]),  # a path is a path
        ("dashboard.entity=a:b:x2", ["a:b:x2"]),  # only numbers have ranges
        ("seed=3..3", [3]),
    ],
)
def test_examples(word: str, expected: list[object]) -> None:
    found = values(word)
    assert found == expected
    assert [type(x) for x in found] == [type(x) for x in expected]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("optim.lr=0.01:0.04:x1", "x1 never gets from 0.01 to 0.04; a factor must be above 1"),
        ("optim.lr=0.01:0.04:x0.5", "a factor must be above 1"),
        ("optim.lr=0.01:0.04:+0", "a step must be above 0"),
        ("optim.lr=0.04:0.01:x2", "is empty; write the smaller number first"),
        ("seed=2..0", "2..0 is empty"),
        ("optim.lr=0:1:x2", "must start above 0; use LOW:HIGH:"),
        ("optim.lr=0.01:0.04", "write a range as LOW:HIGH:x2"),
        ("optim.lr=0.01:0.04:2", "write a range as LOW:HIGH:x2"),
        ("optim.lr=a:0.04:x2", "'a' is not a number"),
        ("optim.lr=nan:0.04:x2", "'nan' is not a number"),
        ("optim.lr=0.01:inf:x2", "'inf' is not a number"),
        ("optim.lr=", "a value is missing"),
        ("optim.lr=0.01,,0.02", "a value is missing"),
        ("optim.lr=0.01,0.010", "0.01 is given twice"),
        ("optim.lr=1e-9:1:+1e-9", "more than 1000 values"),
        ("seed=0..100000", "100001 values; 1000 are the most"),
        ("optim.rl=0.01,0.02", "unknown key 'optim.rl'; did you mean optim.lr"),
        ("optim.lr", "write KEY=VALUE"),
        ("optim.lr@=0.1", "after @ comes a value"),
        ("optim.lr=fast,0.1", "optim.lr=fast: optim.lr must be a number"),
        ("model.width=101:300:x1.5", "model.width must be an integer"),
        ("steps=100,200", "steps cannot be an axis; write --horizons 1000,2000"),
        ("seed=-1..1", "it must be at least 0"),
    ],
)
def test_mistakes_are_reported_with_the_word(word: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse_setting(NANO, word)
    assert message in str(error.value)


@pytest.mark.parametrize("key", sorted(CHANGEABLE))
def test_what_no_loss_depends_on_is_not_an_axis(key: str) -> None:
    """Its values would have the same run folder."""
    before = get(NANO, key)
    if isinstance(before, tuple):
        assert len(parse_setting(NANO, f"{key}=1,2").values) == 1
    elif isinstance(before, bool):
        with pytest.raises(UserError, match=f"{key} cannot be an axis; no loss depends on it"):
            parse_setting(NANO, f"{key}=true,false")
    else:
        texts = "fsdp,ddp" if key == "parallel" else f"{as_typed(before)},7"
        with pytest.raises(UserError, match=f"{key} cannot be an axis; no loss depends on it"):
            parse_setting(NANO, f"{key}={texts}")
