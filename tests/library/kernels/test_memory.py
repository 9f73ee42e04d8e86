"""The work buffer stays within its budget, and its streams get equal work."""

import pytest
import torch

from angular_muown import AngularMuown
from angular_muown.kernels.launch import CUBLAS_WORKSPACE, Budget, divide
from tests.library.family import noise, parameter

pytest.importorskip("triton")

from tests.library.kernels.test_fused import kernels

MiB = 2**20


@pytest.mark.parametrize("budget", [1000, 8 * MiB, 80 * MiB, 128 * MiB, 256 * MiB, 20_000 * MiB])
@pytest.mark.parametrize("largest", [1, 20_000, 3 * MiB, 20 * MiB, 50 * MiB])  # words
def test_the_budget_is_respected_if_the_largest_matrix_fits(budget: int, largest: int) -> None:
    divided = divide(budget, [1, largest])
    spent = divided.streams * (2 * max(divided.words, largest) + divided.cublas * CUBLAS_WORKSPACE)
    if 2 * largest <= budget:
        assert spent <= budget
    assert 4 * divided.cublas * divided.streams * CUBLAS_WORKSPACE <= budget
    assert divided.words >= largest or divided == Budget(1, budget // 2, False)


@pytest.mark.parametrize(
    ("budget", "largest", "expected"),  # in MiB, in units of 2**20 words
    [
        (256, 1, Budget(2, 48 * MiB, True)),
        (252, 1, Budget(4, 63 * MiB // 2, False)),  # workspaces would exceed a quarter
        (64, 12, Budget(2, 16 * MiB, False)),  # too little for four streams
        (256, 60, Budget(2, 64 * MiB, False)),
        (256, 100, Budget(1, 112 * MiB, True)),
        (100, 50, Budget(1, 50 * MiB, False)),
        (100, 51, Budget(1, 50 * MiB, False)),  # a single matrix exceeds it
    ],
)
def test_the_fastest_configuration_that_fits_is_chosen(
    budget: int, largest: int, expected: Budget
) -> None:
    assert divide(budget * MiB, [1, largest * MiB]) == expected


def test_small_models_do_not_use_cublas() -> None:
    assert not divide(81 * MiB, [2 * MiB]).cublas  # a quarter of gpt124
    assert divide(928 * MiB, [40 * MiB]).cublas  # a quarter of llama1b


@pytest.mark.parametrize("count", [1, 3, 12])
def test_streams_get_equal_work_and_every_matrix_one_chunk(
    count: int,
) -> None:
    with kernels(True):
        shapes = [(128, 144)] * count + [(256, 128)] * (count // 2)
        params = [parameter(*s, seed=i, dtype=torch.float32) for i, s in enumerate(shapes)]
        for i, p in enumerate(params):
            p.grad = noise(*p.shape, seed=i).float()
        opt = AngularMuown(params, workspace=2.0)
        opt.step()
    assert opt._fused is not None
    _, step, _ = opt._fused.steps[0]
    assert step is not None
    loads = [0.0] * step.budget.streams
    seen: set[tuple[int, int]] = set()
    for chunk in step.chunks:
        loads[chunk.stream] += chunk.count * chunk.batch.microseconds
        seen |= {(chunk.batch.start, chunk.first + i) for i in range(chunk.count)}
        words = step.stream_words * (step.budget.streams - chunk.stream)
        assert chunk.work.numel() == words
        assert chunk.count * chunk.batch.words <= step.stream_words
    assert len(seen) == len(shapes)
    largest = max(chunk.count * chunk.batch.microseconds for chunk in step.chunks)
    assert max(loads) - min(loads) <= largest
    if count == 12:
        assert max(loads) - min(loads) < 0.35 * sum(loads)


@pytest.mark.parametrize("workspace", [1e-6, 0.25])
def test_a_small_model_is_stepped_in_few_chunks(workspace: float) -> None:
    with kernels(True):
        params = [parameter(128, 144, seed=i, dtype=torch.float32) for i in range(12)]
        for i, p in enumerate(params):
            p.grad = noise(*p.shape, seed=i).float()
        opt = AngularMuown(params, workspace=workspace)
        opt.step()
    assert opt._fused is not None
    _, step, _ = opt._fused.steps[0]
    assert step is not None
    assert len(step.chunks) == step.budget.streams == 4
    assert step.work_words == 12 * step.batches[0].words  # no more memory than matrices need
