from pathlib import Path

import pytest
from tests.docs.hub import fill


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny models, each in a folder of the name that it has on the hub."""
    folder = tmp_path_factory.mktemp("hub")
    fill(folder)
    return folder
