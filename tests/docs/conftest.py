import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def hooks():
    """The module docs/hooks.py, which MkDocs loads by its path too."""
    path = Path(__file__).parents[2] / "docs" / "hooks.py"
    spec = importlib.util.spec_from_file_location("hooks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
