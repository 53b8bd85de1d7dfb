"""What several test files share."""

import atexit
import os
import tempfile
import uuid
from pathlib import Path

import pytest

from tests.hdfs_cluster import INSTALL, HdfsCluster, HdfsError, fetch_jars, list_missing_packages
from tests.s3_server import S3Server, list_missing_modules

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
S3_MISSING = pytest.StashKey[str]()


def pytest_collection_modifyitems(items):
    for item in items:
        for server in {"hdfs", "s3"} & set(item.fixturenames):
            item.add_marker(server)


def pytest_terminal_summary(terminalreporter, config):
    for name, key in (("a real HDFS", HDFS_MISSING), ("an S3 server", S3_MISSING)):
        if reason := config.stash.get(key, None):
            terminalreporter.write_line(f"The tests on {name} were skipped: {reason}")


def is_required(server):
    return server in os.environ.get("RECIPE_CKPT_REQUIRE", "").split(",")


@pytest.fixture(scope="session")
def hdfs(request):
    """A real HDFS for the whole session: tests/hdfs_cluster.py. Who needs a directory in it, asks for `hdfs_url`."""
    try:
        cluster, folder = start_hdfs()
    except HdfsError as error:
        if is_required("hdfs"):
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


@pytest.fixture(scope="session")
def s3(request, tmp_path_factory):
    """An S3 server for the rest of the session, which is what s3:// means from now on: tests/s3_server.py.

    Who needs a place in it, asks for `s3_url`.
    """
    if missing := list_missing_modules():
        reason = f"{', '.join(missing)} are not installed. Run: pip install -c constraints.txt -e '.[s3,dev]'"
        assert not is_required("s3"), reason
        request.config.stash[S3_MISSING] = reason
        pytest.skip(f"no S3 server: {reason}")
    server = S3Server(tmp_path_factory.mktemp("s3"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        patch.delenv("AWS_PROFILE", raising=False)
        server.start()
        yield server
        server.stop()


@pytest.fixture
def s3_url(s3):
    """A place in a bucket of the test's own; afterwards what the test did to the server is undone."""
    yield s3.make_place()
    s3.undo()
