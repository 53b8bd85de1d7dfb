"""What a run draws and logs."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.toy import train_toy


def test_the_phases_of_a_save_are_curves(tmp_path):
    train_toy(
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
        "trainer.logger=[tensorboard]",
        f"checkpoint.default_local_dir={tmp_path}/ck",
    )
    curves = EventAccumulator(str(tmp_path / "ck/tensorboard"))
    curves.Reload()
    for name in ("stall_secs", "wait_secs", "stage_secs", "write_secs", "commit_secs", "size_mb"):
        assert [point.step for point in curves.Scalars(f"save/{name}")] == [2, 4]
