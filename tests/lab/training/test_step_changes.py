"""Changes of the step that are on trial."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from angular_lab.config.spec import ExtrapolateSpec, OptimSpec, Spec
from angular_lab.errors import UserError
from angular_lab.training import build
from angular_lab.training.ranks import Ranks
from angular_lab.training.start import train
from angular_lab.training.step_changes import Extrapolation, SlowMomentum, Soap, equalize_rows
from angular_lab.training.trainer import Trainer
from angular_muown import AngularMuown, Muon, create, wsd_schedule
from tests.lab.runs import lines, stopped_copy, tiny

ON = ExtrapolateSpec(strength=0.5, decay=0.8, start=0.25, end=0.75)


def tried(data: Path, **values) -> Spec:
    """All settings on trial at once."""
    spec = tiny(data)
    optim = replace(
        spec.optim, momentum_start=0.8, momentum_ramp=4, aux_beta2=0.99, slow_share=0.5,
        soap=("*.mlp.*",),
    )  # fmt: skip
    return replace(spec, **{"extrapolate": ON, "optim": optim, **values})


def test_the_iteration_is_the_published_one() -> None:
    """W <- A(W + b E), E <- d E + (1 - d) (W - W before), where A is gradient descent."""
    spec = Spec(steps=8, extrapolate=ON, schedule=replace(Spec().schedule, warmup=0, decay=0.5))
    model = nn.Linear(3, 2, bias=False).double()
    start = model.weight.detach().clone()
    ahead = Extrapolation(model, spec)
    for step in range(spec.steps):
        ahead.move(step)
        with torch.no_grad():
            model.weight -= 0.1 * model.weight**3  # the gradient of the sum of w^4 / 4
        ahead.update(step)
    W, E = start, torch.zeros_like(start)
    for step in range(spec.steps):
        b = 0.5 * build.lr_factor(spec, step) if 2 <= step < 6 else 0.0
        Y = W + b * E
        after = Y - 0.1 * Y**3
        E = 0.8 * E + 0.2 * (after - W)
        W = after
    torch.testing.assert_close(model.weight.detach(), W)
    assert [ahead.strength(step) for step in (1, 2, 5, 6)] == [0.0, 0.5, 0.3, 0.0]


def test_without_strength_nothing_is_stored_and_nothing_moves() -> None:
    model = nn.Linear(3, 2)
    ahead = Extrapolation(model, Spec())
    before = model.weight.detach().clone()
    ahead.move(500)
    ahead.update(500)
    ahead.undo(500)
    assert ahead.state() == {}
    assert ahead.weights == []
    assert torch.equal(model.weight, before)


def test_it_changes_a_run_only_from_its_start_on(data: Path, tmp_path: Path) -> None:
    train(tiny(data), tmp_path / "off")
    train(tiny(data, extrapolate=ON), tmp_path / "on")
    off, on = lines(tmp_path / "off"), lines(tmp_path / "on")
    assert on[:3] == off[:3]  # the first move is before the fourth step
    assert on[3] != off[3]


def test_a_stopped_run_continues_bit_for_bit(data: Path, tmp_path: Path) -> None:
    spec = tried(data, keep=9)
    train(spec, tmp_path / "whole")
    for step in (4, 8):
        half = stopped_copy(tmp_path / "whole", tmp_path / f"{step}", step)
        train(spec, half, resume=True)
        assert lines(half) == lines(tmp_path / "whole")


def test_a_skipped_batch_leaves_the_weights_where_they_were(
    data: Path, tmp_path: Path, monkeypatch
) -> None:
    finite, weights = Trainer.is_finite, []

    def skip(self: Trainer, tokens, targets) -> bool:
        weights.append([p.detach().clone() for p in self.model.parameters()])
        return finite(self, tokens, targets) and self.step != 5

    monkeypatch.setattr(Trainer, "is_finite", skip)
    train(tried(data, on_nan="skip", optim=tiny(data).optim), tmp_path / "run")
    # b is the same at steps 5 and 6, and so is the point ahead of the same weights.
    assert all(torch.equal(a, b) for a, b in zip(weights[5], weights[6], strict=True))
    assert not torch.equal(weights[4][0], weights[5][0])


def test_the_momentum_rises_and_falls(data: Path, tmp_path: Path, monkeypatch) -> None:
    seen, update = [], Trainer.update

    def watch(self: Trainer) -> None:
        update(self)
        groups = self.optimizer.param_groups
        seen.extend({g["momentum"] for g in groups if g["algorithm"] == "matrix"})

    monkeypatch.setattr(Trainer, "update", watch)
    train(tried(data), tmp_path / "run")
    rising = [0.8, 0.8375, 0.875, 0.9125, 0.95, 0.95]
    assert seen == pytest.approx([*rising, *rising[::-1]])


KEYS = ("algorithm", "lr", "momentum", "betas", "radius_lr", "warmup_steps")


@pytest.mark.parametrize("name", ["muon", "angular_muown"])
def test_the_library_alone_sets_what_the_lab_sets(data: Path, tmp_path, monkeypatch, name) -> None:
    """Step by step, in one line each for the optimizer and its schedule."""
    seen, update = [], Trainer.update

    def values(optimizer) -> list[dict]:
        return [{key: g.get(key) for key in KEYS} for g in optimizer.param_groups]

    def watch(self: Trainer) -> None:
        update(self)
        seen.append(values(self.optimizer))

    monkeypatch.setattr(Trainer, "update", watch)
    spec = tiny(data)
    o = replace(spec.optim, name=name, momentum_start=0.85, momentum_ramp=5, aux_beta2=0.99)
    train(replace(spec, optim=o), tmp_path / "run")
    model = build.make_model(spec, Ranks(0, 1, torch.device("cpu")))
    optimizer = create(name, model, o.lr, blocks=model.blocks(), aux_betas=(0.9, 0.99))
    scheduler = wsd_schedule(
        optimizer, spec.steps, warmup=spec.schedule.warmup, cooldown=spec.decay_steps,
        momentum_start=0.85, momentum_ramp=5,
    )  # fmt: skip
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for expected in seen:
        assert values(optimizer) == expected
        optimizer.step()
        scheduler.step()
    assert len(seen) == spec.steps
    assert len({groups[-1]["momentum"] for groups in seen}) > 5


@pytest.mark.parametrize("name", ["adamw", "normuon", "angular_muown"])
def test_aux_beta2_is_for_what_is_not_a_hidden_matrix(data: Path, name: str) -> None:
    spec = tiny(data, optim=OptimSpec(name=name, aux_beta2=0.99))
    model = build.make_model(spec, Ranks(0, 1, torch.device("cpu")))
    groups = build.make_optimizer(model, spec).param_groups
    found = {
        (p.ndim == 2 and p.shape[0] != 257, g["betas"][1]) for g in groups for p in g["params"]
    }
    assert found == {(True, 0.95), (False, 0.99)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extrapolate": replace(ON, strength=1.0)}, r"extrapolate.strength=1: it must be from 0"),
        ({"extrapolate": replace(ON, decay=1.0)}, r"extrapolate.decay=1: it must be between"),
        ({"extrapolate": replace(ON, start=0.9)}, r"extrapolate.start=0.9: it must be from 0"),
        ({"extrapolate": replace(ON, end=1.5)}, r"extrapolate.end=1.5: it must be at most 1"),
        ({"optim": OptimSpec(momentum_ramp=0)}, r"optim.momentum_ramp=0: it must be at least 1"),
        ({"optim": OptimSpec(aux_beta2=1.5)}, r"optim: aux_betas=\(0.9, 1.5\) is not valid"),
        (
            {"optim": OptimSpec(name="adamw", aux_beta2=1.5)},
            r"optim: aux_betas=\(0.9, 1.5\) is not valid",
        ),
        ({"optim": OptimSpec(momentum_start=1.2)}, r"optim.momentum_start=1.2: it must be from 0"),
        ({"optim": OptimSpec(momentum_start=0.8)}, r"optim.momentum_ramp=300: the run has 12 step"),
        (
            {"optim": OptimSpec(name="adamw", momentum_start=0.8, momentum_ramp=5)},
            "momentum_start=0.8 has no meaning for optim.name=adamw: leave it at none",
        ),
        ({"optim": OptimSpec(slow_share=1.0)}, r"optim.slow_share=1: it must be from 0 to below"),
        ({"optim": OptimSpec(slow_decay=0.0)}, r"optim.slow_decay=0: it must be between 0 and 1"),
        ({"optim": OptimSpec(name="adamw", slow_share=0.5)}, "slow_share=0.5 has no meaning"),
        (
            {"optim": OptimSpec(name="adamw", soap=("*.mlp.*",))},
            r"soap=\*.mlp.\* has no meaning for optim.name=adamw: leave it out",
        ),
        ({"parallel": "fsdp"}, r"soap=\*.mlp.\* with parallel=fsdp and tensor=1: it needs whole"),
        (
            {"optim": OptimSpec(soap=("*.mpl.*",))},
            r"soap=\*.mpl.\* matches none of the optimizer's",
        ),
        (
            {"average": (3,), "average_forms": ("cube",)},
            "average_forms=cube: it must be sphere, half",
        ),
        ({"average": (3,), "average_forms": ("half", "half")}, "average_forms=half,half: it must"),
        ({"average_forms": ("half",)}, "average_forms=half without averages: set average"),
        (
            {"average": (3,), "average_forms": ("sphere",), "tensor": 2},
            "average_forms=sphere with tensor=2: sphere needs whole rows",
        ),
        ({"optim": OptimSpec(name="adamw", nesterov=False)}, "nesterov=false has no meaning"),
        ({"optim": OptimSpec(name="adamw", split_heads=True)}, "split_heads=true has no meaning"),
        (
            {"optim": OptimSpec(split_heads=True, split_blocks=False)},
            "split_heads=true with optim.split_blocks=false: heads are parts of blocks",
        ),
        ({"precision": "bf16_weights"}, "with precision=bf16_weights: moves as short as that"),
    ],
)
def test_errors_name_the_setting(data: Path, tmp_path: Path, changes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(tried(data, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_look_at_a_run_with_bf16_weights_names_the_setting_too() -> None:
    """`show`, `check` and dry runs plan it before they construct its optimizer."""
    spec = Spec(precision="bf16_weights", optim=OptimSpec(aux_beta2=1.5))
    with pytest.raises(UserError, match=r"optim: aux_betas=\(0.9, 1.5\) is not valid"):
        build.without_memory(spec)


def test_a_length_that_may_change_is_no_length_to_depend_on(data: Path) -> None:
    """Trunks, and runs without a cooldown, which may be extended."""
    spec = tried(data, extrapolate=ExtrapolateSpec())
    zero = replace(spec, optim=replace(spec.optim, momentum_start=0.0))
    for changed in (spec, zero, replace(spec, extrapolate=ON, optim=OptimSpec())):
        changed.check()
        for values in ({"kind": "constant"}, {"decay": 0.0}):
            with pytest.raises(ValueError, match="depends on the number of steps"):
                replace(changed, schedule=replace(spec.schedule, **values)).check()


def test_settings_without_effect_do_not_rename_a_run() -> None:
    usual = Spec()
    idle = {"aux_beta2": 0.95, "momentum_ramp": 5, "momentum_start": 0.95, "slow_decay": 0.9}
    for optim in ({key: value} for key, value in idle.items()):
        assert replace(usual, optim=OptimSpec(**optim)).folder_name("") == usual.folder_name("")
    off = replace(usual, extrapolate=ExtrapolateSpec(decay=0.9))
    assert off.folder_name("") == usual.folder_name("")
    for changed in (replace(usual, extrapolate=ON), replace(usual, optim=OptimSpec(aux_beta2=0.9))):
        assert changed.folder_name("") != usual.folder_name("")


def test_angles_change_the_learning_rate_of_some_matrices(data: Path) -> None:
    optim = OptimSpec(lr=0.02, angles=("*.down.weight=0.5",))
    spec = tiny(data, optim=optim)
    model = build.make_model(spec, Ranks(0, 1, torch.device("cpu")))
    names = {p: name for name, p in model.named_parameters()}
    found = {
        (names[p].endswith("down.weight"), group["lr"], group["radius_lr"] or group["lr"])
        for group in build.make_optimizer(model, spec).param_groups
        if group["algorithm"] == "matrix"
        for p in group["params"]
    }
    assert found == {(True, 0.01, 0.02), (False, 0.02, 0.02)}
    build.make_optimizer(model, replace(spec, optim=replace(optim, name="muon")))  # no row lengths
    for wrong in ("*.down.weight", "*.down.weight=half", "*.nothing=0.5"):
        with pytest.raises(ValueError, match=r"angles=\*\.down|nothing"):
            build.make_optimizer(model, replace(spec, optim=replace(optim, angles=(wrong,))))


def test_equal_rows_take_the_lengths_out_of_the_tangent_gradient() -> None:
    """Rows of length g with the gradient of unit rows over g: the step of unit rows."""
    torch.manual_seed(0)
    U = torch.nn.functional.normalize(torch.randn(6, 4, dtype=torch.float64))
    g, G = torch.rand(6, 1, dtype=torch.float64) + 0.5, torch.randn(6, 4, dtype=torch.float64)
    turned = []
    for length in (torch.ones_like(g), g):
        p = nn.Parameter(length * U)
        p.grad = G.clone()
        optimizer = AngularMuown([p], lr=0.1)
        equalize_rows(optimizer)
        optimizer.step()
        turned.append(torch.nn.functional.normalize(p.detach()))
    torch.testing.assert_close(*turned)
    with pytest.raises(ValueError, match=r"equal_rows=true has no meaning for optim\.name=muon"):
        build._check_meaning(OptimSpec(name="muon", equal_rows=True))


def test_equal_rows_change_a_run(data: Path, tmp_path: Path) -> None:
    spec = tiny(data)
    train(spec, tmp_path / "usual")
    train(replace(spec, optim=replace(spec.optim, equal_rows=True)), tmp_path / "equal")
    usual, equal = lines(tmp_path / "usual"), lines(tmp_path / "equal")
    assert equal[0] == usual[0]  # the loss before the first step
    assert equal[2] != usual[2]


SLOW = Spec(
    steps=9, optim=OptimSpec(name="muon", slow_share=0.6, slow_decay=0.7),
    schedule=replace(Spec().schedule, warmup=0, decay=1 / 3),
)  # fmt: skip


def gradients(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_step_is_that_of_two_momenta() -> None:
    """Muon steps along the polar factor of (1 - a) M + a M_slow, where M_slow is the momentum of
    averaged gradients; a follows the learning rate."""
    model = nn.Linear(6, 4, bias=False)
    expected = model.weight.detach().clone()
    optimizer = Muon([model.weight], lr=0.1, weight_decay=0.0, momentum=0.8, orthogonalize="svd")
    slow = SlowMomentum(model, optimizer, SLOW)
    S, M = gradients((4, 6), 0), torch.zeros(4, 6)
    for step in range(SLOW.steps):
        G = gradients((4, 6), step)
        model.weight.grad = G.clone()
        slow.mix(step)
        optimizer.step()
        S = 0.7 * S + 0.3 * G
        share = 0.6 * build.lr_factor(SLOW, step)
        T = (1 - share) * G + share * S
        M = 0.8 * M + T
        L, _, R = torch.linalg.svd(T + 0.8 * M, full_matrices=False)
        expected -= 0.1 * L @ R
    torch.testing.assert_close(model.weight.detach(), expected)
    assert build.lr_factor(SLOW, 8) < 1.0


def test_row_lengths_follow_the_gradient_itself() -> None:
    """Adam's r_i = <G_i, U_i> is that of G, and the rest that of the mixture."""
    spec = replace(SLOW, optim=replace(SLOW.optim, name="angular_muown"))
    model = nn.Linear(6, 4, bias=False)
    W = model.weight.detach()
    W[1] = 0.0  # a zero row has no direction to keep
    slow = SlowMomentum(model, AngularMuown([model.weight], lr=0.1), spec)
    S = gradients((4, 6), 0)
    for step in range(3):
        G = gradients((4, 6), step)
        model.weight.grad = G.clone()
        slow.mix(step)
        S = 0.7 * S + 0.3 * G
    new, mixed = model.weight.grad, 0.4 * G + 0.6 * S
    U = nn.functional.normalize(W)
    torch.testing.assert_close((new * U).sum(1), (G * U).sum(1))
    across = [x - (x * U).sum(1, keepdim=True) * U for x in (new, mixed)]
    torch.testing.assert_close(*across)
    torch.testing.assert_close(new[1], mixed[1])


def test_without_a_share_no_gradient_changes() -> None:
    model = nn.Linear(3, 2)
    slow = SlowMomentum(model, AngularMuown([model.weight], lr=0.1), Spec())
    model.weight.grad = before = gradients((2, 3), 0)
    slow.mix(500)
    assert slow.state() == {}
    assert model.weight.grad is before


@pytest.mark.parametrize("shape", [(9, 4), (4, 9), (3, 9, 4)])
def test_soap_equalizes_gradients_in_their_eigenbasis(shape: tuple[int, ...]) -> None:
    """With a covariance that does not change, the iteration stays at its eigenvectors."""
    p = nn.Parameter(torch.zeros(shape))
    model = nn.ParameterDict({"w": p})
    spec = Spec(optim=OptimSpec(name="muon", soap=("w",)))
    view = "stack" if p.ndim == 3 else "matrix"
    soap = Soap(model, Muon([{"params": [p], "view": view}], lr=0.1, weight_decay=0.0), spec)
    G = gradients(shape, 0)
    scales = [1.0, -2.0, 0.5]
    columns = G.double() if shape[-2] > shape[-1] else G.double().mT
    Q = torch.linalg.eigh(columns.mT @ columns).eigenvectors
    square = V = torch.zeros(())
    for step, scale in enumerate(scales):
        p.grad = scale * G
        soap.equalize(10 * step)  # renews the basis at every one
        square = scale**2 * (columns @ Q).square()
        V = square if step == 0 else 0.95 * V + 0.05 * square
        expected = (scale * columns @ Q / V.sqrt()) @ Q.mT
        expected = expected if shape[-2] > shape[-1] else expected.mT
        torch.testing.assert_close(p.grad, expected.float(), atol=2e-3, rtol=0)


def soap_of(shape: tuple[int, int]) -> tuple[nn.Parameter, Soap]:
    p = nn.Parameter(torch.zeros(shape))
    spec = Spec(optim=OptimSpec(name="muon", soap=("w",)))
    return p, Soap(nn.ParameterDict({"w": p}), Muon([p], lr=0.1, weight_decay=0.0), spec)


def test_soap_finds_the_basis_of_later_gradients() -> None:
    """Columns that are mixtures of independent ones of different sizes become equally large, also
    if the first gradient was another mixture."""
    torch.manual_seed(0)
    p, soap = soap_of((64, 4))
    other, mixing = (torch.linalg.qr(torch.randn(4, 4)).Q for _ in range(2))
    sizes, squares = torch.tensor([100.0, 10.0, 1.0, 0.1]), []
    for step in range(400):
        p.grad = torch.randn(64, 4) * sizes @ (mixing if step else other)
        soap.equalize(step)
        squares.append((p.grad @ mixing.T).square().mean(0))
    sizes_after = torch.stack(squares[-50:]).mean(0).sqrt()
    torch.testing.assert_close(sizes_after, torch.ones(4), atol=0.1, rtol=0)


def test_soap_averages_the_covariance_and_renews_the_basis_at_times() -> None:
    p, soap = soap_of((5, 3))
    own, C, Q = soap.states["w"], torch.zeros(3, 3), torch.zeros(3, 3)
    for step in range(25):
        G = gradients((5, 3), step)
        C = 0.95 * C + 0.05 * G.T @ G if step else G.T @ G
        p.grad = G.clone()
        soap.equalize(step)
        torch.testing.assert_close(own["covariance"], C)
        assert torch.equal(own["basis"], Q) == (step % 10 != 0), step
        Q = own["basis"].clone()


@pytest.mark.parametrize("saved", [("a",), ("a", "b")])
def test_soap_begins_with_the_first_gradient_of_each_matrix(saved: tuple[str, ...]) -> None:
    """Also after loading a state in which a matrix is missing or had no gradient yet."""
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(9, 4)) for name in "ab"})
    optimizer = Muon(list(model.values()), lr=0.1, weight_decay=0.0)
    before, after = (
        Soap(model, optimizer, Spec(optim=OptimSpec(name="muon", soap=patterns)))
        for patterns in (saved, ("a", "b"))
    )
    G = gradients((9, 4), 0)
    model["a"].grad = G.clone()
    before.equalize(3)
    expected = model["a"].grad
    after.load(before.state())
    model["a"].grad, model["b"].grad = G.clone(), G.clone()
    after.equalize(4)
    assert torch.equal(model["b"].grad, expected)
    torch.testing.assert_close(model["a"].grad, expected, atol=1e-5, rtol=0)


def test_soap_leaves_row_lengths_to_the_gradient_itself() -> None:
    model = nn.Linear(6, 4, bias=False)
    spec = Spec(optim=OptimSpec(soap=("weight",)))
    soap = Soap(model, AngularMuown([model.weight], lr=0.1), spec)
    G, U = gradients((4, 6), 0), nn.functional.normalize(model.weight.detach())
    model.weight.grad = G.clone()
    soap.equalize(0)
    torch.testing.assert_close((model.weight.grad * U).sum(1), (G * U).sum(1))
    assert not torch.allclose(model.weight.grad, G)


@pytest.mark.parametrize(
    "optim",
    [{"slow_share": 0.5}, {"nesterov": False}, {"split_heads": True}, {"soap": ("*.mlp.*",)}],
)
def test_each_setting_changes_a_run(data: Path, tmp_path: Path, optim) -> None:
    spec = tiny(data)
    train(spec, tmp_path / "usual")
    train(replace(spec, optim=replace(spec.optim, **optim)), tmp_path / "changed")
    usual, changed = lines(tmp_path / "usual"), lines(tmp_path / "changed")
    assert changed[0] == usual[0]
    assert changed[-1] != usual[-1]


def test_queries_and_keys_are_cut_by_heads(data: Path) -> None:
    spec = tiny(data, optim=OptimSpec(split_heads=True))
    size, heads = spec.model.width // spec.model.heads, 2 * spec.model.heads
    assert spec.model.heads > 1
    model = build.make_model(spec, Ranks(0, 1, torch.device("cpu")))
    names = {p: name for name, p in model.named_parameters()}
    cuts = {
        names[p].rpartition("layers.0.")[2]: group["blocks"]
        for group in build.make_optimizer(model, spec).param_groups
        for p in group["params"]
        if "layers.0." in names[p] and group["algorithm"] == "matrix"
    }
    assert cuts["attn.qkv.weight"] == [*[size] * heads, spec.model.width]
    assert cuts["mlp.gate_up.weight"] == 2
