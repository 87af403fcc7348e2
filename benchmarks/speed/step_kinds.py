"""What a training step's time is spent on, by kind: matmuls, attention, loss, casts, optimizer, ...

`kind_of` classifies an operator or kernel by its name and its callers; `seconds_by_kind` sums a
trace by kind, `draw` draws the result.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

CASTS, OTHERS, GAPS = "casts and copies", "element-wise and others", "gaps"

# The first match counts: names of the kernel, the operator, its callers, the phase of the step.
_KINDS = (
    ("optimizer", r"^Optimizer\.step|^optimizer$|_fused_(adam|sgd)"),
    ("collectives", r"^c10d|^nccl|^gloo|^_c10d_functional|^fsdp::|^record_param_comms"),
    (
        "matrix products",
        r"^aten::(mm|addmm|bmm|baddbmm|_scaled_mm|_grouped_mm|_scaled_grouped_mm|convolution\w*)$"
        r"|^titanlike::expert_linear|^nvjet|gemm|cutlass",
    ),
    ("attention", r"scaled_dot_product|attention|attn|^fmha|sdpa"),
    ("loss", r"Loss|^loss$|softmax|nll_loss|cross_entropy"),
    ("norm and clip", r"^(gradient )?norm$|^clip$|^norm and clip$|_foreach_norm"),
    (
        CASTS,
        r"^aten::(_foreach_)?(_to_)?(copy|clone)|^Mem(cpy|set)|_fused_(_to_copy|clone)(_\d+)?$",
    ),
    ("accumulation", r"AccumulateGrad$|^aten::_foreach_add_"),
)
KINDS = (*(kind for kind, _ in _KINDS), OTHERS)


def kind_of(names: Iterable[str]) -> str:
    """names: of a kernel or operator, and of its callers, in any order."""
    return KINDS[min(map(_rank, names))]


@cache
def _rank(name: str) -> int:
    """The index in KINDS of a name."""
    matches = (index for index, (_, of) in enumerate(_KINDS) if re.search(of, name))
    return next(matches, len(_KINDS))


# --- seconds of a trace ---------------------------------------------------------------------------


class _Open(NamedTuple):
    """A span of a thread that has not ended."""

    end: float
    rank: int
    own: list[float]  # its rank, and microseconds without its callees'


def seconds_by_kind(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of a step by KINDS and GAPS (when nothing runs), averaged over the steps that
    `ProfilerRanges` has named in a torch profiler's trace. Counts kernels, with their launches, or
    without kernels operators, less their callees."""
    spans = sorted((e for e in events if e.get("ph") == "X"), key=lambda e: (e["ts"], -e["dur"]))
    marks = [e for e in spans if e["cat"] == "user_annotation"]
    steps = [e for e in marks if re.fullmatch(r"step \d+", e["name"])]
    phases = [e for e in marks if _rank(e["name"]) < len(_KINDS)]
    threads: dict[Any, list[_Open]] = defaultdict(list)
    launches: dict[int, int] = {}  # correlation -> rank
    loss_nodes: set[int] = set()  # graph nodes of the loss
    operators: list[list[float]] = []
    kernels = []
    for event in spans:
        category, start, args = event["cat"], event["ts"], event.get("args", {})
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels.append(event)
            continue
        launch = category.endswith(("_runtime", "_driver"))
        if not launch and category not in ("cpu_op", "user_annotation"):
            continue
        stack = threads[event["tid"]]
        while stack and stack[-1].end <= start:
            stack.pop()
        # a GPU's backward runs in another thread: find the step's phase by time
        above = [stack[-1].rank] if stack else [_rank(e["name"]) for e in phases if _in(e, start)]
        rank = min(_rank(event["name"]), *above, len(_KINDS))
        node = args.get("Sequence number", -1)
        if args.get("Fwd thread id") and node in loss_nodes:  # the backward of what the loss called
            rank = min(rank, KINDS.index("loss"))
        elif rank == KINDS.index("loss") and node >= 0:
            loss_nodes.add(node)
        if not any(_in(step, start) for step in steps):
            continue
        entry = stack[-1].own if stack else [0.0, 0.0]
        if launch:
            launches[args.get("correlation", -1)] = rank
        elif category == "cpu_op":
            entry[1] -= event["dur"]
            entry = [rank, event["dur"]]
            operators.append(entry)
        stack.append(_Open(start + event["dur"], rank, entry))
    totals: dict[int, float] = defaultdict(float)
    busy = end = 0.0
    for event in kernels:  # streams may overlap
        begin, till = event["ts"], event["ts"] + event["dur"]
        rank = launches.get(event.get("args", {}).get("correlation"), -1)
        if rank >= 0:
            totals[min(rank, _rank(event["name"]))] += event["dur"]
            busy, end = busy + max(0.0, till - max(begin, end)), max(end, till)
    if not kernels:
        for rank, seconds in operators:
            totals[int(rank)] += seconds
        busy = sum(totals.values())
    scale = 1e-6 / max(1, len(steps))
    seconds = {kind: totals[rank] * scale for rank, kind in enumerate(KINDS)}
    return seconds | {GAPS: max(0.0, sum(e["dur"] for e in steps) - busy) * scale}


def _in(span: Mapping[str, Any], moment: float) -> bool:
    return span["ts"] <= moment < span["ts"] + span["dur"]


def draw(tables: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Write an .svg or .png file: for each loop a bar of its step's kinds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.6 + 0.6 * len(tables)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    lefts = dict.fromkeys(tables, 0.0)
    for index, kind in enumerate((*KINDS, GAPS)):
        widths = [1e3 * table[kind] for table in tables.values()]
        color = f"C{index}" if kind != GAPS else "#f1f1f1"
        bars = axes.barh([*tables], widths, left=[*lefts.values()], color=color, label=kind)
        axes.bar_label(bars, [f"{w:.0f}" if w >= 1 else "" for w in widths], label_type="center")
        lefts = {name: lefts[name] + w for name, w in zip(tables, widths, strict=True)}
    axes.set_xlabel("ms of a step")
    axes.invert_yaxis()
    figure.legend(loc="outside lower left", ncols=5, fontsize=8, frameon=False)
    figure.savefig(path)
