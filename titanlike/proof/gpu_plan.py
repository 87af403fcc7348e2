"""What gpu_check runs: cells, each a command line (or two) of its own, chosen by the devices.

The layouts are those of `gpu_cells.yaml`, for each number of devices that is a power of two. In
those of the largest number every schedule is verified in fp32 and in bf16, with another ZeRO level
each time, and every second time with compiled blocks; the smaller meshes have a schedule or two.
What has kernels of its own on a GPU (documents, rings, experts, float8) is verified in the layouts
called `others`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from math import prod
from pathlib import Path

import yaml

from titanlike.config.schema import MESH_AXES

KINDS = {  # of checks -> what passes
    "verify": "the layout trains as one process in plain torch: schedules, ZeRO levels, bf16, compile",
    "determinism": "two runs with deterministic=true are equal to the last bit",
    "hangs": "a rank is stopped: the run ends in time and names it",
    "kills": "a rank is killed: the run restarts, and no number changes",
    "resumes": "what one layout saves another continues, in each mode of saving",
    "speed": "tokens/s, MFU and memory of 1B and 8B, with recommended settings",
}
# the backward: ZeRO 1 alone
_SPLIT = ("interleavedzerobubble", "zbvzerobubble", "dualpipev", "zbh1", "vhalf", "vmin")
_SCHEDULES = ("1f1b", "gpipe", "interleaved1f1b", "loopedbfs", *_SPLIT)


@dataclass(frozen=True)
class Cell:
    """One check: it passes or fails by itself."""

    kind: str  # of KINDS
    name: str  # what is different in it, for people
    overrides: tuple[str, ...]  # of train.py
    ranks: int
    timeout: float  # seconds
    then: tuple[str, ...] = ()  # more, of the command that goes on with the run


def plan(devices: int, kinds: tuple[str, ...] = tuple(KINDS), *, cpu: bool = False) -> list[Cell]:
    """The cells for so many devices of a machine; with `cpu` few and tiny ones, for as many
    ranks."""
    cells = _Cells(devices, cpu)
    return [cell for kind in KINDS if kind in kinds for cell in getattr(cells, kind)()]


class _Cells:
    """A method for each kind."""

    def __init__(self, devices: int, cpu: bool) -> None:
        text = Path(__file__).with_name("gpu_cells.yaml").read_text(encoding="utf-8")
        tables = yaml.safe_load(text)
        self._short: dict[str, str] = tables["short"]
        self._meshes: dict[int, list[str]] = tables["meshes"]
        self._sizes = [size for size in self._meshes if size <= devices]
        self._divided, self._others = (
            [words for size in self._sizes for words in tables[key].get(size, ())]
            for key in ("divided", "others")
        )
        self._divided_fast: str = tables["divided_fast"]
        self._cpu = cpu
        # up to two meshes of all devices: a pipeline, and data parallel
        meshes = self._meshes[self._sizes[-1]]
        piped = [mesh for mesh in meshes if "pp" in mesh]
        self._largest = [*piped[:1], *[mesh for mesh in meshes if mesh not in piped][:1]]

    def _cell(self, kind: str, name: str, words: str, timeout: float = 600.0) -> Cell:
        common = "" if kind == "speed" and not self._cpu else "BATCH"
        if common:
            common = f"TINY {common} device=cpu" if self._cpu else f"SMALL {common} device=auto"
        texts = self._in_full(f"{common} {words}").split()
        overrides = tuple({text.partition("=")[0]: text for text in texts}.values())
        ranks = prod(_axes(overrides).get(axis, 1) for axis in MESH_AXES)
        return Cell(kind, self._in_full(name) or "one process", overrides, ranks, timeout)

    def _in_full(self, words: str) -> str:
        return " ".join(self._short.get(word, word) for word in words.split())

    def verify(self) -> Iterator[Cell]:
        for words in self._schedules():
            yield self._cell("verify", words, words)
        ways = ("", " precision=bf16 compile=true", " compile=true tp_async=true")
        texts = [words + more for words in self._divided for more in ways[: 1 if self._cpu else 3]]
        for words in [] if self._cpu else self._others:
            both = [words, f"{words} precision=bf16"]
            texts += both[:1] if "precision=" in words else both
        for words in texts:
            yield self._cell("verify", words, words)

    def _schedules(self) -> Iterator[str]:
        for size in self._sizes:
            for mesh in self._meshes[size][: 2 if self._cpu else None]:
                axes = _axes(mesh.split())
                shards = axes.get("dp", 1) > axes.get("replicate", 1)
                compiled = cycle((False, True, True, False))
                schedules = _SCHEDULES if "pp" in axes else ("1f1b",) * (3 if shards else 1)
                if self._cpu or size < self._sizes[-1]:
                    few = ("1f1b", "zbvzerobubble")
                    schedules = tuple(name for name in schedules if name in few)[:2]
                for number, schedule in enumerate(schedules):
                    for turn, precision in enumerate(("fp32", "bf16")[: 1 if self._cpu else 2]):
                        words = [mesh] * bool(mesh)
                        words += [f"schedule={schedule}"] * ("pp" in axes)
                        if shards and not ("pp" in axes and schedule in _SPLIT):
                            words.append(f"fsdp.zero={1 + (number + turn) % 3}")
                        words += ["precision=bf16"] * (precision == "bf16")
                        words += ["compile=true"] * (not self._cpu and next(compiled))
                        yield " ".join(words)

    def determinism(self) -> Iterator[Cell]:
        for mesh in self._largest[: 1 if self._cpu else 2]:
            words = f"{mesh} deterministic=true precision=bf16 steps=6"
            yield self._cell("determinism", mesh, words)

    def hangs(self) -> Iterator[Cell]:
        limit = 4 if self._cpu else 30
        for mesh in filter(None, self._largest[: 1 if self._cpu else 2]):
            words = f"{mesh} steps=100000 launch.step_timeout={limit} launch.heartbeat=1"
            yield self._cell("hangs", f"{mesh}, the last rank is stopped", words)

    def kills(self) -> Iterator[Cell]:
        for mesh in filter(None, self._largest[: 1 if self._cpu else 2]):
            steps = 40 if self._cpu else 200  # the kill comes after the first checkpoint
            restarts = "launch.max_restarts=1 checkpoint.every=10"
            words = f"{mesh} deterministic=true steps={steps} {restarts}"
            yield self._cell("kills", f"{mesh}, the last rank is killed", words)

    def resumes(self) -> Iterator[Cell]:
        """Saved in each way by one process, or in one layout, and loaded in another."""
        meshes = self._largest
        pairs = [*dict.fromkeys([*(("", mesh) for mesh in meshes), (meshes[-1], "")])]
        for mode in ("async", "async_pinned", "async_process")[: 1 if self._cpu else 3]:
            common = f"lr=constant checkpoint.every=6 checkpoint.mode={mode}"
            for before, after in pairs[: 1 if self._cpu else None]:
                name = f"{before or 'one process'}, then {after or 'one process'}, {mode}"
                saved = self._cell("resumes", name, f"{before} {common} steps=6")
                resumed = self._cell("resumes", name, f"{after} {common} steps=12")
                ranks = max(saved.ranks, resumed.ranks)
                yield replace(saved, then=resumed.overrides, ranks=ranks)

    def speed(self) -> Iterator[Cell]:
        if self._cpu:
            words = f"{self._meshes[self._sizes[-1]][0]} steps=6"
            yield self._cell("speed", "tiny", words)
            return
        for size in sorted({1, self._sizes[-1]}):
            for mesh in self._meshes[size]:
                axes = _axes(mesh.split())
                pp, dp = axes.get("pp", 1), axes.get("dp", 1)
                layout = mesh + " schedule=interleaved1f1b" * (1 < pp < 8)
                count = 4 * pp if pp > 1 else 2  # microbatches, of one sequence
                batch = f"batch_size={count * dp} schedule.microbatches={count} steps=12"
                for model, least in (("llama3_1b", 1), ("llama3_8b", 4)):
                    cells = [
                        (f"{layout} activation_checkpoint={recomputed}", batch)
                        for recomputed in ("selective", "fit")[pp > 1 :]
                        if size >= least
                    ]
                    if size >= 2 and mesh == f"dp={size}":
                        half = f"batch_size={dp} schedule.microbatches=2 steps=12"
                        cells.insert(0, (f"dp={dp // 2} {self._divided_fast}", half))
                    for words, sizes in cells:
                        name = f"model={model} {words}"
                        if sizes == batch:
                            name = name.replace("activation_checkpoint", "recomputed")
                        yield self._cell(
                            "speed", name, f"model={model} {words} {sizes} BIG", 1200.0
                        )


def _axes(words: tuple[str, ...] | list[str]) -> dict[str, int]:
    pairs = (word.partition("=") for word in words)
    return {key: int(value) for key, _, value in pairs if value.isdigit()}
