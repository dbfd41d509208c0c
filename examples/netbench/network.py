"""Hosts on one machine: network namespaces, joined by a bridge through links of a given rate.

    host 0 (namespace)            switch (namespace)            host 1 (namespace)
    eth0 10.77.0.1 ==== veth ==== port0 -- bridge -- port1 ==== veth ==== eth0 10.77.0.2

The bridge has a namespace of its own, so that neither the machine's firewall nor its settings
reach it, and removing the namespaces removes everything. `tc tbf` shapes what leaves an interface:
on eth0 what the host sends, on the port what it receives, so every link is full duplex.

Needs root and iproute2. Nothing outside the new namespaces is changed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

MAX_HOSTS = 8
INTERFACE = "eth0"
SWITCH = "switch"
PREFIX = "adacomp-netbench"
LATENCY_MS = 50  # the longest queue before a link, in time at its rate
BURST_SECONDS = 0.0005
MIN_BURST_BYTES = 8192
MAX_GSO_BYTES = 65536
UNITS = {"kbit": 1_000, "mbit": 1_000_000, "gbit": 1_000_000_000}
CONGESTION_CONTROL = "reno"  # defaults differ; every kernel has this one and allows it here


class NetworkError(Exception):
    """The network could not be built, or is not as asked for."""


@dataclass(frozen=True)
class Link:
    """A host's link. `bits_per_second` None: a veth pair as it is."""

    name: str
    bits_per_second: int | None

    @property
    def burst_bytes(self) -> int:
        """What may pass at once after a pause.

        A large burst would let a small payload through for nothing: 128 KiB are 10 ms at 100
        Mbit/s. A small one has the kernel cut (older kernels: drop) the packets that are larger,
        and with segmentation offload (GSO) a "packet" has up to 64 KiB. So the burst is half a
        millisecond of the rate, and `gso_bytes` limits the packets to less than that.
        """
        assert self.bits_per_second is not None
        return max(MIN_BURST_BYTES, int(self.bits_per_second / 8 * BURST_SECONDS))

    @property
    def gso_bytes(self) -> int:
        """The largest packet; a quarter of the burst is left for the headers of its segments."""
        return min(MAX_GSO_BYTES, self.burst_bytes * 3 // 4)


def parse_link(text: str) -> Link:
    """ "unlimited", or a number with kbit, mbit or gbit, as "100mbit". Raises ValueError."""
    if text == "unlimited":
        return Link(text, None)
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
    if not found or float(found[1]) == 0:
        raise ValueError(f"network: expected `unlimited` or a rate as `100mbit`, got {text!r}")
    return Link(text, int(float(found[1]) * UNITS[found[2]]))


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


# ---- commands ------------------------------------------------------------------------------------


def _run(*command: str) -> str:
    """Runs to the end whatever happens here: Ctrl-C in a terminal must not reach half a removal."""
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if done.returncode != 0:
        raise NetworkError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def namespaces() -> list[str]:
    """Names of all namespaces of this tool, of this process or others."""
    lines = _run("ip", "netns", "list").splitlines()
    return [line.split()[0] for line in lines if line.startswith(PREFIX)]


def _delete(names: list[str]) -> None:
    for name in names:
        # Whoever cleans up at the same time may have been faster.
        subprocess.run(["ip", "netns", "del", name], capture_output=True, start_new_session=True)


def remove_stale() -> list[str]:
    """Removes what a killed process has left; returns the names. Its workers have died with it."""
    stale = []
    for name in namespaces():
        found = re.fullmatch(rf"{PREFIX}-(\d+)-\w+", name)
        if found and not Path(f"/proc/{found[1]}").exists():
            stale.append(name)
    _delete(stale)
    return stale


def unavailable() -> str | None:
    """Why no network can be built here, in one sentence, or None. Tries it."""
    if sys.platform != "linux":
        return f"expected Linux, got {sys.platform}"
    if os.geteuid() != 0:
        return "expected to run as root, which network namespaces need"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"the program {program} is not there: install iproute2"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "-n", probe, "link", "add", "port0", "type", "veth")
        _run("ip", "-n", probe, "link", "add", "bridge0", "type", "bridge")
        tbf = ("tbf", "rate", "1mbit", "burst", "9kb", "limit", "9kb")
        _run("tc", "-n", probe, "qdisc", "add", "dev", "port0", "root", *tbf)
    except NetworkError as error:
        return str(error)
    finally:
        _delete([probe])
    return None


# ---- building ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    link: Link
    hosts: int

    def namespace(self, host: int | str) -> str:
        return f"{PREFIX}-{os.getpid()}-{host}"

    def command(self, host: int, *command: str) -> list[str]:
        """`command`, to be run on `host`. `ip` replaces itself by it: its pid is the command's."""
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def _build(self) -> None:
        for host in (SWITCH, *range(self.hosts)):
            name = self.namespace(host)
            _run("ip", "netns", "add", name)
            settings = "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; "
            settings += f"echo {CONGESTION_CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control"
            _run("ip", "netns", "exec", name, "sh", "-c", settings)
        switch = self.namespace(SWITCH)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for host in range(self.hosts):
            self._plug(host, switch)

    def _plug(self, host: int, switch: str) -> None:
        name, port = self.namespace(host), f"port{host}"
        peer = ("peer", "name", INTERFACE, "netns", name)
        _run("ip", "-n", switch, "link", "add", port, "type", "veth", *peer)
        for namespace, interface in ((switch, port), (name, INTERFACE)):
            if self.link.bits_per_second is not None:
                self._shape(namespace, interface)
        _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", name, "address", "add", f"{address(host)}/24", "dev", INTERFACE)
        _run("ip", "-n", name, "link", "set", INTERFACE, "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")

    def _shape(self, namespace: str, interface: str) -> None:
        link = self.link
        gso = ("gso_max_size", str(link.gso_bytes))
        _run("ip", "-n", namespace, "link", "set", "dev", interface, *gso)
        tbf = ("tbf", "rate", f"{link.bits_per_second}bit", "burst", f"{link.burst_bytes}b")
        latency = ("latency", f"{LATENCY_MS}ms")
        _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *tbf, *latency)

    def check_settings(self) -> None:
        """Raises NetworkError unless both ends of every link have the rate that was asked for."""
        expected = self.link.bits_per_second
        for host in range(self.hosts):
            ends = ((self.namespace(host), INTERFACE), (self.namespace(SWITCH), f"port{host}"))
            for namespace, interface in ends:
                text = _run("tc", "-n", namespace, "-j", "qdisc", "show", "dev", interface)
                disciplines: list[dict[str, Any]] = json.loads(text)
                rates = [8 * d["options"]["rate"] for d in disciplines if d["kind"] == "tbf"]
                # tc keeps whole bytes per second.
                if [rate // 8 for rate in rates] != ([] if expected is None else [expected // 8]):
                    raise NetworkError(
                        f"{interface} of host {host}: expected a rate of {expected} bit/s, got "
                        f"{rates}"
                    )

    def goodput(self, seconds: float = 0.5) -> float:
        """Bits of TCP payload per second from host 0 to 1, measured with one connection."""
        probe = str(Path(__file__).with_name("goodput.py"))
        commands = (
            self.command(1, sys.executable, probe, "receive", address(1)),
            self.command(0, sys.executable, probe, "send", address(1), str(seconds)),
        )
        processes = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands
        ]
        try:
            text = processes[0].communicate(timeout=30 + seconds)[0]
            return float(text)
        except (ValueError, subprocess.TimeoutExpired):
            raise NetworkError("the probe of the link failed") from None
        finally:
            for process in processes:
                process.kill()
                process.communicate()


# ---- life ----------------------------------------------------------------------------------------


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _signals(handler: Any, numbers: tuple[signal.Signals, ...]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # signals arrive in the main thread only
        return
    before = [(number, signal.signal(number, handler)) for number in numbers]
    try:
        yield
    finally:
        for number, old in before:
            signal.signal(number, old)


@contextmanager
def _delayed(*numbers: signal.Signals) -> Iterator[None]:
    """Signals that arrive meanwhile take effect afterwards."""
    arrived: list[int] = []
    try:
        with _signals(lambda number, frame: arrived.append(number), numbers):
            yield
    finally:
        for number in dict.fromkeys(arrived):
            signal.raise_signal(number)


@contextmanager
def build_network(link: Link, hosts: int) -> Iterator[Network]:
    """A network of 2 to 8 hosts, removed at the end, after an exception, SIGINT, SIGTERM or SIGHUP.

    SIGKILL leaves the namespaces behind; the next call, in any process, removes them. Raises
    ValueError for another number of hosts and NetworkError if a command fails.
    """
    if not 2 <= hosts <= MAX_HOSTS:
        raise ValueError(f"hosts: expected 2 to {MAX_HOSTS}, got {hosts}")
    remove_stale()
    network = Network(link, hosts)
    with _signals(_stop, (signal.SIGTERM, signal.SIGHUP)):
        try:
            network._build()
            network.check_settings()
            yield network
        finally:
            # A second Ctrl-C waits: it would leave the other half behind.
            with _delayed(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                _delete([network.namespace(host) for host in (SWITCH, *range(hosts))])


def interface_bytes(interface: str = INTERFACE) -> int:
    """Bytes sent through this namespace's interface so far, headers and retransmissions too."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.strip().partition(":")
        if name == interface:
            return int(counts.split()[8])
    raise NetworkError(f"{interface}: expected an interface of this name")


def busy_cores(seconds: float = 0.3) -> float:
    """Cores that are at work on this machine now, over `seconds`."""

    def ticks() -> int:
        counts = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(counts) - counts[3] - counts[4]  # all but idle and waiting for disks

    before, began = ticks(), time.perf_counter()
    time.sleep(seconds)
    elapsed = time.perf_counter() - began
    return (ticks() - before) / os.sysconf("SC_CLK_TCK") / elapsed
