"""An S3-compatible server on loopback, for tests: moto's, in a process of its own. What it holds is gone when it stops."""

import importlib.util
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from contextlib import suppress

from tests.hdfs_cluster import find_free_ports

MODULES = ("s3fs", "moto", "flask", "flask_cors")
ACCESS = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": "/dev/null",  # what the user has set up is not for a server of the tests
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}


class S3Error(Exception):
    """The server does not start; the message says why."""


def list_missing_modules():
    return [name for name in MODULES if importlib.util.find_spec(name) is None]


class S3Server:
    """Its URL is `endpoint`; clients find it by `environment`."""

    def __init__(self, folder):
        self._log = folder / "s3.log"
        self._ports = find_free_ports(1)
        self.endpoint = f"http://127.0.0.1:{self._ports[0]}"
        self.environment = {**ACCESS, "AWS_ENDPOINT_URL": self.endpoint}

    def start(self):
        """Return when it answers; it dies with this thread, whatever ends that.

        Raises:
            S3Error: it ended, or 60 s passed; with the end of its log.
        """
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "moto.server", "-p", str(self._ports[0])]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        until = time.monotonic() + 60
        while not self._is_serving():
            if self._process.poll() is not None or time.monotonic() > until:
                raise S3Error(f"the S3 server did not start: {self._log.read_text()[-2000:]}")
            time.sleep(0.05)

    def stop(self):
        self._process.kill()
        self._process.wait()

    def pause(self):
        self._process.send_signal(signal.SIGSTOP)

    def forget_users(self):
        """Refuse every key from now on."""
        self._check_keys_after("0")

    def undo(self):
        """Undo every `pause` and `forget_users`."""
        self._process.send_signal(signal.SIGCONT)
        self._check_keys_after("inf")

    def make_place(self):
        """Return a URL in a new bucket."""
        bucket = f"bucket-{uuid.uuid4().hex}"
        self._ask(f"/{bucket}", "PUT")
        return f"s3://{bucket}/team/run"

    def _check_keys_after(self, requests):
        self._ask("/moto-api/reset-auth", "POST", requests.encode())

    def _ask(self, path, method="GET", data=None):
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(self.endpoint + path, data, {"Content-Type": "text/plain"}, method=method)
        with direct.open(request, timeout=5) as answer:
            return answer.read()

    def _is_serving(self):
        with suppress(OSError):
            self._ask("/moto-api/data.json")
            return True
        return False
