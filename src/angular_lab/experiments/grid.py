"""An experiment from the words of a command line: a named run and values of its settings.

One axis is tuned, the learning rate unless another is named: each method takes the value that is
best on one seed, and the other seeds judge it. All other axes make methods. Apart from what the
words set, runs are those of the named run, so `train` with the same settings makes the same runs.
No torch here.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

from angular_lab.config.named_runs import named_run
from angular_lab.config.overrides import as_typed, override
from angular_lab.config.spec import Spec, get, keys
from angular_lab.errors import UserError
from angular_lab.experiments.axes import Setting, is_value, parse_setting
from angular_lab.experiments.definition import LEARNING_RATE, Arm, Experiment

OPTIMIZER = "optim.name"
NO_CHOICE = "none"  # --pick-on: every value is a method
SHOWN = 4  # methods that a title names

Chosen = dict[str, Any]  # the value of every setting that the words set, for one method


def make_grid(
    name_of_run: str,
    words: Sequence[str],
    *,
    horizons: Sequence[int] = (),
    tune: str = LEARNING_RATE,
    pick_on: str | None = None,
    ours: str | None = None,
    name: str | None = None,
) -> Experiment:
    """Return the experiment. Raises UserError with the word that is wrong."""
    base = named_run(name_of_run)
    settings = [parse_setting(base, word) for word in words]
    _check_words(base, settings, horizons, tune)
    tuned = None if pick_on == NO_CHOICE else tune
    arms = tuple(_arms(base, settings, tuned))
    seeds = next((s.values for s in settings if s.key == "seed"), (base.seed,))
    labels = [arm.label for arm in arms]
    plan = Experiment(
        name="",
        scale=name_of_run,
        title=_title(arms, name_of_run),
        arms=arms,
        horizons=tuple(horizons) or (arms[0].spec.steps,),
        seeds=_in_order(seeds, pick_on, arms),
        ours=_ours(labels, ours) if len(arms) > 1 else None,
    )
    _check_plan(plan)
    return replace(plan, name=name or default_name(plan, settings))


def default_name(plan: Experiment, settings: Iterable[Setting] = ()) -> str:
    """Return a name that follows from what is trained: the same words find the same sweep. How it
    is run, such as save_every, makes no difference, nor does a setting that the lab gets later."""
    optimizers = [*dict.fromkeys(arm.spec.optim.name for arm in plan.arms)]
    axes = dict.fromkeys(s.key for s in settings if len(s.values) > 1)
    parts = [short for key in axes if (short := _short(key)) not in ("name", "seed")]
    shown = optimizers if len(optimizers) <= SHOWN else [f"{len(optimizers)}-optimizers"]
    content = [plan.horizons, plan.seeds, plan.ours, Path(plan.arms[0].spec.data).name]
    for arm in plan.arms:
        decay = arm.spec.schedule.decay
        content += [arm.label, arm.spec.folder_name(""), decay, arm.values, arm.axis]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:6]
    return "-".join(["grid", plan.scale, *shown, *parts, digest])


# -- methods -------------------------------------------------------------------------------------


def _arms(base: Spec, settings: Sequence[Setting], tuned: str | None) -> Iterator[Arm]:
    """Yield a method for every combination of the values that are not tuned."""
    swept = dict.fromkeys(s.key for s in settings if len(s.values) > 1 and s.key != tuned)
    axes = [key for key in swept if key != "seed"]
    for chosen, values in _combinations(settings, tuned):
        spec = override(base, [f"{key}={as_typed(value)}" for key, value in chosen.items()])
        axis = tuned or LEARNING_RATE
        values = values or (get(spec, axis),)
        for value in values:
            if value is None or not value > 0:
                raise UserError(
                    f"--tune {axis}: {as_typed(value)} cannot be compared with other values, which "
                    f"must be above 0; leave it out, or make it a method of its own with another "
                    "--tune"
                )
        yield Arm(_label(chosen, axes) or spec.optim.name, spec, tuple(values), axis)


def _combinations(
    settings: Sequence[Setting], tuned: str | None
) -> Iterator[tuple[Chosen, tuple[Any, ...]]]:
    """Yield each method's settings and the values to tune. A word with @ replaces the one without
    in the methods that it is for; of two such words the later one counts."""
    own = [s for s in settings if s.key not in (tuned, "seed")]
    common, special = ([s for s in own if bool(s.where) == flag] for flag in (False, True))
    seen: list[Chosen] = []
    for values in product(*(s.values for s in common)):
        chosen = {s.key: value for s, value in zip(common, values, strict=True)}
        applying = {s.key: s for s in special if s.applies(chosen)}
        for more in product(*(s.values for s in applying.values())):
            method = chosen | dict(zip(applying, more, strict=True))
            if method not in seen:  # an axis whose values @ replaces is gone through all the same
                seen.append(method)
                yield method, _tuned_values(settings, tuned, chosen)


def _tuned_values(
    settings: Sequence[Setting], tuned: str | None, chosen: Chosen
) -> tuple[Any, ...]:
    of_key = [s for s in settings if s.key == tuned and s.applies(chosen)]
    of_key.sort(key=lambda s: bool(s.where))  # stable: the last one with @, else the one without
    return of_key[-1].values if of_key else ()


def _label(chosen: Chosen, axes: Sequence[str]) -> str:
    """Return what tells a method from the others."""
    shorts = [_short(key) for key in axes]
    parts = []
    for key in axes:
        if key in chosen:
            name = _short(key) if shorts.count(_short(key)) == 1 else key
            value = as_typed(chosen[key]).removesuffix(".0")
            parts.append(value if key == OPTIMIZER else f"{name} {value}")
    return ", ".join(parts)


def _short(key: str) -> str:
    return key.rpartition(".")[2]


def _title(arms: Sequence[Arm], name_of_run: str) -> str:
    labels = [arm.label for arm in arms]
    more = f" and {len(labels) - SHOWN} more" if len(labels) > SHOWN else ""
    each = "each " * (len(arms) > 1)
    has_choice = any(len(arm.values) > 1 for arm in arms)
    choice = f", {each}at its best {_short(arms[0].axis)}" if has_choice else ""
    return f"{' against '.join(labels[:SHOWN])}{more} on {name_of_run}{choice}"


def _in_order(seeds: Sequence[int], pick_on: str | None, arms: Sequence[Arm]) -> tuple[int, ...]:
    """Return the seeds, first the one that chooses."""
    if pick_on in (None, NO_CHOICE):
        return tuple(seeds)
    if pick_on not in map(str, seeds):
        listed = ", ".join(map(str, seeds))
        raise UserError(f"--pick-on {pick_on}: it must be one of the seeds {listed}, or none")
    if all(len(arm.values) == 1 for arm in arms):
        raise UserError(
            f"--pick-on {pick_on}: every method has one {arms[0].axis}, so there is nothing to "
            "pick; leave it out, and all seeds judge"
        )
    first = int(pick_on)
    return (first, *(seed for seed in seeds if seed != first))


def _ours(labels: Sequence[str], wanted: str | None) -> str:
    if wanted is None:
        return labels[0]
    if wanted in labels:
        return wanted
    near = get_close_matches(wanted, labels, n=1)
    hint = f"did you mean '{near[0]}'?" if near else "no method has this name."
    raise UserError(f"--ours '{wanted}': {hint} The methods are {'; '.join(labels)}")


# -- mistakes ------------------------------------------------------------------------------------


def _check_words(
    base: Spec, settings: Sequence[Setting], horizons: Sequence[int], tune: str
) -> None:
    if "," in tune:
        raise UserError(f"--tune {tune}: one setting is tuned; values of the others make methods")
    if tune not in keys(base):
        override(base, [f"{tune}="])  # says which key is close to it
    if isinstance(get(base, tune), str | bool | tuple) or tune in ("seed", "steps"):
        raise UserError(f"--tune {tune}: it must be a setting that is a number, as optim.lr is")
    seen: set[tuple[str, tuple[str, ...]]] = set()
    for setting in settings:
        if (setting.key, setting.where) in seen:
            raise UserError(f"{setting.word}: {setting.key} is given twice; use commas")
        seen.add((setting.key, setting.where))
        if setting.where:
            _check_where(setting, settings, tune)
    if horizons and any(setting.key == "steps" for setting in settings):
        raise UserError("steps=... and --horizons say the same: give one of them")


def _check_where(setting: Setting, settings: Sequence[Setting], tune: str) -> None:
    if setting.key in ("seed", "steps", "data"):
        raise UserError(f"{setting.word}: {setting.key} must be the same for all methods")
    others = [s for s in settings if not s.where and s.key not in (tune, "seed")]
    for text in setting.where:
        having = [s.key for s in others if any(is_value(value, text) for value in s.values)]
        if len(having) > 1:
            raise UserError(f"{setting.word}: {' and '.join(having)} both have the value {text}")
        if not having:
            values = [as_typed(value) for s in others for value in s.values]
            near = get_close_matches(text, values, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            listed = f"They have {', '.join(values)}" if values else "No word sets one"
            raise UserError(f"{setting.word}: no method has the value {text}{hint} {listed}")


def _check_plan(plan: Experiment) -> None:
    for arm in plan.arms:
        s = arm.spec.schedule
        if arm.spec.eval_every is None:
            raise UserError("eval_every=none: a grid compares validation losses; leave it out")
        if len(plan.horizons) > 1 and (s.kind != "wsd" or s.decay_steps is not None):
            key = "decay_steps" if s.kind == "wsd" else "kind"
            raise UserError(
                f"schedule.{key}={get(s, key)} with several horizons: their cooldowns branch off "
                "one run and take the share schedule.decay of the steps; set that, or give one "
                "horizon"
            )
