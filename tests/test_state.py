"""AdaCompState: options, refusals, views, statistics; configuration that differs between ranks."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import GivenGradients, random_gradients, wrap
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adacomp_torch import (
    AdaCompState,
    adacomp_hook,
    agreement,
    capacity,
    default_bin_size,
    exchange,
    ops,
)
from adacomp_torch.layout import BucketParameter


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory):
    """A group of this process alone: enough for everything that is refused at construction."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ---- construction --------------------------------------------------------------------------------


def bin_sizes(state: AdaCompState) -> dict[str, int | None]:
    return {name: entry.bin_size for name, entry in state._residuals.parameters.items()}


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.conv = nn.Conv2d(16, 16, 3)
        self.linear = nn.Linear(16, 600)
        self.small = nn.Linear(4, 4)


def test_default_bin_sizes_are_the_papers():
    state = AdaCompState(DistributedDataParallel(Mixed()))
    assert bin_sizes(state) == {
        "embedding.weight": 500,
        "conv.weight": 50,
        "conv.bias": None,
        "linear.weight": 500,
        "linear.bias": 50,
        "small.weight": None,
        "small.bias": None,
    }


def test_bin_size_as_int_mapping_and_function():
    ddp = DistributedDataParallel(Mixed())
    sizes = bin_sizes(AdaCompState(ddp, bin_size=64))
    assert sizes["conv.weight"] == sizes["linear.bias"] == 64
    assert sizes["conv.bias"] is None
    ddp = DistributedDataParallel(Mixed())
    sizes = bin_sizes(AdaCompState(ddp, bin_size={"conv.*": 7, "linear.weight": None, "*.bias": 9}))
    assert sizes["conv.weight"] == sizes["conv.bias"] == 7  # the first pattern wins
    assert sizes["linear.weight"] is None
    assert sizes["linear.bias"] == 9
    assert sizes["embedding.weight"] == 500
    ddp = DistributedDataParallel(Mixed())

    def only_convolutions(name: str, parameter: torch.Tensor, module: nn.Module) -> int | None:
        if isinstance(module, nn.Conv2d):
            return 50
        return default_bin_size(name, parameter, module) if "linear" in name else None

    sizes = bin_sizes(AdaCompState(ddp, bin_size=only_convolutions))
    assert sizes["conv.bias"] == 50
    assert sizes["linear.weight"] == 500
    assert sizes["embedding.weight"] is None


OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"bin_size": 0}, ValueError, "bin_size of 'embedding.weight': expected 1 to 16383"),
    ({"bin_size": 16384}, ValueError, "bin_size of 'embedding.weight': expected 1 to 16383"),
    ({"bin_size": 5.0}, TypeError, "bin_size: expected an int, a mapping"),
    ({"bin_size": {"conv.weight": "50"}}, TypeError, "bin_size of 'conv.weight': expected an int"),
    (
        {"bin_size": {"cnov.*": 50}},
        ValueError,
        "expected patterns that match a parameter, got 'cnov",
    ),
    ({"scale": "tensor"}, ValueError, "scale: expected 'layer' or 'bin', got 'tensor'"),
    ({"threshold_factor": 0.9}, ValueError, "threshold_factor: expected a finite number >= 1"),
    ({"threshold_factor": float("inf")}, ValueError, "threshold_factor: expected a finite number"),
    ({"threshold_factor": 1e39}, ValueError, "threshold_factor: expected a finite number >= 1"),
    ({"threshold_factor": "2"}, TypeError, "threshold_factor: expected a number, got str"),
    ({"process_group": "gloo"}, TypeError, "process_group: expected a ProcessGroup that this rank"),
    ({"start_iter": -1}, ValueError, "start_iter: expected an int >= 0, got -1"),
    ({"start_iter": 1.5}, ValueError, "start_iter: expected an int >= 0, got 1.5"),
]


@pytest.mark.parametrize(("options", "error", "message"), OPTIONS, ids=lambda v: str(v)[:30])
def test_wrong_options_are_refused_and_leave_the_module_free(options, error, message):
    ddp = DistributedDataParallel(Mixed())
    with pytest.raises(error, match=".*") as caught:
        AdaCompState(ddp, **options)
    assert message in str(caught.value)
    AdaCompState(ddp)


def test_a_bare_module_is_refused():
    with pytest.raises(TypeError, match="expected a DistributedDataParallel object .* got Mixed"):
        AdaCompState(Mixed())


def test_a_second_state_of_a_live_module_is_refused():
    ddp = DistributedDataParallel(Mixed())
    state = AdaCompState(ddp)
    with pytest.raises(ValueError, match="without an AdaCompState, got one that has it already"):
        AdaCompState(ddp)
    del state
    AdaCompState(ddp)


UNSUPPORTED = {
    "float64": (lambda: nn.Linear(30, 30).double(), "parameter 'weight': expected float32"),
    "complex": (
        lambda: nn.Linear(30, 30, dtype=torch.complex64),
        "parameter 'weight': expected fl",
    ),
    "sparse": (lambda: nn.Embedding(100, 8, sparse=True), "parameter 'weight': expected dense"),
    "sparse bag": (lambda: nn.EmbeddingBag(100, 8, sparse=True), "parameter 'weight': expected de"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_parameters_are_refused_by_name(kind):
    make, message = UNSUPPORTED[kind]
    ddp = DistributedDataParallel(make())
    with pytest.raises(TypeError) as caught:
        AdaCompState(ddp)
    assert str(caught.value).startswith(message)


def test_a_bucket_with_foreign_parameters_is_refused_before_the_collective(monkeypatch):
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("a collective was begun")

    own, foreign = wrap(GivenGradients()), wrap(GivenGradients())
    foreign.register_comm_hook(AdaCompState(own), adacomp_hook)
    monkeypatch.setattr(exchange, "all_gather_single", never)
    monkeypatch.setattr(agreement, "all_gather_single", never)
    with pytest.raises(RuntimeError, match="expected parameters of the DistributedDataParallel"):
        foreign(random_gradients(0, 0)).backward()


def test_the_hook_called_with_something_else_than_a_bucket():
    state = AdaCompState(wrap(GivenGradients()))
    with pytest.raises(TypeError, match=r"expected a torch.distributed.GradBucket, got tuple"):
        adacomp_hook(state, (torch.zeros(3), torch.zeros(3)))


def test_the_state_is_neither_copied_nor_pickled():
    # Fault 29. DDP itself would drop the hook from its copy without a word.
    ddp = DistributedDataParallel(Mixed())
    state = AdaCompState(ddp)
    ddp.register_comm_hook(state, adacomp_hook)
    for copied in (state, ddp):
        for copier in (copy.copy, copy.deepcopy, pickle.dumps):
            if (copied, copier) == (ddp, copy.copy):
                continue  # shares the reducer, and so the hook
            with pytest.raises(TypeError, match="use its `module`, and this state's state_dict"):
                copier(copied)
    assert copy.deepcopy(ddp.module) is not ddp.module


def test_a_parameter_frozen_after_ddp_was_made_is_still_in_its_buckets():
    module = GivenGradients()
    ddp = wrap(module, find_unused_parameters=True)
    module.second.requires_grad_(False)
    state = AdaCompState(ddp, bin_size=64)
    ddp.register_comm_hook(state, adacomp_hook)
    for step in range(2):
        ddp(random_gradients(0, step)).backward()
    stats = state.stats()
    assert 0 < stats["bytes_sent"] < stats["dense_bytes"]
    assert module.second.grad is None


# ---- views and statistics ------------------------------------------------------------------------


def test_residual_views_have_the_parameters_shape_and_strides():
    module = nn.Sequential(nn.Conv2d(16, 16, 3)).to(memory_format=torch.channels_last)
    state = AdaCompState(DistributedDataParallel(module))
    view = state.residual("0.weight")
    assert view.shape == module[0].weight.shape
    assert view.stride() == module[0].weight.stride()
    view.fill_(1.0)
    assert state.residual("0.weight").sum() == view.numel()
    with pytest.raises(ValueError, match="'0.bias': expected a compressed parameter"):
        state.residual("0.bias")
    with pytest.raises(KeyError, match="expected one of 0.weight, 0.bias, got 'weight'"):
        state.residual("weight")


def test_stats_count_what_goes_over_the_wire():
    module = GivenGradients()
    ddp = wrap(module)
    state = AdaCompState(ddp, bin_size=64, start_iter=1)
    ddp.register_comm_hook(state, adacomp_hook)
    empty = state.stats()
    assert empty["steps"] == empty["bytes_sent"] == 0
    numel = sum(p.numel() for p in module.parameters())
    for step in range(3):
        ddp(random_gradients(0, step)).backward()
    stats = state.stats(per_parameter=True)
    assert stats["steps"] == 3
    assert stats["compressed_steps"] == 2
    assert stats["dense_bytes"] == 3 * 4 * numel
    assert 4 * numel < stats["bytes_sent"] < 3 * 4 * numel
    assert stats["compression_ratio"] == stats["dense_bytes"] / stats["bytes_sent"]
    assert set(stats["parameters"]) == {"first", "second", "third", "fourth"}
    for name, own in stats["parameters"].items():
        assert own["bin_size"] == 64
        assert own["entries_per_bin"] > 1
        assert own["residual_max"] == float(state.residual(name).abs().max())
    assert stats["residual_max"] == max(p["residual_max"] for p in stats["parameters"].values())
    assert stats["compress_seconds"] > 0


def test_the_capacity_of_an_exchange_follows_the_headers_of_the_one_before_the_last():
    bucket = exchange.BucketExchange(
        [BucketParameter("weight", 1_000_000, 50, 0)],
        torch.zeros(1_000_000),
        exchange.Codec("layer", 2.0, None),
        dist.group.WORLD,
    )
    first = bucket.fixed + 500_000
    needs = [1000 * n for n in range(1, 40)]
    for n, need in enumerate(needs):
        bucket._read_reports()
        if n < 2:
            assert bucket.capacity.payload_bytes() == first
        else:
            entries = capacity.mean_and_deviations(
                needs[n - 1 - min(n - 1, 32, max(4, (n - 1) // 2)) : n - 1]
            )
            expected = bucket.fixed + (entries + 15) // 16 * 16
            assert bucket.capacity.payload_bytes() == expected
        # A rank whose callback is one exchange behind computes the same.
        bucket._unread.append(bucket.exchanges)
        bucket.exchanges += 1
        header = torch.tensor([bucket.fixed + need, 0])
        bucket._reports.append(exchange._Report(header, "bucket 0"))


def faults_seen_by_a_device(rank: int) -> None:
    """The decoder sets the status word and does not raise, as on a GPU."""
    ddp = wrap(GivenGradients())
    state = AdaCompState(ddp, bin_size=64)
    ddp.register_comm_hook(state, adacomp_hook)
    word = 1 << 40 | 8 << 32 | 3
    real = ops.decompress

    def decompress(*args: Any, status: torch.Tensor, **options: Any) -> None:
        real(*args, **options)
        if state._step == 3 and status[0] == 0:
            status[0] = word

    exchange.ops = type("ops", (), {**vars(ops), "decompress": staticmethod(decompress)})
    message = "bucket 0 .*: payload of rank 1: scale: got something else than was expected, at pl"
    for step in range(6):
        if step < 5:
            ddp(random_gradients(rank, step)).backward()
            seen = step >= 3
            for look in (state.check, state.stats, state.state_dict):
                with pytest.raises(RuntimeError, match=message) if seen else nullcontext():
                    look()
        else:  # two exchanges later, on all ranks alike
            with pytest.raises(RuntimeError, match=message):
                ddp(random_gradients(rank, step)).backward()


def test_a_fault_that_only_the_device_has_seen_is_raised_two_exchanges_later():
    run_ranks(faults_seen_by_a_device, 2)


# ---- configuration that differs between ranks ----------------------------------------------------

DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "scale": ({"scale": "bin"}, "scale: rank 0 has 'layer', rank 1 has 'bin'"),
    "factor": ({"threshold_factor": 3.0}, "threshold_factor: rank 0 has 2.0, rank 1 has 3.0"),
    "start_iter": ({"start_iter": 5}, "start_iter: rank 0 has 0, rank 1 has 5"),
    "dense_fallback": (
        {"dense_fallback": None},
        "dense_fallback: rank 0 has 2.0, rank 1 has None",
    ),
    "bin_size": ({"bin_size": {"third": 49}}, "bin_size of 'third': rank 0 has 500, rank 1 has 49"),
}


def differing(rank: int, options: dict[str, Any]) -> str:
    ddp = wrap(GivenGradients())
    state = AdaCompState(ddp, **(options if rank == 1 else {}))
    ddp.register_comm_hook(state, adacomp_hook)
    with pytest.raises(RuntimeError) as caught:
        ddp(random_gradients(rank, 0)).backward()
    return str(caught.value)


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_differ_in_an_option_all_say_which(what):
    # Fault 11.
    options, message = DIFFERENCES[what]
    for said in run_ranks(differing, 2, options):
        assert f"adacomp_torch: ranks differ in {message}" in said


def loading_on_rank_1_only(rank: int) -> str:
    ddp = wrap(GivenGradients())
    state = AdaCompState(ddp)
    ddp.register_comm_hook(state, adacomp_hook)
    loss = ddp(random_gradients(rank, 0))
    act = loss.backward if rank == 0 else lambda: state.load_state_dict(state.state_dict())
    with pytest.raises(RuntimeError) as caught:
        act()
    return str(caught.value)


def test_loading_on_one_rank_while_the_other_trains_is_said_by_both():
    for said in run_ranks(loading_on_rank_1_only, 2):
        assert "ranks differ in operation: rank 0 has 'backward', rank 1 has 'load_state" in said


def of_another_version(rank: int) -> str:
    import adacomp_torch.state as state_module

    if rank == 1:
        state_module.__version__ = "9.9"
    return differing(rank, {})


def test_ranks_with_different_versions_all_say_so():
    for said in run_ranks(of_another_version, 2):
        assert "ranks differ in adacomp_torch version" in said
        assert "rank 1 has '9.9'" in said


def corrupted_wire(rank: int) -> str:
    ddp = wrap(GivenGradients())
    state = AdaCompState(ddp, bin_size=64)
    ddp.register_comm_hook(state, adacomp_hook)
    ddp(random_gradients(rank, 0)).backward()
    gather = exchange.all_gather_single

    def damage(output: torch.Tensor, payload: torch.Tensor, **kwargs: Any):
        if rank == 1:
            payload[4] = 77
        return gather(output, payload, **kwargs)

    exchange.all_gather_single = damage
    try:
        with pytest.raises(RuntimeError) as caught:
            ddp(random_gradients(rank, 1)).backward()
    finally:
        exchange.all_gather_single = gather
    return str(caught.value)


def test_a_malformed_payload_raises_on_every_rank_naming_the_sender():
    # Fault 5.
    for said in run_ranks(corrupted_wire, 2):
        assert "payload of rank 1: version: expected 1, got 77" in said
        assert "adacomp_hook: bucket " in said
