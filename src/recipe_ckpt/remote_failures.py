"""What a library's error means for whoever asked: refused for good, out of reach for now, or not there."""

from __future__ import annotations

import errno
import os
import re

from recipe_ckpt.errors import RemoteError, RemoteRefusedError, RemoteUnreachableError


def translate_failure(error: Exception, where: str, *, lost: type[RemoteError] | None = None) -> Exception:
    """Return what a library's error means for the caller.

    `lost` is what it means that something was not found during an upload; None: that it is not there.
    """
    text = _first_line(error)
    if isinstance(error, FileNotFoundError) and not text.startswith("Path is not a file"):
        if lost is None:
            return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where)
        return lost(f"{where}: {text}. {_BUCKET if lost is RemoteRefusedError else _WENT_AWAY}", path=where)
    for sign, remedy in _REFUSALS.items():
        if sign in text or sign in type(error).__name__:
            return RemoteRefusedError(f"{where}: {text}. {remedy}", path=where)
    if isinstance(error, OSError) and error.errno in _REFUSING_ERRNOS:
        return RemoteRefusedError(f"{where}: {text}. {_RIGHTS}", path=where)
    remedy = next((found for sign, found in _WAITS.items() if sign in text), _NETWORK)
    return RemoteUnreachableError(f"{where}: {text}. {remedy}", path=where)


_RIGHTS = "Let this user write there, with room to spare, or choose another directory."
_HADOOP_RIGHTS = "Let this user write there (hdfs dfs -chown, -chmod), or set HADOOP_USER_NAME to one who may."
_QUOTA = "Free some of the quota, or have it raised."
_NAME = "Choose another directory."
_CONF = "Set HADOOP_CONF_DIR to the directory with core-site.xml and hdfs-site.xml, or name the NameNode in the URL."
_ACCESS = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE."
_BUCKET = "Make the bucket, or correct its name."
_WENT_AWAY = "It, or what it lies in, went away during the upload: see that nobody else writes there."
_NETWORK = "Check that its host and port are right and that it is up; later tries may succeed."
_REFUSALS = {
    "AccessControlException": _HADOOP_RIGHTS,
    "AuthorizationException": _HADOOP_RIGHTS,
    "QuotaExceededException": _QUOTA,
    "QuotaByStorageTypeExceededException": _QUOTA,
    "InvalidPathException": _NAME,
    "PathComponentTooLongException": _NAME,
    "MaxDirectoryItemsExceededException": _NAME,
    "NotDirectoryException": _NAME,
    "Path is not a file": "A directory has this name: choose another one.",
    "FileExistsError": "Remove it first: renames replace nothing.",
    "NotADirectoryError": _NAME,
    "IsADirectoryError": _NAME,
    "Access Key Id": _ACCESS,
    "ParamValidationError": _BUCKET,
    "PermissionError": _RIGHTS,
    "No fs.defaultFS setting found": _CONF,
    "ModuleNotFoundError": 'Run: pip install "recipe-ckpt[hdfs]" for HDFS, "recipe-ckpt[s3]" for S3, or the fsspec backend.',
}
_WAITS = {
    "locate credentials": _ACCESS,
    "lookup address": f"Check the host's name. {_CONF}",
    "SafeModeException": "Wait until the NameNode leaves its safe mode.",
    "StandbyException": "No NameNode is active: wait for the failover.",
    "could only be": "Start DataNodes, or free disk space on them.",
    "DataNode": "Check that the DataNodes are up and that this machine reaches them.",
    "SASL": "Check the Kerberos ticket (klist), or get a new one (kinit).",
    "GSSAPI": "Check the Kerberos ticket (klist), or get a new one (kinit).",
}
_REFUSING_ERRNOS = {errno.EROFS, errno.EDQUOT, errno.ENOSPC, errno.ENAMETOOLONG, errno.ENOTEMPTY, errno.ELOOP, errno.EXDEV}
_RPC_ERROR = re.compile(r'\w+\("(?:[\w.]+[.$])?(\w+)", "(.*)', re.DOTALL)
_DETAIL = re.compile(r'(\w+)\("(.*)"\)', re.DOTALL)


def _first_line(error: Exception) -> str:
    """Return a Java error's name and first line, without its stack, or what another error says."""
    text = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    if rpc := _RPC_ERROR.match(text):
        text = f"{rpc[1]}: {rpc[2]}"
    elif detail := _DETAIL.match(text):
        text = f"{detail[1]}: {detail[2]}"
    line = re.split(r"\\n|\n", text)[0].removesuffix('")').replace('\\"', '"').strip().rstrip(".:")
    return line or type(error).__name__
