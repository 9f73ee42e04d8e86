"""help() explains every argument of every public name."""

import inspect
import re
from types import FunctionType
from typing import Any, is_typeddict

import pytest

import angular_muown
from angular_muown import Engine, plan
from angular_muown.params.options import COMMON_DEFAULTS, CommonOptions

PUBLIC = {name: getattr(angular_muown, name) for name in angular_muown.__all__}
MEMBERS = [
    x for x in PUBLIC.values() if inspect.isclass(x) and issubclass(x, Engine) and x is not Engine
]

# These pass options on to a member that only the call determines.
OPEN = ("create", "Engine.for_model")


def callables() -> dict[str, Any]:
    """Return public functions and classes, and the public methods that these classes define."""
    public = {name: thing for name, thing in PUBLIC.items() if not is_typeddict(thing)}
    for name, thing in PUBLIC.items():
        if inspect.isclass(thing):
            kinds = (FunctionType, classmethod)
            methods = {k: getattr(thing, k) for k, v in vars(thing).items() if isinstance(v, kinds)}
            public |= {f"{name}.{k}": v for k, v in methods.items() if not k.startswith("_")}
    return public


@pytest.mark.parametrize("name", callables())
def test_every_argument_is_explained(name: str) -> None:
    thing = callables()[name]
    doc = inspect.getdoc(thing) or ""
    assert doc, f"{name} has no docstring"
    for argument in inspect.signature(thing).parameters.values():
        if argument.name != "self":
            hides = argument.kind is argument.VAR_KEYWORD
            assert not hides or name in OPEN, f"{name} hides its options"
            entry = re.search(rf"^ *{argument.name}: \S", doc, flags=re.MULTILINE)
            assert entry, f"{name} does not explain {argument}"


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.__name__)
def test_members_show_the_shared_options_with_their_defaults(member: type[Engine]) -> None:
    shown = inspect.signature(member).parameters
    assert COMMON_DEFAULTS.keys() == CommonOptions.__annotations__.keys()
    for name, default in COMMON_DEFAULTS.items():
        assert shown[name].default == default, name
        assert shown[name].kind is inspect.Parameter.KEYWORD_ONLY
    assert "Example:" in (member.__doc__ or "")


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.__name__)
def test_an_unknown_argument_is_rejected_with_a_suggestion(member: type[Any]) -> None:
    with pytest.raises(TypeError, match=r"'momentun'; did you mean 'momentum'\?"):
        member([], momentun=0.9)


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.__name__)
def test_for_model_shows_the_arguments_of_plan_and_of_the_constructor(member: type[Engine]) -> None:
    shown = inspect.signature(member.for_model).parameters
    constructor = inspect.signature(member).parameters
    of_plan = {*inspect.signature(plan).parameters} - {"radius_lr"}  # not every member has it
    expected = of_plan | set(constructor) - {"params"}
    assert set(shown) == expected
    assert all(shown[name].default == x.default for name, x in constructor.items() if name in shown)
