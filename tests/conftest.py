"""What several test files share."""

import atexit
import os
import tempfile
import uuid
from pathlib import Path

import pytest

from tests.hdfs_cluster import INSTALL, HdfsCluster, HdfsError, fetch_jars, list_missing_packages

# Where `datasets` keeps what it has read; it asks the environment when it is imported.
_CACHE = tempfile.TemporaryDirectory(prefix="recipe_ckpt_datasets_")
atexit.register(_CACHE.cleanup)
os.environ["HF_DATASETS_CACHE"] = _CACHE.name


@pytest.fixture
def place():
    """A directory in memory, where there is one: a sweep syncs thousands of files."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture
def root(tmp_path):
    """Where a run's root is to be; not made yet."""
    return tmp_path / "root"


@pytest.fixture
def mirror(tmp_path):
    """A directory beside the root, for its mirror; not made yet."""
    return tmp_path / "mirror"


HDFS_MISSING = pytest.StashKey[str]()


def pytest_collection_modifyitems(items):
    for item in items:
        if "hdfs" in item.fixturenames:
            item.add_marker("hdfs")


def pytest_terminal_summary(terminalreporter, config):
    if reason := config.stash.get(HDFS_MISSING, None):
        terminalreporter.write_line(f"The tests on a real HDFS were skipped: {reason}")


@pytest.fixture(scope="session")
def hdfs(request):
    """A real HDFS for the whole session: tests/hdfs_cluster.py. Who needs a directory in it, asks for `hdfs_url`."""
    try:
        cluster, folder = start_hdfs()
    except HdfsError as error:
        if "hdfs" in os.environ.get("RECIPE_CKPT_REQUIRE", "").split(","):
            raise
        request.config.stash[HDFS_MISSING] = str(error)
        pytest.skip(f"no HDFS: {error}")
    yield cluster
    cluster.stop()
    folder.cleanup()


def start_hdfs():
    if missing := list_missing_packages():
        raise HdfsError(f"Debian's {', '.join(missing)} are not installed. As root, run: {INSTALL}")
    fetch_jars()
    for tries_left in (1, 0):
        folder = tempfile.TemporaryDirectory(prefix="recipe_ckpt_hdfs_")
        cluster = HdfsCluster(folder.name)
        try:
            cluster.start()
        except HdfsError:
            cluster.stop()
            folder.cleanup()
            if not tries_left:  # the first time somebody may have taken one of its ports
                raise
        else:
            return cluster, folder


@pytest.fixture
def hdfs_url(hdfs):
    """A directory of the test's own, not made yet; afterwards what the test did to the nodes is undone."""
    yield f"{hdfs.uri}/{uuid.uuid4().hex}"
    hdfs.restart()
