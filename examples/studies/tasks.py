"""What the studies train: data, models, batches, tests. Everything is small enough for one core."""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.append(str(Path(__file__).parent.parent))

from train_cnn import missing_data, read_images
from train_lstm import TEXT, random_batch, read_text

LENGTH = 64  # characters per sequence
CIFAR_HELP = (
    "CIFAR-10 for --data: https://www.cs.toronto.edu/~kriz/cifar.html, the binary version unpacked "
    "(data_batch_1.bin ...), or images as train/CLASS/* and test/CLASS/* in a folder or zip file; "
    "a subset will do"
)


@dataclass(frozen=True)
class Task:
    """`sample(count, generator)` and `test` give inputs and targets; a model's logits are
    [..., classes] for targets [...]."""

    make_model: Callable[[], nn.Module]
    sample: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    test: list[tuple[Tensor, Tensor]]

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """Mean test loss in nats and share of wrong answers."""
        loss, wrong, count = 0.0, 0, 0
        for x, y in self.test:
            logits = model(x)
            loss += float(loss_of(logits, y)) * y.numel()
            wrong += int((logits.argmax(-1) != y).sum())
            count += y.numel()
        return loss / count, wrong / count


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def make_task(name: str, cifar: Path | None, fashion: Path) -> Task:
    """`name`: one of cifar16, cifar32, fashion14, fashion28 (a CNN on images of that width),
    mlp14, lstm, transformer. Raises SystemExit with one sentence if its data is not there."""
    if name in ("lstm", "transformer"):
        return _text_task(CharLSTM if name == "lstm" else CharTransformer)
    width = int(name[-2:])
    if name.startswith("cifar"):
        train, test = _cifar(cifar)
    else:
        train, test = _fashion(fashion)
    train, test = _shrink(*train, width), _shrink(*test, width)
    channels = train[0].shape[1]
    make_model = (lambda: mlp(width)) if name.startswith("mlp") else lambda: cnn(channels, width)
    epochs = _Epochs(*train)
    batches = list(zip(test[0].split(500), test[1].split(500), strict=True))
    return Task(make_model, epochs.sample, batches)


# ---- images --------------------------------------------------------------------------------------

Images = tuple[Tensor, Tensor]  # uint8 [count, channels, height, width], int64 [count]


@cache
def _fashion(folder: Path) -> tuple[Images, Images]:
    if missing := missing_data(folder):
        sys.exit(f"error: --fashion: {missing}")
    parts = [read_images(folder, part, torch.device("cpu")) for part in ("train", "test")]
    train, test = ((part.pixels, part.labels) for part in parts)
    return train, test


@cache
def _cifar(where: Path | None) -> tuple[Images, Images]:
    if where is None or not where.exists():
        sys.exit(
            f"error: --data: expected a folder or zip file of CIFAR-10, got {where}. {CIFAR_HELP}"
        )
    if (where / "test_batch.bin").is_file():
        batches = sorted(where.glob("data_batch_*.bin"))
        return _cifar_binary(batches), _cifar_binary([where / "test_batch.bin"])
    root: Path | zipfile.Path = where if where.is_dir() else zipfile.Path(where)
    return _image_folder(root / "train"), _image_folder(root / "test")


def _cifar_binary(paths: list[Path]) -> Images:
    content = bytearray(b"".join(path.read_bytes() for path in paths))
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()


def _entries(folder: Path | zipfile.Path) -> list[Path | zipfile.Path]:
    entries: list[Path | zipfile.Path] = list(folder.iterdir())
    return sorted(entries, key=lambda entry: entry.name)


def _image_folder(folder: Path | zipfile.Path) -> Images:
    from PIL import Image  # matplotlib brings it along

    pixels, labels = [], []
    for label, name in enumerate(_entries(folder)):
        for path in _entries(name):
            image = Image.open(io.BytesIO(path.read_bytes())).convert("RGB")
            content = bytearray(image.tobytes())
            pixels.append(torch.frombuffer(content, dtype=torch.uint8).view(32, 32, 3))
            labels.append(label)
    if not pixels:
        sys.exit(f"error: --data: expected images as {folder}/CLASS/*, found none. {CIFAR_HELP}")
    return torch.stack(pixels).permute(0, 3, 1, 2), torch.tensor(labels)


def _shrink(pixels: Tensor, labels: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Means over squares of pixels, with mean 0 and deviation 1 over all images."""
    inputs = functional.avg_pool2d(pixels.float() / 255, pixels.shape[-1] // width)
    mean, deviation = (0.286, 0.353) if inputs.shape[1] == 1 else (0.473, 0.251)
    return (inputs - mean) / deviation, labels


class _Epochs:
    """Batches without replacement: every image once before any comes again."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.labels = inputs, labels
        self.order = torch.empty(0, dtype=torch.int64)

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        while len(self.order) < count:
            self.order = torch.cat(
                [self.order, torch.randperm(len(self.labels), generator=generator)]
            )
        chosen, self.order = self.order[:count], self.order[count:]
        return self.inputs[chosen], self.labels[chosen]


def cnn(channels: int, width: int) -> nn.Module:
    """Three 5x5 convolutions, one fully connected layer: the shape of the paper's CIFAR10-CNN."""
    layers: list[nn.Module] = []
    for channels_in, channels_out in ((channels, 32), (32, 32), (32, 64)):
        layers += [nn.Conv2d(channels_in, channels_out, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * (width // 8) ** 2, 10))


def mlp(width: int) -> nn.Module:
    """Five hidden layers of 512."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (width**2, 512, 512, 512, 512):
        layers += [nn.Linear(inputs, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, 10))


# ---- text ----------------------------------------------------------------------------------------


def _text_task(make: Callable[[int], nn.Module]) -> Task:
    text = read_text(TEXT)

    def sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        codes = random_batch(text.train, count, LENGTH, generator)
        return codes[:, :-1], codes[:, 1:]

    windows = 400  # of 64 characters each, evenly over the validation text
    starts = torch.linspace(0, len(text.validation) - LENGTH - 1, windows).long()
    codes = text.validation[starts[:, None] + torch.arange(LENGTH + 1)]
    test = [(part[:, :-1], part[:, 1:]) for part in codes.split(100)]
    return Task(lambda: make(text.vocabulary), sample, test)


class CharLSTM(nn.Module):
    """Two layers of 128 units."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 64)
        self.lstm = nn.LSTM(64, 128, num_layers=2, batch_first=True)
        self.linear = nn.Linear(128, vocabulary)

    def forward(self, codes: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(codes))
        logits: Tensor = self.linear(hidden)
        return logits


class CharTransformer(nn.Module):
    """Two pre-norm layers of width 96, 4 heads, learned positions."""

    def __init__(self, vocabulary: int, width: int = 96, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, vocabulary)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        hidden = self.embedding(codes) + self.position[: codes.shape[1]]
        logits: Tensor = self.linear(self.norm(self.blocks(hidden)))
        return logits


class _Block(nn.Module):
    HEADS = 4

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (
            self.qkv(self.norm1(x)).view(batch, length, 3, self.HEADS, -1).permute(2, 0, 3, 1, 4)
        )
        q, k, v = heads.unbind()
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = self.feed(self.norm2(mixed))
        return mixed + fed
