"""Text that a run prints before its first step and after its last."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from titanlike.core.config.errors import some_names
from titanlike.core.config.groups.user_code import CustomOptimizer
from titanlike.core.config.program import train_program
from titanlike.core.config.schema import MESH_AXES, Config
from titanlike.core.device import accelerator
from titanlike.core.distributed.mesh import Mesh
from titanlike.core.graph.cut import messages
from titanlike.core.metrics import units
from titanlike.core.metrics.goodput import goodput, goodput_text
from titanlike.core.metrics.summary import summarize
from titanlike.core.optim.optimizer import hidden_matrices
from titanlike.core.training.layout import ranks_text, span
from titanlike.core.training.train_plan import TrainPlan

if TYPE_CHECKING:
    from titanlike.core.training.session import Session
    from titanlike.planning.costs.auto_split import AutoSplitResult, CostedSplit


def opening(session: Session) -> None:
    """Print what will run: mesh, stages, parameters, tokens per step, and where output is written."""
    console, config, run, data = session.console, session.config, session.run, session.data
    plan, mesh, start = run.plan, run.mesh, session.progress.step
    shape = f"pp {config.pp} x dp {config.dp}"
    if config.replicate > 1:
        shape += f" ({config.replicate} replicas)"
    for axis in MESH_AXES[2:]:
        shape += f" x {axis} {size}" if (size := getattr(config, axis)) > 1 else ""
    if config.ep > 1:
        shape += f"; ep {config.ep}"
    shape += f"; ZeRO {plan.zero} ({plan.why_zero})"
    described = {title: text for t in plan.transforms.values() for title, text in t.describe(plan)}
    precision = described.pop("precision", config.precision.name)
    limit = "at most " if data.variable is not None else ""
    tokens = units.count(config.batch_size * config.seq_len)
    has_tokens = plan.unit == "tokens"
    batch = f"{config.batch_size} x {config.seq_len} = {limit}{tokens} tokens"
    parts = "sequences" if has_tokens else "samples"
    cut = f"{plan.microbatches} x {plan.model_graph.microbatch_size} {parts} on each dp rank"
    fields = [
        ("device", f"{mesh.device.type} with {mesh.backend} ({mesh.reason})"),
        ("ranks", session.places),
        ("mesh", shape if mesh.world_size > 1 else "one process"),
        ("model", f"{config.model.name}, {units.count(plan.whole_numel)} parameters"),
        ("weights", "" if start or config.checkpoint.start_from else run.weights_source),
        *described.items(),
        ("not used", f"{some_names(plan.unused)}: no gradient, no update" if plan.unused else ""),
        ("not checked", "; ".join(t.unchecked for t in plan.transforms.values() if t.unchecked)),
        ("precision", precision),
        ("numerics", _numerics(config, mesh)),
        ("optimizer", _optimizer(config, plan)),
        ("recomputed", _recomputed(config, plan)),
        ("gradients", f"of weights {plan.why_together}" if plan.why_together else ""),
        ("data", data.description),
        ("epochs", epochs(config, len(data.train), parts)),
        ("warm-up", warmup(config)),
        ("batch", batch if has_tokens or limit else f"{config.batch_size} samples"),
        ("ramp", _ramp(config)),
        ("microbatches", f"{cut} ({plan.why_microbatches})"),
        ("schedule", config.schedule.name if mesh.pp > 1 else ""),
        ("steps", f"{start + 1} to {last}" if start < (last := config.last_step) else "none left"),
        ("profile", session.profile.describe(start) if session.profile else ""),
        ("output", str(session.worker.run_dir)),
        *(("", sink.location) for sink in session.sinks[1:]),
    ]
    console.fields([field for field in fields if field[1]])
    console.line()
    if not isinstance(config.optimizer, CustomOptimizer) and config.optimizer.groups:
        from titanlike.core.optim.groups import group_rows

        headings, *rows = group_rows(
            config.optimizer, plan.model_graph.model, plan.stage_parameters
        )
        console.table("", headings, rows)
        console.line()
    auto_split, chosen = plan.auto_split, plan.recomputed
    of_part = " of a rank's part" if mesh.layer_ranks > 1 or config.ep > 1 else ""
    places = [(rank, stage) for rank in range(mesh.pp) for stage in plan.order.local(rank)]
    stages = [stage for _, stage in places]
    columns: dict[str, list[Any]] = {
        "rank": [ranks_text(mesh, rank) for rank, _ in places],
        "stage": stages,
        "modules": [span(plan.stages[stage]) for stage in stages],
        f"parameters{of_part}": [units.count(plan.stage_numel(stage)) for stage in stages],
    }
    if auto_split is not None and (cost := auto_split.cost) != "params":  # it has a column already
        costs = [_TEXT[cost](auto_split.chosen.stages[stage]) for stage in stages]
        columns["memory" if cost == "memory" else "one microbatch"] = costs
    if config.activation_checkpoint.name != "none":
        blocks = ((len(chosen.blocks[stage]), len(plan.blocks(stage))) for stage in stages)
        columns["recomputed"] = [f"{some} of {every} blocks" for some, every in blocks]
    if chosen.memory:
        columns["memory of rank"] = [units.size(chosen.memory[rank]) for rank, _ in places]
    if plan.why_together:
        deferred = [stage in plan.deferred for stage in stages]
        columns["weight gradients"] = ["deferred" if later else "together" for later in deferred]
    console.table("", [*columns], [*zip(*columns.values(), strict=True)])
    if sent := _sent(plan):
        console.line()
        console.line("  activations sent per microbatch; their gradients come back the same way:")
        console.table("", ["from stage", "to", "shape", "dtype", "bytes"], sent)
    if auto_split is not None and mesh.pp > 1:
        console.line()
        console.fields(_splits(auto_split))
    console.line()
    if start:
        console.line(f"resuming from step {start}")


def _sent(plan: TrainPlan) -> list[list[str]]:
    """A row for each tensor that a stage passes on; stages that pass on the same share rows."""
    groups: list[tuple[int, int, list[list[str]]]] = []  # first and last stage, cells of its rows
    place = plan.order.stage_to_rank
    for stage, graph in enumerate(plan.model_graph.graphs(plan.fields, True)[:-1]):
        tensors, rows = messages(graph)[1], []
        near = len(tensors) - len(graph.skips_out)
        for to, tensor in zip([stage + 1] * near + [*graph.skips_out], tensors, strict=True):
            size = units.size(tensor.nbytes) if place[to] != place[stage] else "same rank"
            dtype = str(tensor.dtype).removeprefix("torch.")
            rows.append(
                ["next" if to == stage + 1 else str(to), str(list(tensor.shape)), dtype, size]
            )
        if groups and groups[-1][2] == rows:
            groups[-1] = (groups[-1][0], stage, rows)
        else:
            groups.append((stage, stage, rows))
    names = [str(first) if first == last else f"{first}-{last}" for first, last, _ in groups]
    return [[name, *row] for name, group in zip(names, groups, strict=True) for row in group[2]]


def closing(session: Session, start: int) -> None:
    """The result, and the command to continue with, after a run from step `start`."""
    console, config, progress = session.console, session.config, session.progress
    run_dir, stopped, last = session.worker.run_dir, session.stopped, config.last_step
    if start >= progress.step and not stopped:
        end = f"steps={config.steps}" if last == config.steps else f"max_tokens={config.max_tokens}"
        end = end if session.last == last else "the data have ended"
        console.text(f"nothing to do: the run is at step {start}, and {end}")
    more = [*train_program(), "--config-path", str(run_dir)]
    if not stopped and progress.step < last:
        more.append("data.repeat=true")
    elif not stopped:
        twice = 2 * max(start, last)
        more += [f"steps={twice}"] * (twice > config.steps)
        more += [f"max_tokens={config.tokens(twice)}"] * (config.max_tokens is not None)
    if config.checkpoint.resume != "auto":
        more.append("checkpoint.resume=auto")
    value = progress.value
    name = "val loss" if value == summarize(run_dir).val_loss else "loss"
    loss = "" if value is None else f"{name} {units.decimal(value)}, "
    saved = session.checkpointer.newest
    checkpoint = f"checkpoint at step {saved}, " if saved else ""
    end = f"stopped at step {progress.step} ({stopped})" if stopped else "training complete"
    end += f", the data end at step {session.last}" * (session.last < last)
    console.text(f"{end}: {loss}{checkpoint}output in {run_dir}")
    if share := goodput_text(goodput(run_dir, time.time())):
        console.text(f"goodput: {share}")
    for sink in session.sinks[1:]:
        console.line(sink.location)
    if saved:
        console.line(f"{'resume' if stopped else 'continue'} with: {shlex.join(more)}")


_MANY_EPOCHS = 50

_TEXT: dict[str, Callable[[float], str]] = {  # of a cost of split=auto, by `split.cost`
    "params": lambda cost: f"{units.count(cost)} parameters",
    "flops": units.flop,
    "time": lambda cost: units.short_time(cost / 1e9),
    "memory": units.size,
}


def _splits(result: AutoSplitResult) -> list[tuple[str, str]]:
    """The heaviest rank's load with split=auto, compared with split=even."""

    def heaviest_rank(split: CostedSplit) -> str:
        heaviest = _TEXT[result.cost](max(split.ranks))
        return f"heaviest rank {heaviest}, {split.imbalance:.3f} x the mean"

    return [
        ("split", f"auto by {result.cost}: {heaviest_rank(result.chosen)}"),
        ("", f"even would give: {heaviest_rank(result.even)}"),
    ]


def _numerics(config: Config, mesh: Mesh) -> str:
    """What `numerics=exact` fixes, "" without it."""
    if not config.exact:
        return ""
    fixed = f"grains of {config.numerics.grain}, one CPU thread on each rank"
    if accelerator.is_accelerator(mesh.device):
        fixed += ", deterministic algorithms"
    return f"exact: the same bits in every layout ({fixed})"


def _optimizer(config: Config, plan: TrainPlan) -> str:
    """The matrices that a matrix optimizer (e.g. Muon) updates, "" if there are none."""
    choice = config.optimizer
    if isinstance(choice, CustomOptimizer):
        return ""
    hidden = hidden_matrices(plan.model_graph.model, choice)
    sizes = {name: size for stage in plan.stage_parameters for name, size in stage.items()}
    total = units.count(sum(sizes[name] for name in hidden))
    others = len(sizes) - len(hidden)
    text = f"{choice.name}: {len(hidden)} matrices with {total} parameters; "
    text += f"{choice.other_kind}: {others} others"
    return text if hidden else ""


def _recomputed(config: Config, plan: TrainPlan) -> str:
    """The blocks recomputed in the backward and, for `fit`, the memory then needed."""
    how, chosen = config.activation_checkpoint.name, plan.recomputed
    if how == "none":
        return ""
    total = sum(len(plan.blocks(stage)) for stage in range(plan.order.stages))
    text = f"{how}: {chosen.count} of {total} blocks, in the backward"
    if alone := plan.model_graph.taking_gradients:
        text += f" (not {some_names(sorted(alone))}: gradients are taken in the forward)"
    if chosen.limit is None:
        return text
    largest, rank = max((size, -rank) for rank, size in enumerate(chosen.memory))
    text += f"; about {units.size(largest)} of {units.size(chosen.limit)} on pipeline rank {-rank}"
    if largest > chosen.limit:
        text += "; WARNING: that is too much: a larger pp or dp, or more schedule.microbatches"
    return text


def _ramp(config: Config) -> str:
    """The steps and batch shape of each stage of `ramp`, "" without one."""
    first, texts = 1, []
    for (steps, size, length), stage in zip(config.ramp_stages(), config.ramp, strict=False):
        end = f"to {units.count(stage.tokens)} tokens"
        texts.append(f"steps {first}-{first + steps - 1}: {size} x {length} ({end})")
        first += steps
    return "; ".join(texts)


def epochs(config: Config, sequences: int, unit: str = "sequences") -> str:
    """How often the run reads its data; "" for data that never end."""
    if sequences >= 1 << 40:
        return ""
    last = config.last_step
    epochs = config.tokens(last) / config.seq_len / sequences
    text = f"{epochs:.3g} of {units.count(sequences)} {unit} by step {last}"
    if sequences < config.batch_size:
        fix = f"more data, or batch_size={max(1, sequences)}"
        return f"{text}; WARNING: fewer than a batch, which has some of them twice; {fix}"
    if epochs >= _MANY_EPOCHS:
        fit = max(1, int(_MANY_EPOCHS * sequences / config.batch_size))
        return f"{text}; WARNING: a model learns so few by heart; more data, or steps={fit}"
    return f"{text}: each is read again" if epochs > 1 else text


def warmup(config: Config) -> str:
    """A warning if the run ends before the learning rate reaches its peak, else ""."""
    steps, last = getattr(config.lr, "warmup", 0), config.last_step  # a custom one has none
    if steps <= last:
        return ""
    peak = f"{last / steps:.2g} of its peak at step {last}"
    fit = max(1, last // 10)
    more = f"steps={steps}" if last == config.steps else f"max_tokens={config.tokens(steps)}"
    return f"WARNING: the learning rate reaches {peak}; {more} or more, or lr.warmup={fit}"
