from pathlib import Path

import pytest
from tests.docs.hub import fill


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes tiny models, each into a folder that has the model's name on the hub."""
    folder = tmp_path_factory.mktemp("hub")
    fill(folder)
    return folder
