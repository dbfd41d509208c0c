"""The launcher of the multi-process tests must itself report every way in which a rank can fail."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from ranks import RanksFailedError, run_ranks


@pytest.fixture(autouse=True)
def no_process_is_left():
    yield
    assert multiprocessing.active_children() == []


def sum_of_ranks(rank: int, offset: int) -> tuple[int, float]:
    value = torch.tensor(float(rank + offset))
    dist.all_reduce(value)
    return rank, value.item()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values_come_back_in_rank_order(world_size):
    total = sum(range(10, 10 + world_size))
    assert run_ranks(sum_of_ranks, world_size, 10) == [(r, total) for r in range(world_size)]


def raise_on_rank_1_while_the_others_wait(rank: int) -> None:
    if rank == 1:
        raise ZeroDivisionError("the cause")
    dist.all_reduce(torch.zeros(1))


def test_a_raising_rank_is_named_first_and_ends_the_others():
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(raise_on_rank_1_while_the_others_wait, 3)
    text = str(caught.value)
    assert text.startswith("rank 1 failed first\nrank 1 raised:\n")
    assert "ZeroDivisionError: the cause" in text
    assert "in raise_on_rank_1_while_the_others_wait" in text
    assert all(f"rank {rank} " in text for rank in range(3))


def hang_on_rank_0(rank: int) -> None:
    if rank == 0:
        threading.Event().wait()


def test_a_hanging_rank_is_ended_and_its_stack_shown():
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(hang_on_rank_0, 2, timeout=5)
    text = str(caught.value)
    assert text.startswith("no end within 5 s")
    assert "rank 0 was still running" in text
    assert "in hang_on_rank_0" in text


def wait_in_a_collective(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.zeros(1))
    else:
        threading.Event().wait()


def test_a_rank_that_hangs_inside_a_collective_shows_its_stack_too():
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(wait_in_a_collective, 2, timeout=5)
    assert str(caught.value).count("in wait_in_a_collective") == 2


def exit_on_rank_1(rank: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()


def test_an_exiting_rank_is_reported_with_its_code():
    with pytest.raises(RanksFailedError, match="rank 1 exited with code 3"):
        run_ranks(exit_on_rank_1, 2)


def exit_quietly_on_rank_1(rank: int) -> None:
    if rank == 1:
        os._exit(0)


def test_a_rank_that_exits_with_code_0_before_it_returns_is_a_failure():
    with pytest.raises(RanksFailedError, match="rank 1 exited before it returned"):
        run_ranks(exit_quietly_on_rank_1, 2, timeout=10)


def die_on_rank_0(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank_is_reported_with_its_signal():
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(die_on_rank_0, 2)
    assert str(caught.value).startswith("rank 0 failed first\nrank 0 died of SIGKILL")
