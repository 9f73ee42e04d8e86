"""Before torch is imported: some virtual machines advertise AMX without allowing it, and a bf16
product would end the process with an illegal instruction. Before Triton is imported, by whatever:
without a GPU its kernels run in its interpreter."""

import os
import signal

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")
torch.set_num_threads(1)  # the suite runs in two processes
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests send it, children inherit it


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
