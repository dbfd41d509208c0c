"""The network benchmark: its hooks, its CSV, and hosts in namespaces that are always removed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import hooks
import network
import plot
import pytest
import results
import run
import torch
import workloads
from models import (
    GivenGradients,
    assert_equal_on_all_ranks,
    exact_gradients,
    gather_all,
    random_gradients,
    wrap,
)
from ranks import run_ranks
from results import Row

NETBENCH = Path(__file__).parent.parent / "examples" / "netbench"
DENSE_BYTES = 4 * 11_540_992  # of the MLP's gradients

# ---- hooks ---------------------------------------------------------------------------------------


def topk_conserves(rank: int, steps: int, share: float) -> None:
    module = GivenGradients()
    ddp = wrap(module)  # several buckets, regrouped after the first step
    state = hooks.TopKState(share)
    ddp.register_comm_hook(state, hooks.topk_hook)
    parameters = list(module.parameters())
    applied = [torch.zeros_like(p) for p in parameters]
    given = [torch.zeros_like(p) for p in parameters]
    for step in range(steps):
        ddp.zero_grad()
        grads = exact_gradients(rank, step)
        ddp(grads).backward()
        sent = sum(int(p.grad.count_nonzero()) for p in parameters)
        total = sum(p.numel() for p in parameters)
        # At most every rank's share, rounded up in each bucket, and each at a place of its own.
        assert 0 < sent <= 2 * (share * total + len(parameters)) < total
        assert_equal_on_all_ranks([p.grad for p in parameters], "p.grad")
        for a, g, p, grad in zip(applied, given, parameters, grads, strict=True):
            a += p.grad
            g += sum(gather_all(grad)) / 2
    assert state.seconds["compress_seconds"] > 0
    for p, a, g in zip(parameters, applied, given, strict=True):
        kept = sum(gather_all(state.of_parameter(p))) / 2
        assert torch.equal(a.flatten() + kept, g.flatten())
    assert any(state.of_parameter(p).any() for p in parameters)  # or nothing had to be conserved


def test_topk_applies_or_keeps_every_gradient():
    run_ranks(topk_conserves, 2, 12, 0.05)


def topk_sends_largest(rank: int) -> None:
    module = GivenGradients()
    ddp = torch.nn.parallel.DistributedDataParallel(module)  # one bucket
    ddp.register_comm_hook(hooks.TopKState(0.01), hooks.topk_hook)
    grads = random_gradients(0, 0)  # on both ranks
    ddp(grads).backward()
    mine = torch.cat([grad.flatten() for grad in grads])
    applied = torch.cat([p.grad.flatten() for p in module.parameters()])
    count = -(-mine.numel() // 100)
    expected = torch.zeros_like(mine)
    largest = mine.abs().topk(count).indices
    expected[largest] = mine[largest]
    assert torch.equal(applied, expected)


def test_topk_sends_the_largest_percent_of_the_bucket():
    run_ranks(topk_sends_largest, 2)


def noop_returns_own(rank: int) -> None:
    module = GivenGradients()
    ddp = wrap(module)
    ddp.register_comm_hook(None, hooks.noop_hook)
    for step in range(3):
        ddp.zero_grad()
        grads = exact_gradients(rank, step)
        ddp(grads).backward()
        for p, grad in zip(module.parameters(), grads, strict=True):
            assert torch.equal(p.grad, grad)


def test_noop_leaves_every_rank_its_own_gradient():
    run_ranks(noop_returns_own, 2)


def every_hook_trains(rank: int, hook: str) -> int:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
    ddp, codec_seconds = hooks.HOOKS[hook].wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(32, 64)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (ddp(x) - x[:, :8]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0], losses[::10]
    assert_equal_on_all_ranks(list(model.parameters()), "parameters")
    return len(codec_seconds())


@pytest.mark.parametrize("hook", [h for h in hooks.HOOKS if h not in ("noop", "bf16")])
def test_every_hook_trains(hook):
    # Without bf16, which Gloo learnt late; the benchmark makes a row of its refusal.
    times = run_ranks(every_hook_trains, 2, hook)
    assert times == [3, 3] if hook in ("topk", "layer", "bin") else times == [0, 0]


# ---- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"), [("mlp", 11_540_992), ("lstm", 6_828_032), ("resnet18", 11_689_512)]
)
def test_models_have_the_stated_size_and_train(name, count):
    reason = workloads.missing(name)
    if reason:
        pytest.skip(reason)
    workload = workloads.WORKLOADS[name]
    model = workload.make()
    assert sum(p.numel() for p in model.parameters()) == count
    assert f"{count / 1e6:.1f} M" in workload.description
    workload.loss(model, *workload.draw(torch.Generator().manual_seed(0))).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_a_missing_torchvision_is_said_so(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "torchvision" in workloads.missing("resnet18")
    assert workloads.missing("mlp") is None


# ---- the CSV -------------------------------------------------------------------------------------


def row(hook: str = "layer", status: str = "ok", **values: object) -> Row:
    return replace(Row("mlp", "1gbit", 2, hook, 0, status), **values)


def test_csv_returns_what_was_written(tmp_path):
    path = tmp_path / "rows.csv"
    rows = [
        row(step_ms=1.25, steps=7, wire_bytes=1234.5),
        row("fp16", "failed", reason='rank 0: "a, b"\nand\tmore'),
    ]
    for one in rows:
        results.append(path, one)
    assert results.read(path) == [rows[0], replace(rows[1], reason='rank 0: "a, b" and more')]


def test_a_line_that_a_kill_cut_off_is_measured_again(tmp_path):
    path = tmp_path / "rows.csv"
    results.append(path, row("fp16"))
    whole = path.read_bytes()
    results.append(path, row("layer"))
    last = path.read_bytes()[len(whole) :]
    for length in range(len(last)):
        path.write_bytes(whole + last[:length])
        assert [one.hook for one in results.read(path)] == ["fp16"]
        results.append(path, row("layer"))
        assert [one.hook for one in results.read(path)] == ["fp16", "layer"]


def test_a_csv_of_other_columns_is_refused(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="expected the columns"):
        results.read(path)


def hooks_pending(done: list[Row], *options: str) -> list[str]:
    words = ["--networks", "1gbit", "--hooks", "noop", "fp16", "layer", *options]
    groups = run.pending(run.parse_arguments(words), done)
    return [one.hook for rows in groups.values() for one in rows]


def test_a_second_run_measures_only_what_is_missing():
    done = [row("noop"), row("fp16", "failed")]
    assert hooks_pending([]) == ["noop", "fp16", "layer"]
    assert hooks_pending(done) == ["layer"]
    assert hooks_pending(done, "--retry") == ["fp16", "layer"]
    assert hooks_pending(done, "--repeats", "2") == ["layer", "noop", "fp16", "layer"]


def test_medians_leave_failures_out():
    rows = [row(step_ms=ms, repeat=n) for n, ms in enumerate((5.0, 1.0, 2.0))]
    rows.append(row(status="hang", repeat=3))
    assert results.medians(rows)["mlp", "1gbit", 2]["layer"].step_ms == 2.0


def test_a_step_takes_as_long_as_its_slowest_rank():
    ranks = [
        {"seconds": [0.1, 0.5, 0.1], "wire_bytes": 10.0, "cpu_seconds": 0.1},
        {"seconds": [0.3, 0.2, 0.4], "wire_bytes": 30.0, "cpu_seconds": 0.3},
    ]
    summary = run.summarise(row(status="pending"), ranks)
    assert (summary.status, summary.steps, summary.wire_bytes) == ("ok", 3, 20.0)
    assert summary.step_ms == pytest.approx(400)
    assert summary.cpu_ms == pytest.approx(200)


def test_the_figure_needs_only_some_of_the_rows(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        row("noop", step_ms=50.0),
        row("allreduce", step_ms=450.0, wire_bytes=DENSE_BYTES * 1.0),
        row("layer", step_ms=60.0, wire_bytes=DENSE_BYTES / 200),
        row("bf16", "failed"),
    ]
    plot.draw(rows, "mlp", 2, "1gbit", tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="4 ranks"):
        plot.draw(rows, "mlp", 4, "1gbit", tmp_path / "none.png")
    gains = plot.gains(results.medians(rows), "mlp", "layer")
    assert gains["time"] == [("1gbit", pytest.approx(40))]
    assert gains["bytes"] == gains["model"] == [("1gbit", pytest.approx(200))]
    # At 1 Gbit/s a megabyte takes 8 ms.
    sent = row("layer", wire_bytes=1e6, compress_ms=2.0, decompress_ms=1.0)
    assert plot.modelled_ms(sent, row("noop", step_ms=50.0)) == pytest.approx(61)
    assert plot.modelled_ms(replace(sent, network="unlimited"), row("noop")) is None


# ---- workers that fail or hang -------------------------------------------------------------------


@contextlib.contextmanager
def workers(folder: Path, *programs: str) -> Iterator[run.Workers]:
    started = run.Workers(folder)
    try:
        for rank, program in enumerate(programs):
            with (folder / f"rank{rank}.log").open("wb") as log:
                command = [sys.executable, "-c", program]
                started.processes.append(
                    subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
                )
        yield started
    finally:
        started.end()
    assert all(process.returncode is not None for process in started.processes)


WAITS = """
import faulthandler, signal, time
faulthandler.register(signal.SIGUSR1)
def stuck(): time.sleep(600)
stuck()
"""


def test_a_failing_rank_ends_the_case_with_its_error(tmp_path):
    failing = "raise ValueError('no bf16 here')"
    with workers(tmp_path, WAITS, failing) as started:
        status, reason = started.wait(60)
    assert status == "failed"
    assert reason == "rank 1, exit code 1: ValueError: no bf16 here"


def test_a_hang_says_where(tmp_path):
    with workers(tmp_path, "pass", WAITS) as started:
        started.processes[0].wait()
        status, reason = started.wait(2)
    assert status == "hang"
    assert "running: ranks [1]" in reason
    assert "rank 1 in stuck" in reason


# ---- links ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["64kbit", "100mbit", "2.5gbit", "10gbit", "400gbit"])
def test_a_packet_with_its_headers_fits_into_the_burst(text):
    link = network.parse_link(text)
    segments = -(-link.gso_bytes // 1448)
    assert link.gso_bytes + 66 * segments <= link.burst_bytes
    assert link.gso_bytes <= 65536


@pytest.mark.parametrize("text", ["", "100", "fast", "0mbit", "-1gbit", "100 mbit", "1tbit"])
def test_a_bad_rate_is_refused(text):
    with pytest.raises(ValueError, match="expected `unlimited` or a rate"):
        network.parse_link(text)


@pytest.mark.parametrize("option", [("--ranks", "9"), ("--ranks", "1"), ("--networks", "slow")])
def test_bad_options_are_refused(option, capsys):
    with pytest.raises(SystemExit):
        run.parse_arguments(list(option))
    assert "expected" in capsys.readouterr().err


# ---- namespaces ----------------------------------------------------------------------------------


def namespaces_of(pid: int) -> list[str]:
    return [name for name in network.namespaces() if f"-{pid}-" in name]


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=NETBENCH,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"not within 60 s: {what}"
        time.sleep(0.02)


QUICK = ("--networks", "200mbit", "--hooks", "noop", "layer", "--warm-up=4", "--seconds=0.1")


@pytest.mark.usefixtures("can_build_networks")
def test_two_ranks_over_a_limited_link(tmp_path, capsys):
    path = tmp_path / "netbench.csv"
    run.main(["--out", str(tmp_path), *QUICK])
    noop, layer = results.read(path)
    assert [(r.hook, r.status, r.reason) for r in (noop, layer)] == [
        ("noop", "ok", ""),
        ("layer", "ok", ""),
    ]
    assert 0 < layer.goodput_mbit < 204  # lower when the machine is busy, never higher
    assert noop.wire_bytes < 1000 < layer.wire_bytes < DENSE_BYTES / 4
    assert layer.compress_ms > 0
    assert layer.decompress_ms > 0
    assert namespaces_of(os.getpid()) == []
    # All is there: a second run has nothing to do, and shows the table again.
    before = path.read_bytes()
    capsys.readouterr()
    run.main(["--out", str(tmp_path), *QUICK])
    assert "AdaComp, layer scale" in capsys.readouterr().out
    assert path.read_bytes() == before


def processes_in(name: str) -> list[int]:
    text = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
    return [int(word) for word in text.split()]


@pytest.mark.usefixtures("can_build_networks")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_leaves_nothing(number, tmp_path):
    # At 100 kbit/s the first gradients alone would take an hour.
    options = ("--out", str(tmp_path), "--networks", "100kbit", "--hooks", "allreduce")
    process = start(str(NETBENCH / "run.py"), *options)
    hosts = [f"{network.PREFIX}-{process.pid}-{host}" for host in (0, 1)]
    try:
        # The goodput probe's process comes first; a rank's has the worker's command line.
        wait_until(lambda: any(map(is_worker, processes_in(hosts[1]))), "a worker on host 1")
        ranks = [pid for host in hosts for pid in processes_in(host)]
        process.send_signal(number)
        process.wait(timeout=60)
    finally:
        process.kill()
        text = process.communicate()[0]
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), text
    wait_until(lambda: not any(map(is_worker, ranks)), "the end of the workers")
    if number == signal.SIGKILL:  # nobody was left to remove them; the next run does
        assert len(namespaces_of(process.pid)) == 3
        network.remove_stale()
    assert namespaces_of(process.pid) == []
    assert results.read(tmp_path / "netbench.csv") == []


KEEPS_A_NETWORK = """
import network, time
with network.build_network(network.parse_link("1gbit"), 2):
    print("built", flush=True)
    time.sleep(600)
"""


@pytest.mark.usefixtures("can_build_networks")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_removes_the_network(number):
    process = start("-c", KEEPS_A_NETWORK)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "built\n"
        assert len(namespaces_of(process.pid)) == 3
        process.send_signal(number)
        process.wait(timeout=60)
    finally:
        process.kill()
        text = process.communicate()[0]
    assert process.returncode in (128 + number, -number), text
    assert namespaces_of(process.pid) == []


def is_worker(pid: int) -> bool:
    try:
        return b"worker.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.usefixtures("can_build_networks")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_removes_the_network(error):
    def interrupted() -> None:
        with network.build_network(network.parse_link("100mbit"), 3):
            assert len(namespaces_of(os.getpid())) == 4
            raise error

    with pytest.raises(error):
        interrupted()
    assert namespaces_of(os.getpid()) == []


@pytest.mark.usefixtures("can_build_networks")
def test_a_signal_during_the_removal_counts_after_it(monkeypatch):
    delete = network._delete

    def interrupted(names: list[str]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        delete(names)

    with (
        pytest.raises(SystemExit, match="143"),
        network.build_network(network.parse_link("unlimited"), 2),
    ):
        monkeypatch.setattr(network, "_delete", interrupted)
    assert namespaces_of(os.getpid()) == []


@pytest.mark.usefixtures("can_build_networks")
def test_a_failure_half_way_removes_the_other_half(monkeypatch):
    monkeypatch.setattr(network, "CONGESTION_CONTROL", "no-such")
    with (
        pytest.raises(network.NetworkError, match="no-such"),
        network.build_network(network.parse_link("unlimited"), 2),
    ):
        pass
    assert namespaces_of(os.getpid()) == []


@pytest.mark.usefixtures("can_build_networks")
def test_a_link_of_another_rate_is_found_out():
    with network.build_network(network.parse_link("100mbit"), 2) as built:
        other = network.Network(network.parse_link("200mbit"), 2)
        with pytest.raises(network.NetworkError, match="expected a rate of 200000000"):
            other.check_settings()
        built.check_settings()


def test_the_number_of_hosts_is_checked():
    with (
        pytest.raises(ValueError, match="expected 2 to 8, got 9"),
        network.build_network(network.parse_link("unlimited"), 9),
    ):
        pass
