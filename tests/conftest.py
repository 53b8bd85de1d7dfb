"""What several test files share."""

import os
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def place():
    """A directory in memory, where there is one: a sweep syncs thousands of files."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)
