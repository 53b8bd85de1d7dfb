"""What the README shows works as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[1]


def test_the_library_example_trains_and_resumes(tmp_path):
    text = (REPO / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    command = [sys.executable, "-c", example + "\nprint('step', step)"]
    for _ in range(2):
        ended = subprocess.run(command, cwd=tmp_path, timeout=120, capture_output=True, text=True, check=False)
        assert ended.stdout.strip().endswith("step 48"), ended.stderr
    assert sorted(path.name for path in (tmp_path / "runs/a").glob("global_step_*")) == ["global_step_30", "global_step_40"]
