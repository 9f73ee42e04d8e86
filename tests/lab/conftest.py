from pathlib import Path

import pytest

from angular_lab.data.prepare import prepare_stdlib


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of the standard library's text, made once."""
    return prepare_stdlib(tmp_path_factory.mktemp("data"))
