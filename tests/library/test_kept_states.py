"""State dicts saved by earlier code load and continue. tests/kept/make.py wrote the files."""

from pathlib import Path

import pytest
import torch

from tests.kept import make


@pytest.mark.parametrize("file", make.KEPT)
def test_an_older_state_dict_continues(file: str) -> None:
    archive = torch.load(Path(make.FOLDER) / f"{file}.pt", weights_only=True)
    params = make.start(torch.float64)
    for name, p in params.items():
        p.data.copy_(archive["middle"][name])
    optimizer = make.optimizer_of(make.KEPT[file][0], params, make.KEPT[file][1])
    optimizer.load_state_dict(archive["state"])
    make.advance(optimizer, params, range(5, 10))
    for name, p in params.items():
        # not to the bit: another processor may round differently
        torch.testing.assert_close(p.detach(), archive["end"][name], rtol=1e-11, atol=1e-13)
        moved = (archive["end"][name] - archive["middle"][name]).abs().max()
        assert moved > 1e-3, "the archived run did not move the weights"
