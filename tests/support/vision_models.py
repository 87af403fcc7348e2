"""Vision models as people write them, synthetic images to train them on, and configs of both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.models import tiny
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.optimizers.sgd import Sgd
from titanlike.core.config.schema import Config
from titanlike.core.data.sources import Data

IMAGES = Custom(f"{__name__}.images", {"size": 8})
MASKS = Custom(f"{__name__}.images", {"size": 8, "masks": True})


def of_images(model: str, pp: int, dp: int, schedule: Any = "1f1b", **changes: Any) -> Config:
    args = changes.pop("args", {})
    data = MASKS if model == "UNet" else IMAGES
    # SGD: Adam's first update does not depend on the gradient's scale
    return tiny(
        pp=pp,
        dp=dp,
        schedule=schedule,
        model=Custom(f"{__name__}.{model}", args),
        **{"data": data, "seq_len": 1, "optimizer": Sgd(), **changes},
    )


class Images:
    """Noise with a bright square; the target is its quadrant, or its mask."""

    def __init__(self, count: int, size: int, masks: bool, part: int) -> None:
        self.count, self.size, self.masks, self.part = count, size, masks, part

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(2 * index + self.part)
        # not centred, so that a batch norm's running mean is not 0
        image = 3 + torch.randn(3, self.size, self.size, generator=generator) * (1 + index % 3)
        quarter = int(torch.randint(4, (), generator=generator))
        half = self.size // 2
        row, column = quarter // 2 * half, quarter % 2 * half
        image[:, row : row + half, column : column + half] += 2
        if not self.masks:
            return {"inputs": image, "targets": torch.tensor([quarter])}
        mask = torch.zeros(self.size, self.size, dtype=torch.int64)
        mask[row : row + half, column : column + half] = 1
        return {"inputs": image, "targets": mask}


def images(size: int, seq_len: int, masks: bool = False) -> Data:
    train, validation = (Images(64, size, masks, part) for part in (0, 1))
    return Data(train, validation, 4, "synthetic images")


class UNet(nn.Module):
    """A U-Net with three skip connections: images [B, 3, H, W] -> [B, H, W, 2]."""

    def __init__(self, *, width: int = 4) -> None:
        super().__init__()
        sizes = [width, 2 * width, 2 * width]
        self.down = nn.ModuleList(
            self._block(3 if i == 0 else sizes[i - 1], size) for i, size in enumerate(sizes)
        )
        self.pool = nn.MaxPool2d(2)
        self.bottom = self._block(sizes[-1], sizes[-1])
        self.up = nn.ModuleList(
            self._block(sizes[i] + sizes[min(i + 1, 2)], sizes[i]) for i in reversed(range(3))
        )
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for block in self.up:
            x = nn.functional.interpolate(x, scale_factor=2)
            x = block(torch.cat([skips.pop(), x], 1))
        return self.head(x).movedim(1, -1)


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut; torchvision's names."""

    def __init__(self, inputs: int, outputs: int, stride: int, momentum: float | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs, momentum=momentum)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs, momentum=momentum)
        self.downsample = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += shortcut
        return self.relu(out)


class ResNet(nn.Module):
    """Images [B, 3, H, W] -> logits [B, 4]. momentum: of the blocks' batch norms."""

    def __init__(self, *, width: int = 4, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width, affine=False)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = self._layer(width, width, 1, momentum)
        self.layer2 = self._layer(width, 2 * width, 2, momentum)
        self.layer3 = self._layer(2 * width, 2 * width, 2, momentum)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2 * width, 4)

    @staticmethod
    def _layer(inputs: int, outputs: int, stride: int, momentum: float | None) -> nn.Module:
        return nn.Sequential(
            BasicBlock(inputs, outputs, stride, momentum), BasicBlock(outputs, outputs, 1, momentum)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Residual(nn.Module):
    """A block with dropout and batch norm, checkpointed if `recompute`."""

    def __init__(self, width: int, dropout: float, recompute: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.dropout = nn.Dropout(dropout)
        self.recompute = recompute

    def _inner(self, x: Tensor) -> Tensor:
        return self.dropout(torch.relu(self.norm(self.conv(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and self.training:
            return x + checkpoint(self._inner, x, use_reentrant=False)
        return x + self._inner(x)


class Tower(nn.Module):
    """Residual blocks. One batch norm is called twice in a forward."""

    def __init__(
        self, *, width: int = 4, layers: int = 4, dropout: float = 0.0, recompute: bool = False
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.twice = nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList(Residual(width, dropout, recompute) for _ in range(layers))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(torch.relu(self.twice(self.stem(x))))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Late(nn.Module):
    """Every block uses the first one's output; the head uses the image again."""

    def __init__(self, *, width: int = 4, layers: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(layers))
        self.head = nn.Linear(width + 3, 4)

    def forward(self, image: Tensor) -> Tensor:
        x = first = torch.relu(self.stem(image))
        for block in self.blocks:
            x = torch.tanh(block(x)) + first
        return self.head(torch.cat([x, image], 1).mean((2, 3)))


def sequential(width: int = 4) -> nn.Sequential:
    """An nn.Sequential, as torch's old Pipe took."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * width, 4),
    )
