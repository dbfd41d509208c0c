"""The models, with random inputs: small batches, so that compute is small but real."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Workload:
    """`make()` builds the model, `draw(generator)` a batch: inputs and int64 class labels."""

    description: str
    make: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], tuple[Tensor, Tensor]]

    def loss(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(cast(Tensor, model(inputs)), labels)


def _mlp() -> nn.Module:
    widths = (1024, 2048, 2048, 2048, 512)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _mlp_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(8, 1024, generator=generator)
    return inputs, torch.randint(512, (8,), generator=generator)


def _resnet18() -> nn.Module:
    # Not an import: torchvision is optional, and has no type hints.
    model: nn.Module = importlib.import_module("torchvision.models").resnet18()
    return model


def _resnet_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(2, 3, 64, 64, generator=generator)
    return inputs, torch.randint(1000, (2,), generator=generator)


VOCABULARY = 4096


class WordLSTM(nn.Module):
    """[batch, length] int64 words to [batch * length, VOCABULARY] logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 256)
        self.lstm = nn.LSTM(256, 512, num_layers=2, batch_first=True)
        self.head = nn.Linear(512, VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(words))
        return cast(Tensor, self.head(hidden)).flatten(0, 1)


def _lstm_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    words = torch.randint(VOCABULARY, (2, 17), generator=generator)
    return words[:, :-1].contiguous(), words[:, 1:].flatten()


WORKLOADS = {
    "mlp": Workload("MLP, 11.5 M parameters", _mlp, _mlp_batch),
    "resnet18": Workload("ResNet-18, 11.7 M parameters", _resnet18, _resnet_batch),
    "lstm": Workload("2-layer LSTM, 6.8 M parameters", WordLSTM, _lstm_batch),
}


def missing(name: str) -> str | None:
    """Why this model cannot be built here, in one sentence, or None."""
    if name == "resnet18" and importlib.util.find_spec("torchvision") is None:
        return "resnet18: torchvision is not there: install it, or leave this model out"
    return None
