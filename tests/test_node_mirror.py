"""A mirror of roots that are local to their nodes: each sends its part, all of them are one step, each gets its own back."""

import logging
import os
import re
import shutil
import threading

import pytest

from recipe_ckpt import layout
from recipe_ckpt.errors import (
    ConfigError,
    NothingToResumeError,
    RankError,
    RemoteError,
    RemoteRefusedError,
    UploadFailedError,
)
from recipe_ckpt.policies import LoadPolicy, MirrorPolicy, SavePolicy
from recipe_ckpt.storage import LocalStorage
from tests.remotes import CHANGES, WatchedRemote, assert_whole
from tests.test_mirror import read_tree, wait_until
from tests.test_save import VerlEngine
from tests.tiny import Run, TinyEngine, cut_in_half, flip_a_bit, list_steps, run_in_child, run_world

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Nodes:
    """Ranks whose roots lie on the disks of `disks`, with one mirror. `remotes` has each disk's connection to it."""

    def __init__(self, place, disks=(0, 1), engine=TinyEngine):
        self.place, self.disks, self.engine = place, disks, engine
        self.mirror = place / "mirror"
        self.remotes = {disk: WatchedRemote(str(self.mirror)) for disk in range(max(disks) + 1)}

    def launch(self, *steps, act=None, disks=None, **options):
        """Run the ranks; return what each one started from, or the error that ended it."""
        disks = disks or self.disks
        policy = MirrorPolicy(**{"exit_wait_secs": 20.0, **options.pop("policy", {})})

        def work(coordinator):
            disk = disks[coordinator.rank]
            engine = self.engine(rank=coordinator.rank, dp_size=len(disks))
            own = {"coordinator": coordinator, "engine": engine, "default_hdfs_dir": str(self.mirror)}
            own["open_remote"] = lambda url: self.remotes[disk] if url == str(self.mirror) else WatchedRemote(url)
            with Run(self.root(disk), **{**own, "mirror_policy": policy, **options}) as run:
                if run.handler.resume_point is not None:
                    assert int(run.engine.value) == run.start == run.loader.batch_sampler.consumed
                run.save(*steps)
                if act is not None:
                    act(run, coordinator.rank)
                return run.start

        return run_world(len(disks), work)

    def root(self, disk):
        return self.place / f"disk{disk}"

    def step(self, disk, step):
        return self.root(disk) / f"global_step_{step}"

    def there(self, step):
        return self.mirror / f"global_step_{step}"

    def wipe(self, *disks):
        for disk in disks:
            shutil.rmtree(self.root(disk))

    def downloads(self, disk):
        return sorted(os.path.basename(path) for name, path in self.remotes[disk].operations if name == "get_file")


@pytest.fixture
def nodes(place):
    return Nodes(place)


# --- sending


@pytest.mark.parametrize("disks", [(0, 1), (0, 1, 2), (0, 0, 1, 1), (0, 1, 0, 1)])
@pytest.mark.parametrize("engine", [TinyEngine, VerlEngine])
def test_the_parts_of_all_nodes_are_one_whole_step_there(place, disks, engine):
    nodes = Nodes(place, disks, engine)
    assert nodes.launch(5, 10, disks=disks) == [0] * len(disks)
    assert list_steps(nodes.mirror) == [5, 10]
    assert_whole(nodes.mirror)
    assert (nodes.mirror / layout.TRACKER).read_text() == "10"
    together = {path: data for disk in set(disks) for path, data in read_tree(nodes.step(disk, 10)).items()}
    assert read_tree(nodes.there(10)) == together


def test_each_file_is_sent_once_and_by_the_node_that_wrote_it(nodes):
    nodes.launch(5, 10)
    nodes.launch()
    sent = [sorted(nodes.remotes[disk].sent) for disk in (0, 1)]
    assert len(set(sent[0] + sent[1])) == len(sent[0] + sent[1])
    assert [name[15:] for name in sent[1] if "10/" in name] == ["data_1.pt", "model-1.json", "rng_1.pt"]
    assert "global_step_10/trainer_state.json" in sent[0]


def test_no_step_is_named_before_every_part_is_there(nodes):
    """The other node sends nothing until it is seen that rank 0 has sent all of its own, and has looked for the rest."""
    is_free = threading.Event()

    def hold(number, name):
        if name == "put_file":
            assert is_free.wait(20)

    nodes.remotes[1].before = hold

    def act(run, rank):
        if rank:
            return
        wait_until(lambda: nodes.remotes[0].operations.count(("list_files", "global_step_5")) > 3)
        assert run.handler.pending_uploads == [5]
        assert not (nodes.mirror / layout.TRACKER).exists()
        assert not (nodes.there(5) / layout.MANIFEST).exists()
        is_free.set()
        wait_until(lambda: not run.handler.pending_uploads)

    assert nodes.launch(5, act=act) == [0, 0]
    assert_whole(nodes.mirror)
    assert list_steps(nodes.mirror) == [5]


def test_a_step_that_waits_for_the_other_node_does_not_keep_others_back(nodes):
    nodes.launch(5, 10, default_hdfs_dir=None)
    is_free = threading.Event()

    def hold(number, name):
        if name == "put_file":
            assert is_free.wait(20)

    nodes.remotes[1].before = hold

    def act(run, rank):
        if rank == 0:
            wait_until(lambda: "global_step_5/model-0.json" in nodes.remotes[0].sent)
            assert run.handler.pending_uploads == [10, 5]
            is_free.set()

    nodes.launch(act=act)
    assert list_steps(nodes.mirror) == [5, 10]
    assert_whole(nodes.mirror)


@pytest.mark.parametrize("disk", [0, 1])
def test_a_file_of_the_other_node_that_vanishes_there_meanwhile_stops_nothing(nodes, disk):
    seen = []

    def vanish(number, name):
        if name in ("list_files", "put_file"):
            seen.append(name)
            if len(seen) in (1, 4):
                raise FileNotFoundError(2, "No such file or directory", "a temporary one")

    nodes.remotes[disk].before = vanish
    assert nodes.launch(5, 10) == [0, 0]
    assert list_steps(nodes.mirror) == [5, 10]
    assert_whole(nodes.mirror)
    assert len(seen) > 4


@pytest.mark.parametrize("disk", [0, 1])
def test_what_was_not_sent_is_sent_at_the_next_start(nodes, disk):
    nodes.launch(5)
    nodes.remotes[disk].is_down = True
    nodes.launch(10, policy={"exit_wait_secs": 0.1})
    assert (nodes.mirror / layout.TRACKER).read_text() == "5"
    nodes.remotes[disk].is_down = False
    assert nodes.launch() == [10, 10]
    assert (nodes.mirror / layout.TRACKER).read_text() == "10"
    assert_whole(nodes.mirror)


def test_at_the_end_it_is_said_whose_files_are_missing(nodes, caplog):
    nodes.launch(5)
    nodes.remotes[1].is_down = True

    def act(run, rank):
        if rank == 0:
            wait_until(lambda: nodes.remotes[0].operations.count(("list_files", "global_step_10")) > 3)

    nodes.launch(10, act=act, policy={"exit_wait_secs": 0.1})
    assert "the steps [10] are NOT there (step 10: the files of rank 1 are not there yet)" in caplog.text


def test_upload_failure_of_one_node_ends_the_run_on_all_if_asked_for(nodes):
    nodes.launch(5)

    def refuse(number, name):
        if name == "put_file":
            raise RemoteRefusedError("no permission")

    nodes.remotes[1].before = refuse

    def act(run, rank):
        if rank == 1:
            wait_until(lambda: nodes.remotes[1].operations[-1][0] == "put_file")
        run.save(15)
        run.save(20)

    outcomes = nodes.launch(10, act=act, policy={"on_failure": "raise"})
    assert [type(error) for error in outcomes] == [RankError, UploadFailedError]
    assert "no permission" in str(outcomes[0])


def test_retention_holds_on_the_mirror_and_leaves_no_parts(nodes):
    nodes.launch(5, 10, 15, 20, max_ckpt_to_keep=2, policy={"max_to_keep": 1, "max_pending": 9})
    assert {path.parent.name for path in nodes.mirror.glob("global_step_*/*")} == {"global_step_20"}
    assert [list_steps(nodes.root(disk))[-2:] for disk in (0, 1)] == [[15, 20], [15, 20]]
    assert_whole(nodes.mirror)
    nodes.launch(25, policy={"max_to_keep": 1})
    assert list_steps(nodes.mirror) == [25]


def test_a_step_that_one_node_lacks_is_not_sent(nodes):
    """Nobody could resume from it, and no upload is waited for that can't end."""
    nodes.launch(5, 10, default_hdfs_dir=None)
    shutil.rmtree(nodes.step(1, 5))
    assert nodes.launch(15) == [10, 10]
    assert list_steps(nodes.mirror) == [10, 15]
    assert_whole(nodes.mirror)


# --- resuming


@pytest.mark.parametrize("wiped", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize(("disks", "engine"), [((0, 1), TinyEngine), ((0, 0, 1, 1), VerlEngine)])
def test_a_node_that_lost_its_disk_gets_its_part_back(place, wiped, disks, engine, caplog):
    nodes = Nodes(place, disks, engine)
    nodes.launch(5, 10)
    before = {disk: read_tree(nodes.step(disk, 10)) for disk in (0, 1)}
    nodes.wipe(*wiped)
    caplog.set_level(logging.INFO)
    assert nodes.launch(15) == [10] * len(disks)
    for disk in wiped:
        assert read_tree(nodes.step(disk, 10)) == before[disk]
        assert re.search(rf"disk{disk}/global_step_10 on .*: .* It is downloaded from {nodes.there(10)}", caplog.text)
    assert caplog.text.count("downloaded ") == 1 + len(wiped), "and how much, once for all nodes"
    assert [bool(nodes.downloads(disk)) for disk in (0, 1)] == [disk in wiped for disk in (0, 1)]
    assert list_steps(nodes.mirror) == [5, 10, 15]
    assert nodes.launch() == [15] * len(disks)


def test_a_node_with_an_older_disk_gets_the_newest(nodes, place):
    nodes.launch(5, 10)
    shutil.copytree(nodes.root(1), place / "old")
    nodes.launch(15, 20)
    shutil.rmtree(nodes.root(1))
    (place / "old").rename(nodes.root(1))
    assert nodes.launch(25) == [20, 20]
    assert list_steps(nodes.mirror) == [5, 10, 15, 20, 25]
    assert_whole(nodes.mirror)


def test_nodes_that_changed_places_get_what_they_lack(nodes):
    nodes.launch(5, 10)
    assert nodes.launch(15, disks=(1, 0)) == [10, 10]
    assert nodes.launch(disks=(1, 0)) == [15, 15]
    assert_whole(nodes.mirror)


@pytest.mark.parametrize("disks", [(0, 0), (1, 1), (0, 0, 1, 1), (0, 1, 2), (0,), (2, 3)])
def test_other_nodes_and_other_numbers_of_ranks_resume_it(place, disks):
    class Resharding(TinyEngine):
        def restore(self, directory, entries, contents):
            reader = TinyEngine(rank=self.rank if f"model-{self.rank}.json" in entries else 1)
            reader.restore(directory, entries, contents)
            self.value = reader.value

    nodes = Nodes(place, engine=Resharding)
    assert nodes.launch(5, 10) == [0, 0]
    nodes.remotes = {disk: WatchedRemote(str(nodes.mirror)) for disk in range(4)}
    assert nodes.launch(15, disks=disks) == [10] * len(disks)
    assert nodes.launch(disks=disks) == [15] * len(disks)
    assert_whole(nodes.mirror)


def test_what_one_shared_root_mirrored_is_resumed_on_roots_of_their_own(nodes):
    nodes.launch(5, disks=(0, 0))
    nodes.wipe(0)
    assert nodes.launch(10) == [5, 5]
    assert nodes.launch() == [10, 10]
    assert_whole(nodes.mirror)


@pytest.mark.case("C1005")
@pytest.mark.parametrize("disk", [0, 1])
@pytest.mark.parametrize("hurt", [cut_in_half, flip_a_bit, os.unlink])
def test_damage_on_one_node_is_mended_from_the_mirror_there_alone(nodes, disk, hurt, caplog):
    nodes.launch(5, 10)
    hurt(nodes.step(disk, 10) / f"model-{disk}.json")
    assert nodes.launch() == [10, 10]
    assert f"model-{disk}.json" in nodes.downloads(disk)
    assert nodes.downloads(1 - disk) == []
    assert nodes.launch() == [10, 10]


def test_damage_here_and_there_makes_all_resume_the_older_step(nodes):
    nodes.launch(5, 10)
    flip_a_bit(nodes.step(1, 10) / "model-1.json")
    flip_a_bit(nodes.there(10) / "model-1.json")
    assert nodes.launch() == [5, 5]


def test_a_url_of_another_run_is_had_by_every_node_and_not_kept(nodes, place):
    nodes.launch(5, 10)
    other = Nodes(place / "other")
    other.place.mkdir()
    named = f"file://{nodes.there(5)}"
    assert other.launch(15, resume_mode="resume_path", resume_from_path=named) == [5, 5]
    assert [list_steps(other.root(disk)) for disk in (0, 1)] == [[15], [15]]
    assert not list(other.place.glob("disk*/.pulled/*"))
    assert other.launch() == [15, 15]


def test_a_step_without_what_is_to_be_loaded_is_not_downloaded(nodes):
    contents = ("model", "extra")
    assert nodes.launch(5, save_policy=SavePolicy(contents=contents), load_policy=LoadPolicy(contents=contents)) == [0, 0]
    nodes.wipe(1)
    outcomes = nodes.launch()
    assert [type(error) for error in outcomes] == [NothingToResumeError, RankError]
    assert all("lacks ['optimizer'] of checkpoint.load_contents" in str(error) for error in outcomes)
    assert nodes.downloads(1) == []


def test_disks_without_room_are_named(nodes):
    nodes.launch(5)
    nodes.wipe(1)

    class Full(LocalStorage):
        def make_dirs(self, path):
            if "disk1/.staging/" in path:
                raise OSError(28, "No space left on device", path)
            super().make_dirs(path)

    outcomes = nodes.launch(storage=Full())
    assert [type(error) for error in outcomes] == [RankError, ConfigError]
    assert all("disk1 (No space left on device)" in str(error) for error in outcomes)


# --- starting over, and a mirror that is away


def test_fresh_start_moves_the_mirror_aside_too(nodes):
    nodes.launch(5, 10)
    assert nodes.launch(3, resume_mode="disable") == [0, 0]
    assert list_steps(nodes.mirror) == [3]
    assert len(list(nodes.mirror.glob("archive/*/global_step_*"))) == 2
    assert_whole(nodes.mirror)


@pytest.mark.parametrize("disk", [0, 1])
def test_fresh_start_needs_the_mirror_on_every_node(nodes, disk):
    nodes.remotes[disk].is_down = True
    outcomes = nodes.launch(5)
    assert isinstance(outcomes[disk], RemoteError)
    assert all("can't be used" in str(error) and "nobody answers" in str(error) for error in outcomes)


@pytest.mark.parametrize("disk", [0, 1])
def test_a_resume_goes_on_without_the_mirror(nodes, disk, caplog):
    nodes.launch(5)
    nodes.remotes[disk].is_down = True
    assert nodes.launch(10, policy={"exit_wait_secs": 0.1}) == [5, 5]
    assert "uploads are tried again later" in caplog.text
    outcomes = nodes.launch(policy={"on_failure": "raise", "exit_wait_secs": 0.1})
    assert isinstance(outcomes[disk], RemoteError)


def test_empty_disk_and_no_mirror_is_still_an_error(nodes):
    nodes.launch(5)
    nodes.wipe(1)
    outcomes = nodes.launch(default_hdfs_dir=None)
    assert [type(error) for error in outcomes] == [NothingToResumeError, RankError]


# --- killed, and saved anew


class Dying:
    """Ends the process before the n-th change of the mirror."""

    def __init__(self, left):
        self.left = left

    def __call__(self, number, name):
        self.left -= name in CHANGES
        if self.left < 0:
            os._exit(9)


def save(value):
    """Save a step, of which the state has a fraction, so that it can be told from the one before."""

    def act(run, rank):
        run.engine.value, run.loader.batch_sampler.consumed = value, int(value)
        run.handler.save_checkpoint(int(value))

    return act


@pytest.mark.parametrize("disk", [0, 1])
@pytest.mark.parametrize("value", [10.5, 20.5])
def test_killed_at_each_change_the_mirror_names_only_what_is_whole(place, disk, value):
    """In a later save, or in one that replaces the newest; afterwards the disks are lost."""
    Nodes(place / "before").launch(5, 10)
    found = set()
    for point in range(200):
        copy = Nodes(shutil.copytree(place / "before", place / "run"))
        copy.remotes[disk].before = Dying(point)
        code = run_in_child(lambda copy=copy: copy.launch(act=save(value)))
        assert_whole(copy.mirror)
        copy.wipe(0, 1)
        outcomes = Nodes(copy.place).launch(act=lambda run, rank: found.add((rank, run.engine.value)))
        assert outcomes[0] == outcomes[1]
        assert outcomes[0] in (5, 10, 20)
        shutil.rmtree(copy.place)
        if code == 0:
            break
    assert code == 0
    assert {value for _, value in found} <= {5.0, 10.0, value}
    assert (0, value) in found


@pytest.mark.parametrize("disk", [0, 1])
@pytest.mark.parametrize("value", [10.5, 20.5])
def test_killed_at_each_change_the_next_start_sends_the_rest(place, disk, value):
    Nodes(place / "before").launch(5, 10)
    for point in range(0, 200, 2):
        copy = Nodes(shutil.copytree(place / "before", place / "run"))
        copy.remotes[disk].before = Dying(point)
        code = run_in_child(lambda copy=copy: copy.launch(act=save(value)))
        starts = Nodes(copy.place).launch()
        assert starts == [int(value)] * 2
        assert_whole(copy.mirror)
        assert (copy.mirror / layout.TRACKER).read_text() == str(int(value))
        copy.wipe(0, 1)
        values = []
        Nodes(copy.place).launch(act=lambda run, rank, values=values: values.append(run.engine.value))
        assert values == [value, value]
        shutil.rmtree(copy.place)
        if code == 0:
            return
    raise AssertionError("it never ran to its end")


class LateRemote(WatchedRemote):
    """Has read the first file that it sends, and is held before it writes it."""

    def __init__(self, inner, hold):
        super().__init__(inner)
        self.hold, self.has_begun = hold, threading.Event()

    def put_file(self, local_path, path, on_bytes=None):
        with open(local_path, "rb") as file:
            data = file.read()
        if not self.has_begun.is_set() and path.endswith("model-1.json"):
            self.has_begun.set()
            self.hold()
        self.inner.write(path, data)


def test_a_late_file_of_a_step_that_is_saved_anew_never_counts(nodes):
    """It comes when rank 0 has made room for the new one already; it has the size of the new one."""
    table = nodes.there(5) / layout.FILE_TABLE

    def hold():
        former = table.read_bytes()
        wait_until(lambda: table.exists() and table.read_bytes() != former)

    def act(run, rank):
        if rank == 1:
            assert nodes.remotes[1].has_begun.wait(20)
        save(5.5)(run, rank)

    nodes.remotes[1] = LateRemote(str(nodes.mirror), hold)
    nodes.launch(5, act=act)
    assert_whole(nodes.mirror)
    nodes.wipe(0, 1)
    nodes.remotes[1] = WatchedRemote(str(nodes.mirror))
    values = []
    nodes.launch(act=lambda run, rank: values.append(run.engine.value))
    assert values == [5.5, 5.5]
