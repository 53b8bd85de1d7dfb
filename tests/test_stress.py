"""The short form of `python -m tests.stress`: launches killed at random instants lose no more than a save interval."""

import pytest

from tests.stress import kill_runs


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.case("C1301", "C1302")
@pytest.mark.parametrize("mode", ["false", "true"])
def test_runs_killed_at_random_instants_end_as_their_twin(tmp_path, mode):
    tally = kill_runs(8, tmp_path, seed=7, overrides=[f"checkpoint.async_save={mode}"])
    assert tally.faults == []
    assert tally.kills == 8
