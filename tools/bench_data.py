"""How fast input is, beside what the default model takes: `python tools/bench_data.py`.

Tokens a second of the loader alone for each kind of data and number of workers; seconds to open a
corpus of many files, in the cache or not; and tokens a second of the default model's training step
in plain torch on this machine.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout that is not installed

from titanlike.core.config.groups.data import MixtureData, SyntheticData, TextData, TokenData  # noqa: E402
from titanlike.core.config.groups.user_code import Custom  # noqa: E402
from titanlike.core.config.program import argument_parser  # noqa: E402
from titanlike.core.config.schema import Config  # noqa: E402
from titanlike.core.data.loader import batches  # noqa: E402
from titanlike.core.data.registry import open_data  # noqa: E402
from titanlike.core.metrics import units  # noqa: E402
from titanlike.core.metrics.console import Console  # noqa: E402
from titanlike.core.models.registry import build_model  # noqa: E402
from titanlike.formats.tokenize_corpus import Settings, tokenize_corpus_files  # noqa: E402

_MIN_STEPS = 20  # of a measurement


def main(argv: list[str] | None = None) -> int:
    """The exit code: 1 if any kind of data is slower than `--least` times the model, with any
    number of workers."""
    parser = argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each (default: %(default)s)")
    parser.add_argument("--workers", default="0,1,4", help="of the loader (default: %(default)s)")
    parser.add_argument(
        "--files", type=int, default=10_000, help="of a corpus (default: %(default)s)"
    )
    text = "times the model's tokens a second that input must give (default: %(default)s)"
    parser.add_argument("--least", type=float, default=5.0, help=text)
    arguments = parser.parse_args(argv)
    console = Console(steps=1)
    workers = [int(word) for word in arguments.workers.split(",")]
    with tempfile.TemporaryDirectory(prefix="titanlike-bench-") as folder:
        opened, configs = _corpora(Path(folder), arguments.files)
        model = _model_rate(arguments.seconds)
        rows: list[list[object]] = []
        least = float("inf")
        for name, config in configs.items():
            rates = [_rate(config, count, arguments.seconds) for count in workers]
            least = min(least, min(rates) / model)
            rows.append([name, *map(units.count, rates), f"{rates[0] / model:.0f}"])
    heads = [f"{count} workers" for count in workers]
    console.table("", ["tokens/s", *heads, "times the model"], rows)
    console.line()
    console.fields([("default model", f"{units.count(model)} tokens/s, a training step"), *opened])
    return int(least < arguments.least)


def _corpora(folder: Path, files: int) -> tuple[list[tuple[str, str]], dict[str, Config]]:
    """(seconds of what is done once, a config of each kind of data)."""
    text = folder / "text"
    for number in range(files):
        part = text / f"{number // 1000:03d}"
        part.mkdir(parents=True, exist_ok=True)
        (part / f"{number:06d}.txt").write_text(f"document {number}: " + "some words of it. " * 20)
    config = Config(data=TextData(path=str(text), cache=str(folder / "cache")))
    tokens = replace(config, data=TokenData(path=[str(folder / "a"), str(folder / "b")]))
    opened = [
        ("data=text, tokenized", f"{_seconds(open_data, config):.2f} s, {files:,} files"),
        ("data=text, in the cache", f"{_seconds(open_data, config):.2f} s, {files:,} files"),
    ]
    parts = folder / "a", folder / "b"
    one_process = [
        _seconds(tokenize_corpus_files, text, part, Settings("bytes"), 1) for part in parts
    ]
    each = f"{sum(one_process) / 2:.2f} s, {files:,} files, one process"
    opened += [("titanlike tokenize", each)]
    opened += [("data=tokens", f"{_seconds(open_data, tokens):.2f} s")]
    weights = {"a": 0.7, "b": 0.3}
    sources = {name: {"path": str(folder / name), "weight": w} for name, w in weights.items()}
    return opened, {
        "text": config,
        "tokens": tokens,
        "mixture": replace(config, data=MixtureData(sources=sources)),
        "synthetic": replace(config, data=SyntheticData()),
    }


def _seconds(function: Callable[..., object], *args: object) -> float:
    begin = time.perf_counter()
    function(*args)
    return time.perf_counter() - begin


def _rate(config: Config, workers: int, seconds: float) -> float:
    """Tokens a second of the batches of one process, after the first."""
    data: Any = config.data
    if hasattr(data, "workers"):
        config = replace(config, data=replace(data, workers=workers))
    with warnings.catch_warnings():  # of more workers than cores, which is measured
        warnings.filterwarnings("ignore", "This DataLoader will create")
        stream = batches(open_data(config).train, config, dp_rank=0)
        next(stream)
    return _steps(stream, seconds) * config.batch_size * config.seq_len


def _steps(stream: Iterator[object], seconds: float) -> float:
    begin, count = time.perf_counter(), 0
    while (now := time.perf_counter()) < begin + seconds or count < _MIN_STEPS:
        next(stream)
        count += 1
    return count / (now - begin)


def _model_rate(seconds: float) -> float:
    """Tokens a second of forward, backward and update of the default model, in plain torch."""
    config = Config()
    model = build_model(Custom("llama", {"vocab_size": 257}), "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(257, (config.batch_size, config.seq_len + 1))

    def train() -> Iterator[None]:
        while True:
            logits = model(ids[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield

    stream = train()
    next(stream)
    return _steps(stream, seconds) * config.batch_size * config.seq_len


if __name__ == "__main__":
    sys.exit(main())
