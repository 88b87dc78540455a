"""What several files share."""

import pytest

from tests.cpu.tiny import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Four layers, to be cut into up to four stages."""
    return save_tiny(tmp_path_factory.mktemp("model"), "llama3.2", num_hidden_layers=4)
