"""The fused step on a GPU; run these tests with `pytest -m gpu`."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from angular_muown import AngleMonitor, AngularMuown, NorMuown, averaging
from angular_muown.engine import Engine
from angular_muown.kernels.pointers import SLOTS, PinnedRing
from tests.library.family import FUSED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = [(768, 768), (2048, 768), (768, 2048), (704, 1024), (144, 304), (2, 256, 512)]
STEPS = 4  # the first compiles, the second records a graph, the others replay it


def spectrum(kind: str, m: int, n: int) -> Tensor:
    k = min(m, n)
    U, V = (torch.linalg.qr(torch.randn(side, k, dtype=torch.float64))[0] for side in (m, n))
    values = {
        "gauss": torch.rand(k, dtype=torch.float64) + 0.1,
        "condition 1e12": torch.logspace(0, -12, k, dtype=torch.float64),
        "rank one": (torch.arange(k) == 0).double(),
        "repeated": torch.where(torch.arange(k) < k // 2, 1.0, 0.1).double(),
    }
    if kind == "huge row":
        X = torch.randn(m, n, dtype=torch.float64)
        X[3] *= 1e4
        return X
    return U @ torch.diag(values[kind]) @ V.T


def run(
    make: Callable[..., Engine], gradients: list[list[Tensor]], dtype: torch.dtype, fused: bool
) -> tuple[list[Tensor], Engine]:
    """Train on the gradients; return the change in each weight, and the optimizer."""
    torch.manual_seed(0)
    start = [0.02 * torch.randn(g.shape, dtype=torch.float64) for g in gradients[0]]
    params = [nn.Parameter(w.to("cuda", dtype)) for w in start]
    flat = [p for p in params if p.ndim == 2]
    stacks = [p for p in params if p.ndim > 2]
    groups = [{"params": flat, "algorithm": "matrix"}, {"params": stacks, "view": "stack"}]
    optimizer = make([group for group in groups if group["params"]])
    if not fused:
        optimizer._update_fused = lambda batch, *_: batch.params  # type: ignore[method-assign]
    before = [p.detach().double().clone() for p in params]
    for step in gradients:
        for p, g in zip(params, step, strict=True):
            p.grad = g.to("cuda", dtype).clone()
        optimizer.step()
    return [p.detach().double() - b for p, b in zip(params, before, strict=True)], optimizer


def errors(changes: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(changes, expected, strict=True)]


@pytest.mark.parametrize("optimizer", FUSED)
def test_the_fused_step_matches_float64(optimizer: Callable[..., Engine]) -> None:
    torch.manual_seed(1)
    gradients = [[1e-3 * torch.randn(shape) for shape in SHAPES] for _ in range(STEPS)]
    fused, opt = run(optimizer, gradients, torch.float32, fused=True)
    eager, _ = run(optimizer, gradients, torch.float32, fused=False)
    expected, _ = run(optimizer, gradients, torch.float64, fused=True)
    assert opt._fused is not None
    for _, step, rest in opt._fused.steps.values():
        assert step is not None
        assert step.recording.graph is not None
        assert not rest
    for fast, plain in zip(errors(fused, expected), errors(eager, expected), strict=True):
        assert fast < 5e-3
        assert fast <= plain


@pytest.mark.parametrize("kind", ["gauss", "condition 1e12", "rank one", "repeated", "huge row"])
@pytest.mark.parametrize("shape", [(768, 768), (2048, 512), (512, 2048)])
def test_errors_on_every_spectrum_are_at_most_those_of_bfloat16(
    kind: str, shape: tuple[int, int]
) -> None:
    torch.manual_seed(2)
    gradients = [[spectrum(kind, *shape)]]
    make = lambda params: AngularMuown(params, radius="fixed")  # noqa: E731
    fast, plain = (run(make, gradients, torch.float32, fused)[0] for fused in (True, False))
    expected, _ = run(make, gradients, torch.float64, False)
    assert errors(fast, expected)[0] <= errors(plain, expected)[0]


def test_lr_momentum_and_kappa_reach_a_recorded_graph() -> None:
    torch.manual_seed(3)
    gradients = [[1e-3 * torch.randn(768, 768)] for _ in range(6)]
    ends = []
    for fused in (True, False):
        p = nn.Parameter(0.02 * torch.ones(768, 768, device="cuda").tril())
        opt = AngularMuown([p], warmup_steps=2, decay_scale=1.0)
        if not fused:
            opt._update_fused = lambda batch, *_: batch.params  # type: ignore[method-assign]
        for t, (g,) in enumerate(gradients):
            opt.param_groups[0].update(lr=0.01 * (t + 1), momentum=0.5 + 0.05 * t)
            p.grad = g.cuda()
            opt.step()
        ends.append(p.detach() - 0.02 * torch.ones_like(p).tril())
    assert (ends[0] - ends[1]).norm() < 1e-2 * ends[1].norm()


def test_a_copy_of_the_optimizer_continues_bit_identically() -> None:
    torch.manual_seed(4)
    gradients = [1e-3 * torch.randn(768, 2048).cuda() for _ in range(6)]
    p = nn.Parameter(0.02 * torch.randn(768, 2048, device="cuda"))
    opt = AngularMuown([p])
    for g in gradients[:3]:
        p.grad = g.clone()
        opt.step()
    q = nn.Parameter(p.detach().clone())
    other = AngularMuown([q])
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    for g in gradients[3:]:
        for w, o in ((p, opt), (q, other)):
            w.grad = g.clone()
            o.step()
    assert torch.equal(p, q)


def recorded(p: nn.Parameter, opt: AngularMuown) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Record forward, backward and step for |W x|^2; return the graph and its input."""
    x = torch.zeros(p.shape[1], 8, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        (p @ x).square().sum().backward()
        opt.step()  # state, buffers, compiled kernels
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    opt.zero_grad()
    with torch.cuda.graph(graph):
        (p @ x).square().sum().backward()
        opt.step()
    return graph, x


def test_a_training_step_recorded_by_the_user_matches_plain_steps() -> None:
    """Replays follow the scheduler, kappa, Adam's counters and the average's share."""
    torch.manual_seed(5)
    start = 0.02 * torch.randn(768, 512)
    inputs = [torch.randn(512, 8) for _ in range(5)]
    ends = []
    for use_graph in (True, False):
        p = nn.Parameter(start.cuda())
        opt = AngularMuown([p], lr=0.05, capturable=True, decay_scale=1.0, average=0.5)
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 1 / (1 + t))
        if use_graph:
            graph, x = recorded(p, opt)
        else:
            p.grad = torch.zeros_like(p)
            opt.step()
            opt.zero_grad()
        for values in inputs:
            if use_graph:
                x.copy_(values)
                graph.replay()
            else:
                (p @ values.cuda()).square().sum().backward()
                opt.step()
                opt.zero_grad()
            schedule.step()
        assert int(opt.param_groups[0]["step"]) == len(inputs) + 1
        ends.append(torch.stack([p.detach(), opt.state[p]["average"]]))
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # recording was refused
def test_recording_is_rejected_while_a_parameter_has_no_gradient() -> None:
    p, q = (nn.Parameter(torch.randn(256, 256, device="cuda")) for _ in range(2))
    opt = AngularMuown([("p", p), ("q", q)], capturable=True)
    p.grad = torch.randn_like(p)
    opt.step()
    with (
        pytest.raises(RuntimeError, match="'q' has no gradient"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        opt.step()


def test_release_frees_the_work_buffer() -> None:
    p = nn.Parameter(torch.randn(2048, 2048, device="cuda"))
    opt = AngularMuown([p])
    p.grad = torch.randn_like(p)
    for _ in range(3):
        opt.step()
    allocated = torch.cuda.memory_allocated()
    opt.release()
    assert torch.cuda.memory_allocated() <= allocated - p.numel()  # a quarter of the weight's bytes
    opt.step()


def test_a_monitored_step_does_not_copy_all_weights() -> None:
    """The memory for one chunk at a time is less than half of the weights."""
    net = nn.ParameterList([torch.randn(1024, 1024, device="cuda") for _ in range(32)])
    opt = AngularMuown(net.parameters())
    monitor = AngleMonitor(net, opt)
    allocated = 0
    for _ in range(3):
        for p in net:
            p.grad = torch.randn_like(p)
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        opt.step()
    extra = torch.cuda.max_memory_allocated() - allocated
    assert extra < sum(p.numel() * p.element_size() for p in net) / 2
    assert monitor.read()["angle_mean"] > 0


def test_a_second_optimizer_compiles_nothing() -> None:
    """Nor does another number of matrices of the same shape, another lr or another step."""
    from angular_muown.kernels.triton import matmul, rows

    kernels = [rows.before_kernel, rows.after_kernel, matmul.symmetric_kernel]
    kernels += [matmul.apply_kernel, rows.scales_kernel, rows.normalize_kernel]
    kernels += [rows.squares_kernel, rows.second_moment_kernel]

    def step(count: int) -> int:
        params = [nn.Parameter(torch.randn(384, 512, device="cuda")) for _ in range(count)]
        opt = NorMuown(params, lr=0.01 * count)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn_like(p)
            opt.step()
        return sum(len(caches[0]) for k in kernels for caches in k.device_caches.values())

    assert step(3) == step(16) == step(1) == step(2)


def test_copies_arrive_in_order_if_the_device_lags_behind() -> None:
    """Slots are reused only after the device has read them."""
    ring = PinnedRing(torch.zeros(64, device="cuda"))
    received = []
    for i in range(3 * SLOTS):
        torch.cuda._sleep(1_000_000)  # about half a millisecond
        ring.send(torch.full((64,), float(i)))
        received.append(ring.target.clone())
    assert [t.unique().tolist() for t in received] == [[float(i)] for i in range(3 * SLOTS)]


def test_the_default_device_is_ignored() -> None:
    ends = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(256, 384, device="cuda"))
        optimizer = AngularMuown([p])
        gradients = [torch.randn(256, 384, device="cuda") for _ in range(STEPS)]
        with torch.device(device):
            for G in gradients:
                p.grad = G
                optimizer.step()
        ends.append(p.detach())
    assert torch.equal(*ends)


@pytest.mark.parametrize("capturable", [False, True])
def test_averages_on_a_gpu(capturable: bool) -> None:
    """They follow the recurrence over the weights, and do not change a bit of the weights."""
    ends, average = [], None
    for window in (None, 0.1):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(256, 384, device="cuda"))
        optimizer = AngularMuown([p], average=window, capturable=capturable)
        expected = p.detach().double()
        for k in range(1, 2 * STEPS + 1):
            p.grad = torch.randn_like(p)
            optimizer.step()
            expected.lerp_(p.detach().double(), averaging(0.1)(k))
        ends.append(p.detach().clone())
        if window is not None:
            with optimizer.averaged():
                average = p.detach().clone()
    assert torch.equal(*ends)
    assert average is not None
    torch.testing.assert_close(average.double(), expected, rtol=1e-5, atol=1e-6)
