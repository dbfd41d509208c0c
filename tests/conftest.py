"""GPU tests skip where there is no GPU, and fail instead if ADACOMP_REQUIRE_CUDA=1; those that
build networks skip without root, and fail instead if ADACOMP_REQUIRE_NETBENCH=1."""

from __future__ import annotations

import os

import network
import pytest
import torch

import adacomp_torch


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs_cuda(devices=1): runs on so many GPUs")


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("needs_cuda")
    if marker is None:
        return
    needed = marker.kwargs.get("devices", 1)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if adacomp_torch.has_cuda and count >= needed:
        return
    found = f"has_cuda is {adacomp_torch.has_cuda}, {count} GPU(s)"
    if os.environ.get("ADACOMP_REQUIRE_CUDA") == "1" and needed == 1:
        pytest.fail(f"expected {needed} GPU and a build with CUDA, got: {found}")
    pytest.skip(f"needs {needed} GPU(s) and a build with CUDA: {found}")


@pytest.fixture(scope="session")
def can_build_networks() -> None:
    reason = network.unavailable()
    if reason and os.environ.get("ADACOMP_REQUIRE_NETBENCH") == "1":
        pytest.fail(reason)
    if reason:
        pytest.skip(f"needs network namespaces: {reason}")
