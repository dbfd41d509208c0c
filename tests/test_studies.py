"""The studies' simulator gives the bits of real DDP ranks."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adacomp_torch import AdaCompState, adacomp_hook
from adacomp_torch.capacity import Capacity

STUDIES = Path(__file__).parent.parent / "examples" / "studies"
sys.path.append(str(STUDIES))

from exchanges import PowerSGD, TopK  # noqa: E402
from learners import AdaComp, Dense, Learners  # noqa: E402
from study import Setting, Study, key_of, main, make_exchange, read_rows  # noqa: E402
from tasks import CharLSTM, CharTransformer, cnn, mlp  # noqa: E402

STEPS = 12


def make_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 24, 5, padding=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24 * 16, 70),
        nn.ReLU(),
        nn.Linear(70, 10),
    )


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 1, 8, 8, generator=generator), torch.randint(
        10, (4,), generator=generator
    )


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train_ranks(rank: int, steps: int, worst_case: bool, options: dict[str, Any]) -> dict[str, Any]:
    if worst_case:
        Capacity.begin = lambda self: self._most
    model = make_model()
    # Several buckets, which DDP rebuilds in another order after the first step.
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    state = AdaCompState(ddp, dense_fallback=None, **options)  # the simulator always compresses
    ddp.register_comm_hook(state, adacomp_hook)
    optimizer = make_optimizer(model)
    for step in range(steps):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
    return {
        "parameters": [p.detach().clone() for p in model.parameters()],
        "residuals": state.state_dict()["residuals"],
        "stats": state.stats(),
        "layouts": len(state._exchanges),
    }


def train_learners(world_size: int, exchange: Any, model: nn.Module, steps: int = STEPS) -> None:
    learners = Learners(model, world_size, exchange)
    optimizer = make_optimizer(model)
    for step in range(steps):
        batches = [batch(rank, step) for rank in range(world_size)]
        learners.backward(partial(loss_on, model, batches))
        optimizer.step()


def loss_on(model: nn.Module, batches: list[tuple[Tensor, Tensor]], rank: int) -> Tensor:
    x, y = batches[rank]
    return nn.functional.cross_entropy(model(x), y)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as on the ranks: a sum over threads has other bits
    yield
    torch.set_num_threads(before)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


@pytest.mark.parametrize(
    "options", [{}, {"scale": "bin"}, {"bin_size": 100, "threshold_factor": 3.0}], ids=str
)
# Until the third step the hook's capacities have room for all of this model. After it they follow
# what was needed before, and what does not fit waits for a later step: not so in the simulator.
@pytest.mark.parametrize(("steps", "worst_case"), [(3, False), (STEPS, True)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_learners_have_the_bits_of_ddp_ranks(world_size, steps, worst_case, options):
    ranks = run_ranks(train_ranks, world_size, steps, worst_case, options)
    model = make_model()
    exchange = AdaComp(model, world_size, **options)
    train_learners(world_size, exchange, model, steps)
    for rank, result in enumerate(ranks):
        stats = result["stats"]
        assert 0 < stats["bytes_sent"] < stats["dense_bytes"]
        assert 0 < stats["entries_per_bin"] < 25
        assert stats["dropped_chunks"] == 0, "the simulator never drops one"
        assert result["layouts"] >= 3, "expected several buckets and a rebuild"
        for (name, p), expected in zip(model.named_parameters(), result["parameters"], strict=True):
            assert same_bits(p.detach(), expected), f"rank {rank}: {name}"
        assert len(result["residuals"]) == sum(b is not None for b in exchange.bin_sizes)
        for name, expected in result["residuals"].items():
            mine = exchange.residual(name)[rank].view_as(expected)
            assert same_bits(mine, expected), f"rank {rank}: residual of {name}"
            assert mine.abs().max() > 0
    start = make_model()
    assert not any(
        torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True)
    )


def bytes_of_ranks(rank: int, steps: int) -> tuple[int, int]:
    model = make_model()
    # Never rebuilds its one bucket.
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    state = AdaCompState(ddp, dense_fallback=None)
    ddp.register_comm_hook(state, adacomp_hook)
    optimizer = make_optimizer(model)
    for step in range(steps):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
    stats = state.stats()
    return stats["bytes_sent"], stats["dropped_chunks"]


def test_bytes_are_those_of_the_hook():
    # Two exchanges whose capacity is a guess, and one that the first exchange sizes.
    total, steps = 0, 3
    (sent, dropped), _ = run_ranks(bytes_of_ranks, 2, steps)
    model = make_model()
    exchange = AdaComp(model, 2)
    learners = Learners(model, 2, exchange)
    optimizer = make_optimizer(model)
    for step in range(steps):
        learners.backward(partial(loss_on, model, [batch(rank, step) for rank in range(2)]))
        optimizer.step()
        total += exchange.sent_bytes
    assert dropped == 0
    assert total == sent
    assert exchange.fixed < exchange.needed_bytes <= exchange.sent_bytes < exchange.capacity
    assert exchange.counters[:, :, 0].sum() > 0
    assert exchange.counters[:, :, 1].sum() == 0


def test_dense_learners_have_the_mean_gradient():
    model = make_model()
    learners = Learners(model, 3, Dense(3, sum(p.numel() for p in model.parameters())))
    batches = [batch(rank, 0) for rank in range(3)]
    learners.backward(partial(loss_on, model, batches))
    other = make_model()
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    nn.functional.cross_entropy(other(x), y).backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_models_that_ddp_would_treat_otherwise_are_refused():
    with pytest.raises(ValueError, match="expected no buffers, got '0.running_mean'"):
        Learners(nn.Sequential(nn.BatchNorm1d(4)), 2, Dense(2, 8))
    model = nn.Sequential(nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="parameter '0.weight': expected it contiguous"):
        Learners(model, 2, Dense(2, 148))


# ---- the studies themselves ----------------------------------------------------------------------


def tiny_settings(seed: int) -> list[Setting]:
    base = Setting("lstm", learners=2, batch=1, steps=3, lr=0.1, seed=seed)
    return [replace(base, method="dense"), base, replace(base, scale="bin", warm_up=1)]


def run_study(monkeypatch, capsys, folder: Path, *arguments: str) -> tuple[list[Any], str]:
    drawn: list[Any] = []
    tiny = Study(
        "tiny", tiny_settings, lambda rows, path: drawn.extend(rows), lambda rows: "", evaluations=1
    )
    monkeypatch.setattr(sys, "argv", ["study", "--out", str(folder), *arguments])
    main(tiny, "")
    return drawn, capsys.readouterr().out


def test_a_study_resumes_from_its_csv(tmp_path, monkeypatch, capsys):
    _, said = run_study(monkeypatch, capsys, tmp_path, "--limit", "1")
    assert "3 settings, 1 to train now" in said
    first = read_rows(tmp_path / "tiny.csv")
    assert [row["method"] for row in first] == ["dense"]
    drawn, said = run_study(monkeypatch, capsys, tmp_path)
    assert "3 settings, 2 to train now" in said
    rows = read_rows(tmp_path / "tiny.csv")
    assert rows[:1] == first
    assert rows == drawn
    assert len(rows) == 3
    assert {row["step"] for row in rows} == {"3"}
    _, layer, warm = rows
    for row in (layer, warm):
        assert 0 < float(row["needed_bytes"]) < float(row["dense_bytes"])
        assert float(row["entries_per_bin"]) > 0
        assert float(row["residual_max"]) > 0
    # One of its three steps was dense.
    assert float(warm["sent_bytes"]) > float(warm["dense_bytes"]) / 3
    _, said = run_study(monkeypatch, capsys, tmp_path)
    assert "3 settings, 0 to train now" in said
    _, said = run_study(monkeypatch, capsys, tmp_path, "--seed", "2", "--limit", "0")
    assert "3 settings, 0 to train now" in said
    assert read_rows(tmp_path / "tiny.csv") == rows


@pytest.mark.parametrize(
    "name", ["cnn", "mlp", "lstm", "transformer", "tradeoff", "traffic", "ablations"]
)
def test_every_study_has_distinct_settings_that_can_be_made(name):
    study = import_module(f"study_{name}").STUDY
    settings = study.settings(1)
    assert len({key_of(s) for s in settings}) == len(settings)
    for setting in settings:
        task = setting.task
        model = cnn(3, 16) if task.startswith("cifar") else cnn(1, 14)
        if task == "mlp14":
            model = mlp(14)
        elif task in ("lstm", "transformer"):
            model = (CharLSTM if task == "lstm" else CharTransformer)(65)
        exchange, adacomp = make_exchange(replace(setting, learners=1), model)
        numel = sum(p.numel() for p in model.parameters())
        assert (adacomp is not None) == (setting.method == "adacomp")
        mean = torch.zeros(numel)
        exchange(torch.randn(1, numel), mean)
        assert mean.abs().max() > 0
        assert setting.method == "dense" or setting.warm_up or exchange.sent_bytes < 4 * numel


def test_power_sgd_and_top_k_lose_nothing():
    model = mlp(14)
    numel = sum(p.numel() for p in model.parameters())
    for exchange in (PowerSGD(model, 2, 2), TopK(2, numel, 8000)):
        given, applied, mean = torch.zeros(numel), torch.zeros(numel), torch.zeros(numel)
        for _ in range(3):
            grads = torch.randn(2, numel)
            given += grads.mean(0)
            exchange(grads, mean)
            applied += mean
        assert 0 < exchange.sent_bytes < 4 * numel
        torch.testing.assert_close(
            applied + exchange.residuals.mean(0), given, rtol=1e-4, atol=1e-4
        )
        assert exchange.residuals.abs().max() > 0
