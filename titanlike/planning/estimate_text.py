"""Format an estimate as text for a terminal, as plain data for programs, and as a chart."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from titanlike.core.metrics import units
from titanlike.core.metrics.console import table_lines
from titanlike.planning.estimate import Estimate
from titanlike.planning.known_hardware import axes, link_of
from titanlike.planning.stage_times import TRAFFIC
from titanlike.watch.chart import Chart, MemoryCurve, Span
from titanlike.watch.chart_picture import inline_svg

_GIB = 2**30
_FEW = 8  # with at most so many pipeline ranks a table has an additional column
_PARTS = {  # field of MemoryParts -> title
    "weights": "weights",
    "optimizer": "optim",
    "gradients": "grads",
    "activations": "activ",
    "queued": "queued",
    "messages": "msgs",
    "gathered": "gather",
    "temporary": "peak",
}
_EXACT_AXES = {
    "reduced": ("all-to-alls of gradients", "shard"),
    "replicated": ("sums of gradients of replicas", "replicate"),
    "expert_reduced": ("all-to-alls of experts", "expert_shard"),
}


class ShownEstimate(Estimate):
    """An estimate for notebooks, displayed as the tables and the picture of `titanlike plan`."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(as_text(self, width=100))}</pre>{self._repr_svg_()}"

    def _repr_svg_(self) -> str:
        return inline_svg(chart_of(self))


def as_data(estimate: Estimate, warning: str = "") -> dict[str, Any]:
    """The estimate as a JSON object. Seconds, bytes, fractions of 1."""
    config = estimate.config
    ranks = range(config.pp)
    return {
        "step_seconds": estimate.step_seconds,
        f"{estimate.plan.unit}_per_second_per_gpu": estimate.speed,
        "interval": _interval(estimate),
        "mfu": estimate.mfu,
        "bubble": estimate.simulation.bubble,
        "memory_bytes": estimate.memory_bytes,
        "fits": estimate.fits,
        "device_memory_bytes": estimate.hardware.usable,
        "ranks_per_device": estimate.shared_by,
        "seconds": estimate.seconds,
        "gpu_hours": estimate.seconds * config.world_size / 3600,
        "hardware": estimate.hardware.title,
        "mesh": {**axes(config), "cp": config.cp, "ep": config.ep},
        "schedule": config.schedule.name,
        "microbatches": estimate.plan.microbatches,
        "zero": estimate.plan.zero,
        "recomputed_blocks": estimate.plan.recomputed.count,
        "ranks": [
            {
                "rank": rank,
                "stages": list(estimate.order.local(rank)),
                "parameters": sum(map(estimate.plan.stage_numel, estimate.order.local(rank))),
                "memory": vars(estimate.memory[rank]),
                "expert_bytes": estimate.plan.memory().of_experts(rank),
                "shares": estimate.shares(rank),
                "traffic_bytes": estimate.traffic(rank),
            }
            for rank in ranks
        ],
        "stages": [
            {
                "stage": stage,
                "rank": estimate.order.stage_to_rank[stage],
                **times.as_data(),
                "units": estimate.plan.stages[stage],
                "recomputed": estimate.plan.recomputed.blocks[stage],
            }
            for stage, times in enumerate(estimate.times.stages)
        ],
        "waits": [
            {"rank": rank, "stage": stage, "share": seconds / estimate.step_seconds}
            for (rank, stage), seconds in sorted(estimate.simulation.waits.items())
        ],
        "warning": warning,
        "estimated": estimate.times.estimated or estimate.memory_unknown,
    }


def as_text(estimate: Estimate, warning: str = "", width: int = 80) -> str:
    parts = [
        _summary(estimate, warning, width),
        _memory_table(estimate, width),
        _time_table(estimate, width),
        _traffic_table(estimate, width),
        _bounds(estimate, width),
    ]
    if reason := estimate.times.estimated or estimate.memory_unknown:
        text = f"guessed by the number of parameters, and without activations: {reason}"
        parts.append("\n".join(textwrap.wrap(text, width)))
    return "\n\n".join(part for part in parts if part)


def mesh_text(estimate: Estimate) -> str:
    config = estimate.config
    names = ("pp", "dp", "cp", "tp", "ep", "replicate")
    sizes = [(n, getattr(config, n)) for n in names]
    return " ".join(f"{n}={size}" for n, size in sizes if size > 1) or "one device"


def _summary(estimate: Estimate, warning: str, width: int) -> str:
    config, plan, device = estimate.config, estimate.plan, estimate.hardware
    rows = plan.memory().tokens * config.cp // config.seq_len
    blocks = sum(unit.block for unit in plan.model_graph.units)
    many = units.microbatches(plan.microbatches)
    layout = f"{config.schedule.name}, " if config.pp > 1 else ""
    counts_tokens, batch = plan.unit == "tokens", f"{config.batch_size} samples"
    batch = f"{units.count(estimate.tokens)} tokens" if counts_tokens else batch
    layout += f"{many} of {rows} {f'x {config.seq_len} ' if counts_tokens else ''}{plan.unit}"
    layout += f", ZeRO {plan.zero}"
    if plan.recomputed.count:
        layout += f", {plan.recomputed.count} of {blocks} blocks recomputed"
    speed = f"{estimate.speed:,.0f} {plan.unit}/s a device"
    speed += "" if estimate.mfu is None else f", MFU {estimate.mfu:.1%}"
    room = f"{units.size(estimate.fullest)} of {units.size(device.usable)} on the fullest rank"
    days = units.duration(estimate.seconds)
    if estimate.seconds >= 2 * 86400:
        days = f"{estimate.seconds / 86400:.1f} days"
    hours = estimate.seconds * config.world_size / 3600
    lines = [
        f"{config.model.name}, {units.count(plan.whole_numel)} parameters, on "
        f"{config.world_size:,} x {device.title}: {mesh_text(estimate)}",
        layout,
        "",
        f"step    {units.short_time(estimate.step_seconds)}, {batch}; {speed}",
        f"range   {_range(estimate)}",
        f"bubble  {estimate.simulation.bubble:.1%}",
        f"memory  {room}: {'fits' if estimate.fits else 'DOES NOT FIT'}",
        f"run     {config.last_step:,} steps: {days}, {hours:,.0f} device hours",
        *([warning] if warning else []),
    ]
    if (shared := estimate.shared_by) > 1:
        text = "for correctness, not for speed: times are those of ranks with a device each"
        lines.append(f"shared  {shared} ranks take turns on a device, {text}")
    wrapped = (textwrap.wrap(line, width, subsequent_indent=" " * 8) or [""] for line in lines)
    return "\n".join(line for lines in wrapped for line in lines)


def _interval(estimate: Estimate) -> dict[str, Any]:
    """What four of five published runs of this kind would have, planned like this one."""
    found, steps, speeds = estimate.spread, None, None
    if found is not None:
        speeds = [estimate.speed * share for share in (found.low, found.high)]
        steps = [estimate.step_seconds / share for share in (found.high, found.low)]
    rows = 0 if found is None else found.rows
    return {"kind": estimate.kind, "rows": rows, "step_seconds": steps, "speed": speeds}


def _range(estimate: Estimate) -> str:
    interval, unit = _interval(estimate), estimate.plan.unit
    if not interval["rows"]:
        return f"unknown: no published run of this kind ({estimate.kind}) is compared with its plan"
    low, high = interval["speed"]
    text = f"{low:,.0f} to {high:,.0f} {unit}/s a device, as four of five published runs"
    return f"{text} of this kind ({estimate.kind}, {interval['rows']} compared)"


def _memory_table(estimate: Estimate, width: int) -> str:
    used = [name for name in _PARTS if any(getattr(parts, name) for parts in estimate.memory)]
    unit, scale = ("GiB", _GIB) if estimate.fullest >= _GIB else ("MiB", 2**20)
    header = ["rank", "stages", *(_PARTS[name] for name in used), "total", "of"]
    rows = []
    for rank, parts in enumerate(estimate.memory):
        sizes = [getattr(parts, name) for name in used] + [parts.total, estimate.hardware.usable]
        shown = [f"{size / scale:.1f}" for size in sizes]
        rows.append([str(rank), _stages(estimate.order.local(rank)), *shown])
    what = (
        "activ: of microbatches in flight; queued: for weight gradients that wait; msgs: between "
    )
    what += "stages; gather: whole parameters; peak: while a block runs"
    title = f"memory at the fullest moment, {unit}"
    return "\n".join([title, *textwrap.wrap(what, width), table(header, rows, width)])


def _time_table(estimate: Estimate, width: int) -> str:
    header = ["rank", "stages", "parameters", "forward", "backward", "computes", "moves", "waits"]
    few = estimate.config.pp <= _FEW
    header += ["mostly for"] if few else []
    rows, simulated, step = [], estimate.simulation, estimate.step_seconds
    for rank in range(estimate.config.pp):
        local = estimate.order.local(rank)
        times = [estimate.times.stages[stage] for stage in local]
        computes, moves = simulated.computes[rank], simulated.exchanges[rank]
        waits = {s: t for (r, s), t in simulated.waits.items() if r == rank}
        stage = max(waits, key=lambda s: waits[s], default=None)
        row = [str(rank), _stages(local), units.count(sum(map(estimate.plan.stage_numel, local)))]
        row.append(units.short_time(sum(t.forward.device for t in times)))
        row.append(units.short_time(sum(t.backward.device for t in times)))
        row += [f"{part / step:.1%}" for part in (computes, moves, step - computes - moves)]
        row += ["" if stage is None else f"stage {stage}"] if few else []
        rows.append(row)
    return "time: of a microbatch, and of the step\n" + table(header, rows, width)


def _traffic_table(estimate: Estimate, width: int) -> str:
    rows = []
    ranks = [estimate.traffic(rank) for rank in range(estimate.config.pp)]
    kinds = TRAFFIC | (_EXACT_AXES if estimate.config.exact else {})
    for kind, (what, axis) in kinds.items():
        if nbytes := max(traffic[kind] for traffic in ranks):
            link = link_of(estimate.config, axis, estimate.hardware)
            where = "in a node" if link.inside else f"over {link.nodes} nodes"
            rate = units.size(nbytes / estimate.step_seconds)
            rows.append([what, axis, where, units.size(nbytes), f"{rate}/s"])
    header = ["what a rank sends in a step", "axis", "link", "bytes", "on average"]
    return table(header, rows, width) if rows else ""


def _bounds(estimate: Estimate, width: int) -> str:
    shares = sorted(estimate.shares(estimate.slowest).items(), key=lambda pair: -pair[1])
    text = ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005)
    lines = textwrap.wrap(f"rank {estimate.slowest} has the most to do: {text}", width)
    if waits := estimate.simulation.waits:
        (rank, stage), seconds = max(waits.items(), key=lambda pair: pair[1])
        share = seconds / estimate.step_seconds
        lines.append(f"rank {rank} waits {share:.0%} of the step for stage {stage}")
    return "\n".join(lines)


def table(header: list[str], rows: list[list[str]], width: int) -> str:
    """Format a table, merging consecutive equal rows (ignoring rank and stage columns)."""
    has_ranks = header[0] == "rank"
    merged: list[list[str]] = []
    for _, equal in groupby(rows, key=lambda row: row[2:] if has_ranks else row):
        first, *others = equal
        if len(others) > 1:
            first = [f"{first[0]}-{others[-1][0]}", f"{first[1]} ..", *first[2:]]
            others = []
        merged += [first, *others]
    return "\n".join(table_lines("", header, merged, width, indent=""))


def _stages(stages: Sequence[int]) -> str:
    return ",".join(map(str, stages)) if len(stages) <= 3 else f"{stages[0]},{stages[1]},.."


# --- the step of a plan as a chart, with the memory of each rank ----------------------------------


def chart_of(estimate: Estimate) -> Chart:
    ranks, step = range(estimate.config.pp), estimate.step_seconds
    schedule = f"{estimate.config.schedule.name}, {units.microbatches(estimate.plan.microbatches)}"
    bubble = f"step {units.short_time(step)}, bubble {estimate.simulation.bubble:.1%}"
    return Chart(
        title=f"{schedule}, {mesh_text(estimate)} on {estimate.hardware.title}: {bubble}",
        rows=[[*_spans(estimate, rank)] for rank in ranks],
        first=[next(iter(estimate.order.local(rank)), -1) for rank in ranks],
        seconds=step,
        messages=estimate.simulation.messages,
        memory=[_memory_curve(estimate, rank) for rank in ranks],
        device_memory=estimate.hardware.usable,
    )


def _spans(estimate: Estimate, rank: int) -> Iterator[Span]:
    for event in estimate.simulation.events[rank]:
        recompute = 0.0  # seconds of recomputation at its beginning
        if event.kind in ("B", "I"):
            recompute = estimate.times.stages[event.stage].of(event.kind).recompute
        if recompute > 0:
            yield event._replace(kind="again", end=event.start + recompute)
        yield event._replace(start=event.start + recompute)


def _memory_curve(estimate: Estimate, rank: int) -> MemoryCurve:
    samples = estimate.memory_timeline[rank]
    events = {event[:3]: event for event in estimate.simulation.events[rank]}
    times, sizes = [0.0], [samples[0].after.total if samples else 0]
    for sample in samples:
        begin, end = estimate.simulation.pipeline, estimate.step_seconds
        if sample.act is not None:
            _, _, _, begin, end = events[sample.act[:3]]
        times += [begin, begin, end, end]
        sizes += [sizes[-1], sample.most.total, sample.most.total, sample.after.total]
    return MemoryCurve(times, sizes)
