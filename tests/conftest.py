"""Settings for all tests. The environment variables must be set before the imports they affect."""

import gc
import os
import signal

# Some virtual machines advertise AMX but do not allow it: a bf16 product would then end the process
# with an illegal instruction. torch reads this variable when it is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import settings

# Without a GPU, kernels run in Triton's interpreter. Any later import may import Triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")
torch.set_num_threads(1)  # the suite already runs in two processes
# Background jobs of a script ignore SIGINT, and so would their children. Tests send it to children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Keep the garbage collector from going through all imported modules, which takes it a second
    when a run or a checkpoint asks for it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or extension modules report leaks when the process ends
