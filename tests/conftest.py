"""What several test files share."""

import atexit
import os
import tempfile
from pathlib import Path

import pytest

# Where `datasets` keeps what it has read; it asks the environment when it is imported.
_CACHE = tempfile.TemporaryDirectory(prefix="recipe_ckpt_datasets_")
atexit.register(_CACHE.cleanup)
os.environ["HF_DATASETS_CACHE"] = _CACHE.name


@pytest.fixture
def place():
    """A directory in memory, where there is one: a sweep syncs thousands of files."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)
