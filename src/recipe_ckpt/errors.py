"""Everything this package raises on purpose.

CheckpointError
├── ConfigError (ValueError)                    a key's value can't work; raised before anything is built
├── CheckpointNotFoundError (FileNotFoundError) what was asked for does not exist
├── DamagedCheckpointError (ValueError)         files are missing, cut short or changed
├── NothingToResumeError (RuntimeError)         checkpoints exist and none of them is whole
├── StateMismatchError (ValueError)             tensors of the checkpoint and of the run do not fit
├── DataMismatchError (ValueError)              the data position does not fit this data set or loader
├── LineageError (ValueError)                   a checkpoint of another run, or a renamed one
├── LeaseHeldError (RuntimeError)               another process writes into this root
├── RootNotSharedError (RuntimeError)           what a rank needs lies on another node's disk
├── SaveFailedError (RuntimeError)              a save did not become a checkpoint
├── UploadFailedError (RuntimeError)            the mirror fell behind, and `on_upload_failure` is `raise`
├── RemoteError (OSError)                       the mirror's server
│   ├── RemoteUnreachableError (ConnectionError)  gives no answer now; later it may
│   └── RemoteRefusedError (PermissionError)    refuses, and will again
└── RankError (RuntimeError)                    another rank failed
    └── RankTimeoutError (TimeoutError)         another rank did not answer in time
"""

from __future__ import annotations

from collections.abc import Mapping


class CheckpointError(Exception):
    """Base of every deliberate error; `step` and `path` say what it is about, where that is known.

    After an error that `is_final` this process can't save any more, whatever `on_save_failure` says.
    """

    is_final = False

    def __init__(self, message: str, *, step: int | None = None, path: str | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.path = path


class ConfigError(CheckpointError, ValueError):
    """A configuration value can't work. `key` is the key as typed on the command line."""

    def __init__(self, key: str, found: object, allowed: str, remedy: str) -> None:
        super().__init__(f"{key}: found {found!r}; allowed: {allowed}. {remedy}")
        self.key = key
        self._parts = (found, allowed, remedy)

    def renamed(self, names: Mapping[str, str]) -> ConfigError:
        """Return the same error with other names for its key and for those in its remedy."""
        found, allowed, remedy = self._parts
        for name, other in names.items():
            remedy = remedy.replace(name, other)
        return ConfigError(names.get(self.key, self.key), found, allowed, remedy)


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The checkpoint that was asked for does not exist."""


class DamagedCheckpointError(CheckpointError, ValueError):
    """A checkpoint's files are missing, cut short or changed since they were written."""


class NothingToResumeError(CheckpointError, RuntimeError):
    """Checkpoints were found, but none of them can be used; the message lists each with its reason."""


class StateMismatchError(CheckpointError, ValueError):
    """Tensors of the checkpoint and of the run differ in names, shapes or dtypes."""


class DataMismatchError(CheckpointError, ValueError):
    """The stored data position does not fit this run's data set or loader."""


class LineageError(CheckpointError, ValueError):
    """A checkpoint belongs to another run, or its directory was renamed."""


class LeaseHeldError(CheckpointError, RuntimeError):
    """Another live process writes into this root."""

    is_final = True


class RootNotSharedError(CheckpointError, RuntimeError):
    """A rank does not see the root that it should share, or runs on another node than its files."""


class SaveFailedError(CheckpointError, RuntimeError):
    """A save did not become a checkpoint; what was there before is untouched."""


class UploadFailedError(CheckpointError, RuntimeError):
    """Checkpoints could not be uploaded, and `on_upload_failure` is `raise`; on the local disk they are whole."""

    is_final = True


class RemoteError(CheckpointError, OSError):
    """The server of the mirror did not do what it was asked."""


class RemoteUnreachableError(RemoteError, ConnectionError):
    """The server gives no answer, or can't serve now; it may later."""


class RemoteRefusedError(RemoteError, PermissionError):
    """The server refuses (permission, quota, not a directory), and would again."""


class RankError(CheckpointError, RuntimeError):
    """Another rank failed; the message names it and its cause. It is as final as that cause."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class RankTimeoutError(RankError, TimeoutError):
    """Another rank did not answer within `rank_timeout_secs`; the message names it."""


def to_clause(error: BaseException) -> str:
    """Return an error's message without its full stop, for the middle of another one."""
    return str(error).rstrip(".")


def can_be_mended(error: CheckpointError) -> bool:
    """Say whether its message is all that a user needs to go on.

    Where the cause is another rank's, or a fault in a model's or engine's code, the traceback tells more.
    """
    is_own_fault = isinstance(error, SaveFailedError) and not isinstance(error.__cause__, CheckpointError | OSError)
    return not (isinstance(error, RankError) or isinstance(error.__cause__, RankError) or is_own_fault)


def rebuild_error(kind: str, message: str) -> CheckpointError:
    """Return an error of this module's class `kind` that another process has raised."""
    found = globals().get(kind)
    chosen = found if isinstance(found, type) and issubclass(found, CheckpointError) else CheckpointError
    error = chosen.__new__(chosen, message)
    CheckpointError.__init__(error, message)
    return error
