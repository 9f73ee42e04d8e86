"""Overrides from the command line: every key can be set, with its type, and is documented."""

import re
from typing import Any, get_type_hints

import pytest

from angular_lab.cli.main import main
from angular_lab.config.named_runs import NAMED_RUNS, named_run
from angular_lab.config.overrides import (
    ALIASES,
    as_typed,
    count,
    differences,
    help_text,
    override,
)
from angular_lab.config.spec import Spec, Window, get, keys
from angular_lab.errors import UserError

KEYS = keys(Spec())
# What a user may type for a field of a type, and its value.
SAMPLES: dict[Any, dict[str, Any]] = {
    bool: {"true": True, "False": False, "1": True, "no": False},
    int: {"7": 7, "2k": 2000},
    float: {"0": 0.0, "0.25": 0.25, "1e-3": 1e-3},
    str: {"word": "word", "none": "none"},
    int | None: {"7": 7, "none": None},
    float | None: {"0": 0.0, "0.25": 0.25, "None": None},
    str | None: {"word": "word", "none": None},
    tuple[int, ...]: {"4,6": (4, 6), "4": (4,), "": ()},
    tuple[str, ...]: {"a, b": ("a", "b"), "a": ("a",), "": ()},
    tuple[Window, ...]: {"549, .1,1234567": (549, 0.1, 1234567), "0.5": (0.5,), "": ()},
}
CHOICES = {"on_nan": "skip", "precision": "fp32", "parallel": "fsdp", "schedule.kind": "cosine"}
# Keys whose names say all there is to say.
SELF_EXPLANATORY = {
    "steps", "seed", "eval_tokens", "compile", "model.layers", "model.width", "model.heads",
    "model.norm_eps", "model.rope_base", "model.init_std", "model.experts_per_token", "optim.lr",
    "optim.momentum", "optim.beta1", "optim.beta2", "optim.decay_degree", "dashboard.project",
    "dashboard.group",
}  # fmt: skip


def type_of(key: str) -> Any:
    hint: Any = Spec
    for part in key.split("."):
        hint = get_type_hints(hint)[part]
    return hint


@pytest.mark.parametrize("key", KEYS)
def test_every_key_can_be_set_and_keeps_its_type(key: str) -> None:
    samples = {CHOICES[key]: CHOICES[key]} if key in CHOICES else SAMPLES[type_of(key)]
    for text, value in samples.items():
        spec = override(Spec(), [f"{key}={text}"])
        assert repr(get(spec, key)) == repr(value)  # 7 and 7.0 differ in it
        assert override(Spec(), [f"{key}={as_typed(value)}"]) == spec
        assert {*differences(spec, Spec())} <= {key}


@pytest.mark.parametrize("name", NAMED_RUNS)
def test_settings_of_named_runs_can_be_typed(name: str) -> None:
    spec = named_run(name)
    typed = [f"{key}={as_typed(get(spec, key))}" for key in KEYS]
    assert override(Spec(), typed) == spec


def test_a_learning_rate_of_zero_differs_from_one_that_is_not_given() -> None:
    spec = override(Spec(), ["optim.lr=0.5"])
    assert spec.optim.with_all_rates().aux_lr == spec.optim.with_all_rates().radius_lr == 0.5
    optim = override(spec, ["optim.aux_lr=0", "optim.radius_lr=0"]).optim
    assert (optim.aux_lr, optim.radius_lr) == (0.0, 0.0)
    assert optim.with_all_rates() == optim
    assert override(spec, ["optim.lr=0"]).optim.with_all_rates().aux_lr == 0.0


def test_help_lists_every_key_with_its_default_and_comment(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    rows = {}
    for row in help_text(Spec()).splitlines():
        assert row in shown
        setting, comment = re.fullmatch(r"  (\S+)\s*(.*)", row).groups()  # pyrefly: ignore
        rows[setting] = comment
    assert list(rows) == [f"{key}={as_typed(get(Spec(), key))}" for key in KEYS]
    without = {setting.partition("=")[0] for setting, comment in rows.items() if not comment}
    assert without <= SELF_EXPLANATORY
    assert rows["average="].startswith("windows of averages")
    assert rows["optim.aux_lr=none"].endswith("none: as lr")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("step=3", "unknown key 'step'; did you mean steps?"),
        ("optim.rl=3", "unknown key 'optim.rl'; did you mean optim.lr?"),
        ("lr=3", "unknown key 'lr'; did you mean optim.lr?"),
        ("optim.learning_rate=3", "unknown key 'optim.learning_rate'; did you mean optim.lr?"),
        ("learning_rate=3", "unknown key 'learning_rate'; did you mean optim.lr?"),
        ("optim.wd=3", "unknown key 'optim.wd'; did you mean optim.weight_decay?"),
        ("optim.betas=3", "unknown key 'optim.betas'; did you mean optim.beta1?"),
        ("n_layer=3", "unknown key 'n_layer'; did you mean model.layers?"),
        ("batch_size=3", "unknown key 'batch_size'; did you mean batch?"),
        ("seq_len=3", "unknown key 'seq_len'; did you mean model.sequence?"),
        ("model.steps=3", "unknown key 'model.steps'; did you mean steps?"),
        ("schedule.warmpu=3", "unknown key 'schedule.warmpu'; did you mean schedule.warmup?"),
        ("evaltokens=3", "unknown key 'evaltokens'; did you mean eval_tokens?"),
        ("optim.xyzzy=1", "unknown key 'optim.xyzzy'; `angular-lab train --help` lists all keys"),
        ("steps.x=1", "unknown key 'steps.x'; `angular-lab train --help` lists all keys"),
        ("optim=muon", "'optim' has parts: set one of optim.name"),
        ("faster", "'faster' is not an override: write key=value"),
        ("steps=many", "steps=many: steps must be an integer"),
        ("steps=inf", "steps=inf: steps must be an integer"),
        ("steps=1.5", "steps=1.5: steps must be an integer"),
        ("steps=none", "steps=none: steps must be an integer"),
        ("save_every=often", "save_every=often: save_every must be none or an integer"),
        ("optim.lr=fast", "optim.lr=fast: optim.lr must be a number"),
        ("optim.lr=none", "optim.lr=none: optim.lr must be a number"),
        ("compile=maybe", "compile=maybe: compile must be true or false"),
        ("pins=4,abc", "pins=abc: pins must be an integer"),
        ("average=half", "average=half: average must be an integer or a number"),
    ],
)
def test_a_mistake_is_named_with_what_to_write(assignment: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        override(Spec(), [assignment])
    assert str(error.value).startswith(message)


def test_names_of_other_programs_lead_to_keys_that_exist() -> None:
    assert {*ALIASES.values()} <= {*KEYS}
    assert not {key.rpartition(".")[2] for key in KEYS} & {*ALIASES}


@pytest.mark.parametrize(
    ("text", "number"),
    [("3B", 3 * 10**9), ("2.5M", 2_500_000), ("10k", 10**4), ("1_000", 1000), ("1e3", 1000)],
)
def test_counts_may_have_units(text: str, number: int) -> None:
    assert count(text) == number
