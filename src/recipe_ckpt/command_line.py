"""A `hydra.main` function as its users meet it: one line for what they can mend, and a help text with comments."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from recipe_ckpt import help_text
from recipe_ckpt.messages import MENDABLE, explain

_FULL_ERROR = "HYDRA_FULL_ERROR"
_WISH = os.environ.get(_FULL_ERROR)


def run_main(main: Callable[[], Any]) -> None:
    """Run a `hydra.main` function. A configuration that can't be composed ends the process with one line on stderr.

    All of Hydra's flags work as they do without this. With HYDRA_FULL_ERROR=1 the traceback is shown, as Hydra does.
    """
    help_text.register_resolvers()
    if _WISH is not None:
        main()
        return
    os.environ[_FULL_ERROR] = "1"  # Hydra raises then what it would print
    try:
        main()
    except (*MENDABLE, ValueError) as error:
        if _was_raised_by_a_job(error):
            raise
        sys.exit(explain(error, sys.argv[1:]))
    finally:
        leave_errors_to_hydra()


def leave_errors_to_hydra() -> None:
    """From here on Hydra reports errors as the user's environment says: called when a job starts."""
    if _WISH is None:
        os.environ.pop(_FULL_ERROR, None)


def _was_raised_by_a_job(error: BaseException) -> bool:
    """Say whether the error comes from a task function, also one that a launcher ran in another process."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_name in ("run_job", "return_value") for frame, _ in frames)
