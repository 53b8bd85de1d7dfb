"""Runs with a mirror in a bucket of an S3 server."""

import os
import shutil

import pytest

from recipe_ckpt.errors import ConfigError, RemoteRefusedError, RemoteUnreachableError
from recipe_ckpt.remote_client import Deadlines, RemoteClient
from recipe_ckpt.remote_fsspec import FsspecRemote
from tests.test_hdfs_runs import to
from tests.tiny import Run, list_steps, make_checkpoints, resume


def list_bucket(url):
    return [entry.name for entry in FsspecRemote(url).list_dir("") if entry.is_dir]


def test_an_empty_disk_resumes_from_a_bucket(s3_url, root):
    make_checkpoints(root, 2, 4, **to(s3_url))
    shutil.rmtree(root)
    with Run(root, **to(s3_url)) as run:
        assert run.start == run.engine.value == 4
        run.save(6)
    assert list_steps(root) == [4, 6]
    assert list_bucket(s3_url) == ["global_step_2", "global_step_4", "global_step_6"]


def test_a_fresh_start_over_a_run_in_a_bucket_is_refused(s3_url, root, tmp_path):
    mirrored = to(s3_url, open_remote=FsspecRemote)
    make_checkpoints(tmp_path / "first", 2, **mirrored)
    before = FsspecRemote(s3_url).list_files("")
    with pytest.raises(ConfigError, match="default_hdfs_dir: found 's3://.*an object store can't move"):
        resume(root, resume_mode="disable", **mirrored)
    assert FsspecRemote(s3_url).list_files("") == before


def test_a_bucket_that_does_not_exist_is_an_error_at_the_start(s3_url, root):
    with pytest.raises(RemoteRefusedError, match="default_hdfs_dir: .*bucket does not exist. Make the bucket"):
        resume(root, **to(s3_url.replace("bucket-", "no-bucket-"), open_remote=FsspecRemote))


def test_an_absent_bucket_has_no_names_and_no_files(s3_url):
    absent = FsspecRemote(s3_url.replace("bucket-", "no-bucket-"))
    assert (absent.list_dir(""), absent.list_files("")) == ([], {})


def test_an_unknown_key_is_refused_and_says_what_to_set(s3, s3_url):
    s3.forget_users()
    with pytest.raises(RemoteRefusedError, match="does not exist in our records. Set AWS_ACCESS_KEY_ID"):
        FsspecRemote(s3_url).probe()


def test_missing_keys_are_named(s3_url, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(RemoteUnreachableError, match="Unable to locate credentials. Set AWS_ACCESS_KEY_ID"):
        FsspecRemote(s3_url).list_dir("")


def test_a_name_that_no_bucket_can_have_is_refused(s3):
    with pytest.raises(RemoteRefusedError, match="Parameter validation failed. Make the bucket, or correct its name"):
        FsspecRemote("s3://no bucket!/run").probe()


def test_a_silent_server_ends_at_the_deadline_and_comes_back(s3, s3_url):
    client = RemoteClient(s3_url, deadlines=Deadlines(answer_secs=3))
    client.write("f", b"1")
    s3.pause()
    with pytest.raises(RemoteUnreachableError, match="read was silent for 3 s"):
        client.read("f")
    s3.undo()
    assert client.read("f") == b"1"
    client.close()


def test_a_server_that_is_not_there_is_unreachable_not_empty(s3_url, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(RemoteUnreachableError, match="Could not connect to the endpoint"):
        FsspecRemote(s3_url).list_dir("")


def test_an_upload_gives_a_sign_of_life_with_every_few_megabytes(s3_url, tmp_path):
    moved = []
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 40 << 20)
    remote = FsspecRemote(s3_url)
    remote.put_file(str(tmp_path / "large"), "large", moved.append)
    assert moved == [8 << 20] * 5
    assert remote.list_files("") == {"large": 40 << 20}
