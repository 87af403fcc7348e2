"""Models that ask for the device or whether they are compiled, look at constants, or contain what
torch.compile returns."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from support.forwards import DIM, VOCAB, Blocks


class AsksForTheDevice(Blocks):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        positions = torch.arange(ids.shape[1], device=x.device)[:, None]
        if x.device.type != "cpu" or x.is_cuda or not x.is_cpu:
            raise RuntimeError("the test runs on the CPU")
        for block in self.blocks:
            with torch.autocast(x.device.type, enabled=False):
                x = x + block(x).tanh() / (1 + positions)
        return self.out(x)


class InBf16Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            y = self.linear(x)
        return x + y.float().tanh()


class Autocasting(Blocks):
    """Blocks that compute in bf16 by themselves."""

    def __init__(self) -> None:
        super().__init__(*(InBf16Inside() for _ in range(4)))


class MaskedEncoder(nn.Module):
    """torch's encoder looks whether a mask is causal."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.out = nn.Linear(DIM, VOCAB)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(64))

    def forward(self, ids: Tensor) -> Tensor:
        tokens = ids.shape[1]
        return self.out(self.encoder(self.tokens(ids), self.mask[:tokens, :tokens]))


class CompiledBlocks(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = torch.compile(self.blocks[0], backend="eager")
        self.blocks[2].compile(backend="eager")
        self.act = torch.compile(torch.tanh, backend="eager")

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = x + self.act(block(x))
        return self.out(x)


class SkipsAFullMask(MaskedEncoder):
    """It looks at the batch to save work, unless it is compiled, as transformers does."""

    def forward(self, ids: Tensor) -> Tensor:
        padding, tokens = ids == 0, ids.shape[1]
        if not torch.compiler.is_compiling() and not padding.any():
            padding = None
        x = self.encoder(self.tokens(ids), self.mask[:tokens, :tokens], padding)
        return self.out(x)


class OneOfFloat64(Blocks):
    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM).double())


class ComplexWeight(Blocks):
    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, DIM))
        self.turns = nn.Parameter(torch.ones(DIM, dtype=torch.complex64))


class OneOfBf16(Blocks):
    """A block with a dtype of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, DIM), InBf16())


class InBf16(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.bfloat16()).float()
