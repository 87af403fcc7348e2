"""What gpu_check runs: cells, each a command line (or several) of its own, chosen by the devices.

Each number of devices that is a power of two has its meshes. In those of the largest number every
schedule is verified in fp32 and in bf16, with another ZeRO level each time, and every second time
with compiled blocks; the smaller meshes have a schedule or two. What has kernels of its own on a GPU
(documents, rings, experts, float8) is verified in the meshes of `_OTHERS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from math import prod

KINDS = ("verify", "determinism", "hangs", "kills", "resumes", "speed")
_SPLIT = (  # the backward: ZeRO 1 alone
    *("interleavedzerobubble", "zbvzerobubble", "dualpipev"),
    *("zbh1", "vhalf", "vmin"),
)
_SCHEDULES = ("1f1b", "gpipe", "interleaved1f1b", "loopedbfs", *_SPLIT)
# a model of sixteen blocks that a GPU's matrix products and attention kernels can take
_SMALL = (
    "model.hidden_size=256 model.num_attention_heads=4 model.num_key_value_heads=2 "
    "model.intermediate_size=704 model.num_hidden_layers=16 seq_len=256"
)
_TINY = (
    "model.hidden_size=32 model.num_attention_heads=4 model.num_key_value_heads=2 "
    "model.intermediate_size=64 model.num_hidden_layers=8 seq_len=16"
)
_BATCH = "batch_size=32 data=synthetic logger=none"
# recommended: blocks compiled, bf16, activations recomputed as far as memory asks for it
_FAST = "precision=bf16 compile=true loss=chunked_cross_entropy matmul_precision=high"
_BIG = f"{_FAST} seq_len=8192 data=synthetic data.vocab_size=128256 logger=none"
_MESHES = {  # by the number of devices: (pp, dp, replicate)
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (1, 2, 1), (1, 2, 2)],
    4: [(2, 2, 1), (4, 1, 1), (1, 4, 2)],
    8: [(4, 2, 1), (2, 4, 2), (8, 1, 1), (1, 8, 1)],
}
_TENSOR = {  # the same with tensor parallelism
    2: ["tp=2"],
    4: ["tp=4", "dp=2 tp=2", "pp=2 tp=2 schedule=zbvzerobubble"],
    8: ["pp=2 dp=2 tp=2 schedule=interleaved1f1b", "dp=4 replicate=2 tp=2"],
}
_DOCUMENTS = "data=text data.documents=true"
_MIXTURE = "model=moe_tiny model.moe_intermediate_size=256 model.num_local_experts=8"
_OTHERS = {  # by the number of devices, each in fp32 and in bf16 unless it says a precision
    1: [
        "activation_checkpoint=selective",
        "loss=chunked_cross_entropy",
        _DOCUMENTS,
        f"{_DOCUMENTS} compile=true",
        f"{_MIXTURE} activation_checkpoint=selective",
        "optimizer=muon",
        "precision=float8",
        "fsdp.cpu_offload=true",
    ],
    2: [
        *(f"cp=2 context_parallel={how}" for how in ("ulysses", "ring", "gather")),
        "cp=2 context_parallel=gather compile=true",
        *(f"cp=2 context_parallel={how} {_DOCUMENTS}" for how in ("ulysses", "gather")),
        *(f"{_MIXTURE} dp=2 ep=2 activation_checkpoint={how}" for how in ("none", "full")),
        f"{_MIXTURE} dp=2 ep=2 activation_checkpoint=selective compile=true",
        "dp=2 optimizer=muon",
        "dp=2 precision=float8 compile=true",
    ],
    4: [
        "dp=2 cp=2 context_parallel=ring fsdp.zero=3",
        "tp=2 cp=2 context_parallel=gather",
        f"{_MIXTURE} dp=2 tp=2 ep=2",
        f"{_MIXTURE} pp=2 dp=2 ep=2 schedule=zbh1 activation_checkpoint=selective",
    ],
    8: [f"{_MIXTURE} pp=2 dp=2 cp=2 ep=4 schedule=interleaved1f1b"],
}


@dataclass(frozen=True)
class Cell:
    """One check: it passes or fails by itself."""

    kind: str  # of KINDS
    name: str  # what is different in it, for people
    overrides: tuple[str, ...]  # of train.py
    ranks: int
    timeout: float  # seconds
    then: tuple[str, ...] = ()  # more, of the command that goes on with the run


def plan(devices: int, kinds: tuple[str, ...] = KINDS, *, cpu: bool = False) -> list[Cell]:
    """The cells for so many devices of a machine; with `cpu` few and tiny ones, for as many ranks."""
    sizes = [size for size in _MESHES if size <= devices]
    cells: list[Cell] = []
    makers = {
        "verify": _verify,
        "determinism": _determinism,
        "hangs": _hangs,
        "kills": _kills,
        "resumes": _resumes,
        "speed": _speed,
    }
    for kind in KINDS:
        if kind in kinds:
            cells += makers[kind](sizes, cpu)
    return cells


def _cell(kind: str, name: str, words: str, cpu: bool, timeout: float = 600.0) -> Cell:
    common = f"{_TINY if cpu else _SMALL} {_BATCH} device={'cpu' if cpu else 'auto'}"
    texts = (*(common if kind != "speed" or cpu else "").split(), *words.split())
    overrides = tuple({text.partition("=")[0]: text for text in texts}.values())
    axes = ("pp=", "dp=", "cp=", "tp=")
    sizes = [int(word.partition("=")[2]) for word in overrides if word.startswith(axes)]
    return Cell(kind, name, overrides, prod(sizes), timeout)


def _mesh(pp: int, dp: int, replicate: int) -> str:
    words = [f"pp={pp}" * (pp > 1), f"dp={dp}" * (dp > 1), f"replicate={replicate}"]
    return " ".join(filter(None, words[: 3 if replicate > 1 else 2]))


def _verify(sizes: list[int], cpu: bool) -> Iterator[Cell]:
    precisions = ("fp32", "bf16")
    for size in sizes:
        for pp, dp, replicate in _MESHES[size][: 2 if cpu else None]:
            shards = dp > replicate
            compiled = cycle((False, True, True, False))
            schedules = _SCHEDULES if pp > 1 else ("1f1b",) * (3 if shards else 1)
            if cpu or size < sizes[-1]:
                schedules = [s for s in schedules if s in ("1f1b", "zbvzerobubble")][:2]
            for number, schedule in enumerate(schedules):
                for turn, precision in enumerate(precisions[: 1 if cpu else None]):
                    words = [_mesh(pp, dp, replicate)]
                    words += [f"schedule={schedule}"] * (pp > 1)
                    if shards and not (pp > 1 and schedule in _SPLIT):
                        words.append(f"fsdp.zero={1 + (number + turn) % 3}")
                    words += ["precision=bf16"] * (precision == "bf16")
                    words += ["compile=true"] * (not cpu and next(compiled))
                    text = " ".join(filter(None, words))
                    yield _cell("verify", text or "one process", text, cpu)
    for words in (words for size in sizes for words in _TENSOR.get(size, ())):
        ways = ("", " precision=bf16 compile=true", " compile=true tp_async=true")
        for more in ways[: 1 if cpu else 3]:
            yield _cell("verify", words + more, words + more, cpu)
    for words in (words for size in sizes for words in _OTHERS[size] if not cpu):
        for more in ("",) if "precision=" in words else ("", " precision=bf16"):
            yield _cell("verify", words + more, words + more, cpu)


def _largest(sizes: list[int]) -> list[str]:
    """Up to two meshes of all devices: pipelines, and data parallel."""
    meshes = _MESHES[sizes[-1]]
    chosen = [
        next((m for m in meshes if m[0] > 1), None),
        next((m for m in meshes if m[0] == 1), None),
    ]
    return [_mesh(*mesh) for mesh in chosen if mesh is not None]


def _determinism(sizes: list[int], cpu: bool) -> Iterator[Cell]:
    for mesh in _largest(sizes)[: 1 if cpu else 2]:
        words = f"{mesh} deterministic=true precision=bf16 steps=6".strip()
        yield _cell("determinism", mesh or "one process", words, cpu)


def _hangs(sizes: list[int], cpu: bool) -> Iterator[Cell]:
    limit = 4 if cpu else 30
    for mesh in filter(None, _largest(sizes)[: 1 if cpu else 2]):
        words = f"{mesh} steps=100000 launch.step_timeout={limit} launch.heartbeat=1"
        yield _cell("hangs", f"{mesh}, the last rank is stopped", words, cpu)


def _kills(sizes: list[int], cpu: bool) -> Iterator[Cell]:
    for mesh in filter(None, _largest(sizes)[: 1 if cpu else 2]):
        steps = 40 if cpu else 200  # the kill comes after the first checkpoint
        words = f"{mesh} deterministic=true steps={steps} launch.max_restarts=1 checkpoint.every=10"
        yield _cell("kills", f"{mesh}, the last rank is killed", words, cpu)


def _resumes(sizes: list[int], cpu: bool) -> Iterator[Cell]:
    """Saved in each way by one process, or in one layout, and loaded in another."""
    meshes = _largest(sizes)
    pairs = [*dict.fromkeys([*(("", mesh) for mesh in meshes), (meshes[-1], "")])]
    for mode in ("async", "async_pinned", "async_process")[: 1 if cpu else 3]:
        common = f"lr=constant checkpoint.every=6 checkpoint.mode={mode}"
        for before, after in pairs[: 1 if cpu else None]:
            name = f"{before or 'one process'}, then {after or 'one process'}, {mode}"
            saved = _cell("resumes", name, f"{before} {common} steps=6", cpu)
            resumed = _cell("resumes", name, f"{after} {common} steps=12", cpu)
            yield replace(saved, then=resumed.overrides, ranks=max(saved.ranks, resumed.ranks))


def _speed(sizes: list[int], cpu: bool) -> Iterator[Cell]:
    if cpu:
        yield _cell("speed", "tiny", f"{_mesh(*_MESHES[sizes[-1]][0])} steps=6", cpu)
        return
    for size in sorted({1, sizes[-1]}):
        for pp, dp, replicate in _MESHES[size]:
            layout = _mesh(pp, dp, replicate)
            layout += " schedule=interleaved1f1b" * (1 < pp < 8)
            microbatches = 4 * pp if pp > 1 else 2  # of one sequence
            batch = f"batch_size={microbatches * dp} schedule.microbatches={microbatches} steps=12"
            for model, least in (("llama3_1b", 1), ("llama3_8b", 4)):
                if size >= 2 and pp == 1 and dp == size and replicate == 1:
                    tp = f"dp={dp // 2} tp=2 tp_async=true activation_checkpoint=selective"
                    words = f"model={model} {tp} batch_size={dp} schedule.microbatches=2 steps=12"
                    yield _cell("speed", f"model={model} {tp}", f"{words} {_BIG}", cpu, 1200.0)
                for recomputed in ("selective", "fit")[pp > 1 :]:
                    if size >= least:
                        chosen = f"model={model} {layout} activation_checkpoint={recomputed}"
                        name = " ".join(chosen.split()).replace(
                            "activation_checkpoint", "recomputed"
                        )
                        yield _cell("speed", name, f"{chosen} {batch} {_BIG}", cpu, 1200.0)
