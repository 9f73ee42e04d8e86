"""Optimizers that earlier code saved load and continue. tests/kept/make.py made the files."""

from pathlib import Path

import pytest
import torch

from tests.kept import make


@pytest.mark.parametrize("member", make.MEMBERS)
def test_an_older_state_dict_continues(member: str) -> None:
    kept = torch.load(Path(make.FOLDER) / f"{member}.pt", weights_only=True)
    params = make.start(torch.float64)
    for name, p in params.items():
        p.data.copy_(kept["middle"][name])
    optimizer = make.optimizer_of(member, params, {"average": 0.2})
    optimizer.load_state_dict(kept["state"])
    make.advance(optimizer, params, range(5, 10))
    for name, p in params.items():
        # another processor may round otherwise
        torch.testing.assert_close(p.detach(), kept["end"][name], rtol=1e-11, atol=1e-13)
        moved = (kept["end"][name] - kept["middle"][name]).abs().max()
        assert moved > 1e-3, "a test that moves nothing"
