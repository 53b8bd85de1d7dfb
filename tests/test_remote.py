"""Remote file systems: one contract for every kind, in this process and in one of its own."""

import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from recipe_ckpt.checkpoint_rules import check_remote_url
from recipe_ckpt.errors import ConfigError, RemoteRefusedError, RemoteUnreachableError
from recipe_ckpt.remote_client import Deadlines, RemoteClient
from recipe_ckpt.remote_failures import translate_failure
from recipe_ckpt.remote_fsspec import FsspecRemote
from recipe_ckpt.storage import DirEntry, describe_file
from tests.hdfs_cluster import write_settings

RENAMING = [(opener, kind) for opener in (FsspecRemote, RemoteClient) for kind in ("path", "file", "hdfs")]
OBJECTS = [(FsspecRemote, "memory"), (FsspecRemote, "s3"), (RemoteClient, "s3")]
MARKS = {"hdfs": pytest.mark.hdfs, "s3": pytest.mark.s3}
ODD_NAMES = ["a b", "100%", "a%20b", "ü", "模型", "a?b#c", "a+b&c"]
KEY = "checkpoint.default_hdfs_dir"
LEFT_OVER = ".0123456789abcdef0123456789abcdef.tmp"


def name_params(params):
    return [
        pytest.param((opener, kind), id=f"{opener.__name__}-{kind}", marks=[MARKS[kind]] if kind in MARKS else [])
        for opener, kind in params
    ]


@pytest.fixture(params=name_params([*RENAMING, *OBJECTS]))
def remote(request, tmp_path):
    opener, kind = request.param
    urls = {"path": f"{tmp_path}/r", "file": f"file://{tmp_path}/r", "memory": f"memory://{tmp_path.name}/r"}
    is_shared = request.param == (RemoteClient, "s3")
    opened = (
        request.getfixturevalue("s3_client")
        if is_shared
        else opener(urls.get(kind) or request.getfixturevalue(f"{kind}_url"))
    )
    yield opened
    opened.remove_tree("")
    if not is_shared:
        opened.close()


@pytest.fixture(scope="class")
def s3_client(s3):
    """One for all tests of the class: an S3 library takes its second to be imported by a new process."""
    client = RemoteClient(s3.make_place())
    yield client
    client.close()


only_renaming = pytest.mark.parametrize("remote", name_params(RENAMING), indirect=True)


@pytest.fixture
def hdfs_client(hdfs_url):
    with_deadline = RemoteClient(hdfs_url, deadlines=Deadlines(answer_secs=3))
    yield with_deadline
    with_deadline.close()


@pytest.fixture
def local(tmp_path):
    """A file of 20 MB and a bit: three chunks."""
    path = tmp_path / "local"
    path.write_bytes(os.urandom(1 << 20) * 20 + b"end")
    return str(path)


@pytest.fixture
def large(tmp_path):
    """A file of 256 MB, which takes a while."""
    path = tmp_path / "large"
    path.touch()
    os.truncate(path, 256 << 20)
    return str(path)


class TestContract:
    def test_probe_leaves_an_empty_directory(self, remote):
        remote.probe()
        assert remote.list_dir("") == []

    def test_absent_directory_has_no_names_and_no_files(self, remote):
        assert remote.list_dir("absent") == []
        assert remote.list_files("absent") == {}

    def test_absent_file_is_not_found(self, remote, tmp_path):
        with pytest.raises(FileNotFoundError, match="/no"):
            remote.read("no")
        with pytest.raises(FileNotFoundError, match="no"):
            remote.get_file("no", str(tmp_path / "x"))
        with pytest.raises(FileNotFoundError, match="no"):
            remote.rename("no", "other")

    def test_write_replaces_the_file(self, remote):
        remote.write("a/f", b"old")
        remote.write("a/f", b"newer")
        assert remote.read("a/f") == b"newer"
        assert remote.list_files("") == {"a/f": 5}

    def test_empty_file_is_a_file(self, remote):
        remote.write("empty", b"")
        assert (remote.read("empty"), remote.list_files("")) == (b"", {"empty": 0})

    def test_names_stand_for_themselves(self, remote):
        for name in ODD_NAMES:
            remote.write(f"{name}/{name}", name.encode())
        assert [entry.name for entry in remote.list_dir("")] == sorted(ODD_NAMES)
        assert all(remote.read(f"{name}/{name}") == name.encode() for name in ODD_NAMES)

    def test_list_dir_tells_directories_from_files(self, remote):
        remote.write("a/b/c", b"1")
        remote.write("a/f", b"1")
        assert remote.list_dir("a") == [DirEntry("b", True, False), DirEntry("f", False, False)]

    def test_put_and_get_move_every_byte_and_tell_so(self, remote, local, tmp_path):
        moved = []
        remote.put_file(local, "a/b", moved.append)
        assert sum(moved) == os.path.getsize(local)
        back = str(tmp_path / "back")
        moved.clear()
        got = remote.get_file("a/b", back, moved.append)
        entry = describe_file(local, name="local", rank=0)
        assert got == (entry.size_bytes, entry.digest)
        assert Path(back).read_bytes() == Path(local).read_bytes()
        assert sum(moved) == entry.size_bytes

    def test_put_of_a_file_that_is_not_there_is_the_callers_error(self, remote, tmp_path):
        with pytest.raises(FileNotFoundError, match=str(tmp_path / "nothing")):
            remote.put_file(str(tmp_path / "nothing"), "a")
        assert remote.list_files("") == {}

    def test_get_into_a_directory_that_is_not_there_is_the_callers_error(self, remote, tmp_path):
        remote.write("a", b"1")
        with pytest.raises(FileNotFoundError, match=str(tmp_path / "nothing")):
            remote.get_file("a", str(tmp_path / "nothing/a"))

    def test_get_without_room_on_the_disk_is_the_callers_error(self, remote):
        remote.write("a", b"1")
        with pytest.raises(OSError, match="No space left"):
            remote.get_file("a", "/dev/full")

    def test_rename_moves_files_and_directories(self, remote):
        remote.write("a/b/c", b"1")
        remote.rename("a/b", "new/x")
        remote.rename("new/x/c", "d")
        assert remote.list_files("") == {"d": 1}

    def test_rename_replaces_nothing(self, remote):
        remote.write("a", b"1")
        remote.write("b", b"2")
        with pytest.raises(RemoteRefusedError, match="exist"):
            remote.rename("a", "b")
        assert remote.read("b") == b"2"

    def test_remove_takes_a_tree_a_file_and_nothing(self, remote):
        remote.write("a/b/c", b"1")
        remote.write("f", b"1")
        for name in ("a", "f", "f"):
            remote.remove_tree(name)
        assert remote.list_files("") == {}

    @only_renaming
    def test_left_over_of_a_killed_upload_is_hidden_and_goes_with_the_next(self, remote, local):
        remote.write(f"a/f{LEFT_OVER}", b"part")
        remote.write(f"a/other{LEFT_OVER}", b"part")
        assert remote.list_files("") == {}
        remote.put_file(local, "a/f")
        assert [entry.name for entry in remote.list_dir("a")] == ["f", f"other{LEFT_OVER}"]

    def test_directory_is_no_file(self, remote):
        remote.write("a/f", b"1")
        with pytest.raises(RemoteRefusedError, match="directory"):
            remote.read("a")

    def test_threads_share_it(self, remote, local, tmp_path):
        def move(number):
            remote.put_file(local, f"a/{number}")
            remote.write(f"b/{number}", str(number).encode())
            return remote.get_file(f"a/{number}", str(tmp_path / f"got{number}"))

        with ThreadPoolExecutor(4) as threads:
            assert len(set(threads.map(move, range(4)))) == 1
        assert len(remote.list_files("")) == 8

    @only_renaming
    def test_file_is_no_directory(self, remote):
        remote.write("f", b"1")
        with pytest.raises(RemoteRefusedError, match="[Nn]ot a directory"):
            remote.write("f/x", b"1")
        with pytest.raises(RemoteRefusedError, match="[Nn]ot a directory"):
            remote.list_files("f")
        with pytest.raises(RemoteRefusedError, match="directory"):
            remote.list_dir("f")


class TestSpelling:
    def test_one_tree_whatever_the_spelling(self, hdfs, hdfs_url, monkeypatch):
        monkeypatch.setenv("HADOOP_CONF_DIR", str(hdfs.conf_dir))
        server, path = hdfs.uri, hdfs_url.removeprefix(hdfs.uri)
        FsspecRemote(hdfs_url).write("f", b"1")
        user = server.replace("//", "//user:pass@")
        for spelt in (f"{hdfs_url}/", f"{server}/{path}//", f"hdfs://{path}", f"{server}/x/..{path}/.", user + path):
            assert FsspecRemote(spelt).list_files("") == {"f": 1}

    def test_the_root_of_the_file_system_is_a_place(self, hdfs_url):
        FsspecRemote(hdfs_url).write("f", b"1")
        server, name = hdfs_url.rsplit("/", 1)
        assert FsspecRemote(server).read(f"{name}/f") == FsspecRemote(f"{server}/").read(f"{name}/f") == b"1"

    @pytest.mark.parametrize("kind", [FsspecRemote, RemoteClient])
    def test_password_is_in_no_message(self, kind):
        remote = kind("hdfs://me:hunter2@127.0.0.1:1/a")
        assert remote.url == "hdfs://127.0.0.1:1/a"
        with pytest.raises(RemoteUnreachableError, match="hdfs://127.0.0.1:1/a") as caught:
            remote.list_dir("")
        assert "hunter2" not in str(caught.value)
        remote.close()


class TestRefusals:
    def test_permission_denied_is_one_line_that_says_what_to_do(self, hdfs, hdfs_url, monkeypatch):
        FsspecRemote(hdfs_url).write("f", b"1")
        monkeypatch.setenv("HADOOP_USER_NAME", "bob")
        with pytest.raises(
            RemoteRefusedError, match=r"AccessControlException: Permission denied: user=bob.*HADOOP_USER_NAME"
        ) as caught:
            FsspecRemote(hdfs_url).probe()
        assert "\n" not in str(caught.value)
        assert "\tat" not in str(caught.value)
        assert caught.value.path.startswith(hdfs_url)

    def test_worker_has_the_environment_of_its_start(self, hdfs_client, monkeypatch):
        monkeypatch.setenv("HADOOP_USER_NAME", "bob")
        with pytest.raises(RemoteRefusedError, match="user=bob"):
            hdfs_client.probe()

    @pytest.mark.parametrize("quota", [{"files": 2}, {"size_bytes": 1000}])
    def test_used_up_quota_is_refused_and_leaves_nothing(self, hdfs, hdfs_url, local, quota):
        remote = FsspecRemote(hdfs_url)
        remote.write("f", b"")
        hdfs.set_quota(hdfs_url.removeprefix(hdfs.uri), **quota)
        with pytest.raises(RemoteRefusedError, match="QuotaExceededException.*have it raised"):
            remote.put_file(local, "g")
        assert [entry.name for entry in remote.list_dir("")] == ["f"]

    def test_disk_without_permission_refuses(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(RemoteRefusedError, match="file/d.*Choose another directory"):
            FsspecRemote(f"{tmp_path}/file/d").probe()

    @pytest.mark.parametrize(
        ("error", "kind", "says"),
        [
            (RuntimeError('RPCError("org.apache.hadoop.hdfs.server.namenode.SafeModeException", "Cannot x.\\n\\tat a.b(C)")'),
             RemoteUnreachableError, "u: SafeModeException: Cannot x. Wait until"),
            (RuntimeError('RPCError("org.apache.hadoop.ipc.StandbyException", "in state standby\\n\\tat a")'),
             RemoteUnreachableError, "wait for the failover"),
            (RuntimeError('RPCError("java.io.IOException", "File /x could only be written to 0 of the 1 nodes.\\n\\tat a")'),
             RemoteUnreachableError, "Start DataNodes"),
            (RuntimeError('SASLError("no ticket")'), RemoteUnreachableError, "kinit"),
            (PermissionError(13, "Permission denied", "/x"), RemoteRefusedError, "u: Permission denied"),
            (OSError(28, "No space left on device"), RemoteRefusedError, "No space left"),
            (OSError(5, "Input/output error"), RemoteUnreachableError, "Input/output error"),
            (PermissionError("The AWS Access Key Id you provided does not exist in our records."),
             RemoteRefusedError, "Set AWS_ACCESS_KEY_ID"),
            (ModuleNotFoundError("No module named 'hdfs_native'"), RemoteRefusedError, "pip install"),
        ],
    )  # fmt: skip
    def test_errors_are_sorted_by_whether_they_pass(self, error, kind, says):
        translated = translate_failure(error, "u")
        assert type(translated) is kind
        assert says in str(translated)

    def test_missing_bucket_is_told_as_such(self):
        error = translate_failure(
            FileNotFoundError("The specified bucket does not exist"), "s3://b/f", lost=RemoteRefusedError
        )
        assert str(error) == "s3://b/f: The specified bucket does not exist. Make the bucket, or correct its name."


class TestOutages:
    def test_refused_connection_fails_within_seconds(self):
        begun = time.monotonic()
        with pytest.raises(RemoteUnreachableError, match="Connection refused"):
            FsspecRemote("hdfs://127.0.0.1:1/a").read("f")
        assert time.monotonic() - begun < 10

    def test_unknown_host_is_unreachable(self):
        with pytest.raises(RemoteUnreachableError, match="HADOOP_CONF_DIR"):
            FsspecRemote("hdfs://no-such-host.invalid/a").list_dir("")

    def test_missing_default_file_system_is_refused(self, monkeypatch):
        for name in ("HADOOP_CONF_DIR", "HADOOP_HOME"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(RemoteRefusedError, match="Set HADOOP_CONF_DIR"):
            FsspecRemote("hdfs:///a").list_dir("")

    def test_name_service_fails_over_to_the_living_namenode(self, hdfs, hdfs_url, tmp_path, monkeypatch):
        settings = {
            "dfs.nameservices": "ns",
            "dfs.ha.namenodes.ns": "a,b",
            "dfs.namenode.rpc-address.ns.a": "127.0.0.1:1",
            "dfs.namenode.rpc-address.ns.b": hdfs.uri.removeprefix("hdfs://"),
        }
        write_settings(tmp_path / "hdfs-site.xml", settings)
        write_settings(tmp_path / "core-site.xml", {"fs.defaultFS": "hdfs://ns"})
        monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
        FsspecRemote(hdfs_url).write("f", b"1")
        path = hdfs_url.removeprefix(hdfs.uri)
        assert FsspecRemote(f"hdfs://ns{path}").read("f") == FsspecRemote(f"hdfs://{path}").read("f") == b"1"

    def test_silent_namenode_ends_at_the_deadline_and_comes_back(self, hdfs, hdfs_client):
        hdfs_client.write("f", b"1")
        hdfs.pause("nn")
        begun = time.monotonic()
        with pytest.raises(RemoteUnreachableError, match="no answer to read: read was silent for 3 s"):
            hdfs_client.read("f")
        assert 3 <= time.monotonic() - begun < 10
        hdfs.resume("nn")
        assert hdfs_client.read("f") == b"1"

    def test_every_call_in_a_killed_worker_fails(self, hdfs, hdfs_client):
        hdfs_client.write("f", b"1")
        hdfs.pause("nn")
        with ThreadPoolExecutor(3) as threads:
            errors = [call.exception(20) for call in [threads.submit(hdfs_client.read, "f") for _ in range(3)]]
        assert all(type(error) is RemoteUnreachableError for error in errors)

    def test_dead_datanode_in_mid_upload_is_passed_over(self, hdfs, hdfs_client, large):
        moved = []
        kill = once(lambda: hdfs.kill("dn0"))
        put_until_it_works(hdfs_client, large, "f", lambda size: (moved.append(size), kill(size)))
        assert moved[0] < os.path.getsize(large), "it was not in the midst"
        assert hdfs_client.list_files("") == {"f": os.path.getsize(large)}
        hdfs.restart()

    def test_no_datanode_fails_the_upload_and_shows_no_file(self, hdfs, hdfs_client, local):
        hdfs_client.write("f", b"1")
        for name in ("dn0", "dn1"):
            hdfs.kill(name)
        with pytest.raises(RemoteUnreachableError, match="f"):
            hdfs_client.put_file(local, "g")
        assert hdfs_client.list_files("") == {"f": 1}
        hdfs.restart()
        put_until_it_works(hdfs_client, local, "g")
        assert hdfs_client.read("f") == b"1"

    def test_silent_datanodes_end_at_the_deadline_and_show_no_file(self, hdfs, hdfs_client, local):
        for name in ("dn0", "dn1"):
            hdfs.pause(name)
        with pytest.raises(RemoteUnreachableError, match="put_file was silent for 3 s"):
            hdfs_client.put_file(local, "g")
        assert hdfs_client.list_files("") == {}
        hdfs.restart()
        put_until_it_works(hdfs_client, local, "g")
        assert [entry.name for entry in hdfs_client.list_dir("")] == ["g"]

    def test_dead_namenode_is_unreachable_not_empty(self, hdfs, hdfs_client):
        hdfs_client.write("f", b"1")
        hdfs.kill("nn")
        for ask in (hdfs_client.list_dir, hdfs_client.list_files, hdfs_client.remove_tree):
            with pytest.raises(RemoteUnreachableError, match="Connection refused|silent"):
                ask("")
        hdfs.restart()
        assert hdfs_client.list_files("") == {"f": 1}


def once(do):
    """A progress callback that does something at the first bytes."""
    steps = iter([do])
    return lambda moved: next(steps, int)()


def put_until_it_works(remote, local, path, on_bytes=None):
    until = time.monotonic() + 60
    while True:
        try:
            return remote.put_file(local, path, on_bytes)
        except RemoteUnreachableError:
            if time.monotonic() > until:
                raise


class TestWorker:
    @pytest.fixture
    def client(self, tmp_path):
        opened = RemoteClient(f"{tmp_path}/r", deadlines=Deadlines(answer_secs=10))
        yield opened
        opened.close()

    def test_killed_worker_fails_its_calls_and_the_next_starts_another(self, client):
        client.write("f", b"1")
        kill_worker()
        assert client.read("f") == b"1"

    @pytest.mark.parametrize("kind", ["path", pytest.param("hdfs", marks=pytest.mark.hdfs)])
    def test_worker_killed_in_mid_upload_shows_the_old_file(self, kind, request, tmp_path, large):
        url = request.getfixturevalue("hdfs_url") if kind == "hdfs" else f"{tmp_path}/r"
        client = RemoteClient(url)
        client.write("f", b"old")
        with pytest.raises(RemoteUnreachableError, match="put_file: its process ended by itself"):
            client.put_file(large, "f", once(kill_worker))
        assert client.read("f") == b"old"
        assert len(client.list_dir("")) == 2
        client.write("f", b"new")
        assert client.list_dir("") == [DirEntry("f", False, False)]
        client.remove_tree("")
        client.close()

    def test_stopped_worker_is_killed_though_it_does_not_read(self, tmp_path):
        client = RemoteClient(f"{tmp_path}/r", deadlines=Deadlines(answer_secs=1))
        client.probe()
        (worker,) = find_workers()
        os.kill(worker, signal.SIGSTOP)
        with pytest.raises(RemoteUnreachableError, match="write was silent for 1 s"):
            client.write("f", b"x" * (4 << 20))
        assert not Path(f"/proc/{worker}").exists()
        client.close()

    def test_calls_that_hang_keep_no_other_one_waiting(self, tmp_path):
        os.mkfifo(tmp_path / "never")
        client = RemoteClient(f"{tmp_path}/r")
        with ThreadPoolExecutor(50) as threads:
            calls = [threads.submit(client.put_file, str(tmp_path / "never"), f"{number}") for number in range(50)]
            client.write("f", b"1")
            assert client.read("f") == b"1"
            client.close()
            for call in calls:
                with pytest.raises(RemoteUnreachableError, match="was closed"):
                    call.result(10)

    def test_close_fails_the_calls_under_way(self, tmp_path):
        os.mkfifo(tmp_path / "never")
        client = RemoteClient(f"{tmp_path}/r")
        client.probe()
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(client.put_file, str(tmp_path / "never"), "f")
            begun = time.monotonic()
            client.close()
            with pytest.raises(RemoteUnreachableError, match="was closed"):
                call.result(10)
        client.close()
        assert time.monotonic() - begun < 5
        with pytest.raises(RemoteUnreachableError, match="was closed"):
            client.read("f")

    def test_many_restarts_leak_nothing(self, client):
        client.probe()
        before = count_open(), threading.active_count()
        for _ in range(10):
            kill_worker()
            client.probe()
        wait_for(lambda: (count_open(), threading.active_count()) == before)

    def test_worker_ends_with_a_parent_that_was_killed(self, tmp_path):
        """Though a process that the parent forked holds the pipe open."""
        script = f"""if True:
            import os, time
            from recipe_ckpt.remote_client import RemoteClient
            client = RemoteClient({str(tmp_path)!r} + "/r")
            client.probe()
            worker = open(f"/proc/self/task/{{os.getpid()}}/children").read().strip()
            child = os.fork()
            if not child:
                os.close(1)
                time.sleep(60)
                os._exit(0)
            print(worker, child, flush=True)
            os.kill(os.getpid(), 9)
        """
        ended = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60)
        worker, child = map(int, ended.stdout.split())
        wait_for(lambda: not Path(f"/proc/{worker}").exists())
        os.kill(child, signal.SIGKILL)

    def test_worker_is_deaf_to_the_signals_of_the_parents_group(self, client):
        client.probe()
        (worker,) = find_workers()
        assert os.getpgid(worker) != os.getpgid(0)
        assert os.getsid(worker) != os.getsid(0)

    def test_starts_from_anywhere_with_the_package_on_a_relative_path(self, tmp_path):
        """And a module of the user's that is called like one of the library's does no harm."""
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere/base64.py").write_text("raise SystemExit('the wrong module')")
        script = (
            "import os; from recipe_ckpt.remote_client import RemoteClient as C; os.chdir('elsewhere'); C('../r').probe()"
        )
        here = os.path.relpath(Path(sys.modules["recipe_ckpt"].__file__).parents[1], tmp_path)
        environment = {**os.environ, "PYTHONPATH": here}
        subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True, timeout=60)

    def test_worker_loads_no_torch(self):
        script = "import sys, recipe_ckpt.remote_worker; print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
        assert done.stdout == "False\n"

    def test_what_a_library_prints_does_not_disturb(self, tmp_path, monkeypatch, capfd):
        noise = "import os; print('noise', flush=True); os.system('echo more noise'); raise ImportError('no clouds today')"
        (tmp_path / "fsspec.py").write_text(noise)
        monkeypatch.syspath_prepend(tmp_path)
        client = RemoteClient("s3://bucket/a")
        with pytest.raises(RemoteUnreachableError, match="s3://bucket/a: no clouds today"):
            client.list_dir("")
        client.close()
        assert capfd.readouterr().err.count("noise") == 2


class TestCheck:
    """What is refused before anything starts."""

    @pytest.mark.parametrize(
        ("url", "settled"),
        [
            ("hdfs://nn:8020//a/./b/", "hdfs://nn:8020/a/b"),
            ("HDFS://nn/ü %20?#", "hdfs://nn/ü %20?#"),
            ("file:///a//b/", "/a/b"),
            ("/a/b/", "/a/b"),
        ],
    )
    def test_url_has_one_spelling(self, url, settled):
        assert check_remote_url(KEY, url) == settled

    @pytest.mark.parametrize(
        ("url", "says"),
        [
            ("hdfs://me:hunter2@nn/a", "without user name and password"),
            ("hdfs://me:hunter2/x@nn/a", "a number as its port"),
            ("s3://me@bucket/a", "without user name and password"),
            ("file://a/b", "file:///<absolute path>"),
            ("ftp://host/a", "a URL of"),
            ("memory://a", "a URL of"),
            ("s3:///a", "the name of a bucket"),
        ],
    )
    def test_url_that_cannot_work_is_refused(self, url, says):
        with pytest.raises(ConfigError, match=f"{KEY}: .*{says}") as caught:
            check_remote_url(KEY, url)
        assert "hunter2" not in str(caught.value)

    def test_default_file_system_needs_hadoops_configuration(self, monkeypatch):
        monkeypatch.setenv("HADOOP_CONF_DIR", "/etc/hadoop")
        assert check_remote_url(KEY, "hdfs:///a") == "hdfs:///a"
        monkeypatch.delenv("HADOOP_CONF_DIR")
        monkeypatch.delenv("HADOOP_HOME", raising=False)
        with pytest.raises(ConfigError, match="set HADOOP_CONF_DIR"):
            check_remote_url(KEY, "hdfs:///a")

    @pytest.mark.parametrize(
        ("url", "package"), [("hdfs://nn/a", '"recipe-ckpt[hdfs]"'), ("s3://b/a", '"recipe-ckpt[s3]"'), ("gs://b/a", "gcsfs")]
    )
    def test_missing_package_is_named(self, monkeypatch, url, package):
        monkeypatch.setattr(sys, "path", [])
        for module in ("hdfs_native", "s3fs"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        importlib.invalidate_caches()
        with pytest.raises(ConfigError, match=re.escape(f"pip install {package}.")):
            check_remote_url(KEY, url)


def find_workers():
    """The processes that this one has started and not reaped."""
    return [
        int(pid)
        for tasks in Path("/proc/self/task").glob("*/children")
        for pid in tasks.read_text().split()
        if is_worker(pid)
    ]


def is_worker(pid):
    with suppress(FileNotFoundError, ProcessLookupError):
        return b"recipe_ckpt.remote_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def kill_worker():
    """Kill it, and wait until its client has noticed."""
    (worker,) = find_workers()
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{worker}").exists())


def count_open():
    return len(os.listdir("/proc/self/fd"))


def wait_for(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)
