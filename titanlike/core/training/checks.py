"""Checks of a config against its model and schedule: each returns the problems that it finds."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from titanlike.core.config.errors import Problem
from titanlike.core.config.groups.pipeline import AutoSplit, TraceSplit
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.optimizers.muon import Muon
from titanlike.core.config.schema import Config
from titanlike.core.config.validate import Rule, broken_rules
from titanlike.core.data.checked import CheckedSource
from titanlike.core.data.kinds import DataError
from titanlike.core.data.registry import vocab_size
from titanlike.core.data.sources import IGNORE, Batch, Data
from titanlike.core.distributed.placement import has_statistics
from titanlike.core.distributed.sharding import wrapped_in_fsdp
from titanlike.core.graph.cut import StageGraph, message_problem, same_messages
from titanlike.core.graph.model_graph import ModelGraph
from titanlike.core.graph.units import find_units
from titanlike.core.models.registry import LENGTHS, MODELS, complete_arguments
from titanlike.core.torch_private.known_code import has_gradient_hooks
from titanlike.core.torch_private.operators import BatchNorm, InstanceNorm

_MOST = 3  # problems of one kind that are shown
_MIX_NOTHING = ("llama", "gpt2", "moe")  # titanlike's own models


def may_mix_samples(config: Config) -> bool:
    """Whether a custom model or loss might couple samples of a batch."""
    own_loss = isinstance(config.loss, Custom)
    return not config.mixes_samples and (config.model.name not in _MIX_NOTHING or own_loss)


# --- model, data and mesh ------------------------------------------------------------------------


def model_problems(model: nn.Module, config: Config) -> list[Problem]:
    """Return the problems of a model on meta with this config."""
    problems: list[Problem] = []

    def wrong(key: str, value: Any, reason: str, fix: str) -> None:
        problems.append(Problem(key, value, reason, fix))

    initial: Any = getattr(model, "initial", None)
    for name in (n for n, _ in model.named_parameters()) if initial is not None else ():
        answer = initial(name)
        pair = isinstance(answer, tuple) and len(answer) == 2
        if not pair or not all(isinstance(number, (int, float)) for number in answer):
            fix = "return (mean, standard deviation) of a normal distribution"
            reason = f"its initial({name!r}) returned {answer!r}"
            wrong("model.name", config.model.name, reason, fix)
            break
    scalars = [name for name, p in model.named_parameters() if p.dim() == 0]
    if scalars and (config.dp * config.cp > 1 or config.fsdp.cpu_offload):
        reason = f"its parameter {scalars[0]} has no dimension, so FSDP cannot shard it"
        wrong("model.name", config.model.name, reason, "a parameter of shape [1]")
    unregistered = _unregistered_tensor(model)
    if unregistered is not None:
        reason = f"its attribute {unregistered} is a tensor and not a buffer: it would stay on meta"
        fix = f"self.register_buffer('{unregistered.rpartition('.')[2]}', ..., persistent=False)"
        wrong("model.name", config.model.name, reason, fix)
    longest = getattr(model, "max_seq_len", None)
    if longest is not None and longest < config.seq_len:
        keys = (*LENGTHS, "max_position_embeddings")
        key = next((key for key in keys if key in config.model.args), LENGTHS[0])
        fix = f"seq_len={longest} or model.{key}={config.seq_len}"
        reason = f"is longer than the model's {key}={longest}"
        wrong("seq_len", config.seq_len, reason, fix)
    more, weight = len(getattr(model, "mtp", ())), getattr(config.loss, "mtp_weight", None)
    if more and not weight:
        reason = "the tokens that model.num_nextn_predict_layers predicts have no loss"
        fix = "loss.mtp_weight=0.3" if weight is not None else "loss=cross_entropy"
        wrong("loss.mtp_weight", weight, reason, fix)
    if weight and not more:
        reason = "the model predicts the next token alone"
        wrong("loss.mtp_weight", weight, reason, "model.num_nextn_predict_layers=1")
    if config.model.args.get("vocab_size") is not None:
        needed, size = vocab_size(config), config.model.args["vocab_size"]
        if needed is not None and size < needed:
            reason = f"is smaller than the {needed} token ids of data={config.data.name}"
            wrong("model.vocab_size", size, reason, "model.vocab_size=null (taken from the data)")
    return problems


def _unregistered_tensor(model: nn.Module) -> str | None:
    """Return the name of a tensor attribute that is neither parameter nor buffer, or None."""
    registered = {id(t) for t in (*model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and id(value) not in registered:
                return f"{name}.{attribute}".lstrip(".")
    return None


# --- norms, splits, schedules ---------------------------------------------------------------------

# fmt: off
_NORMS = (  # of a config, the name of a module, and the module
    Rule("model.name", lambda c, name, module: isinstance(module, nn.SyncBatchNorm),
         "its {1} is a SyncBatchNorm, which communicates with all ranks in its forward, also with "
         "those of other stages",
         "nn.BatchNorm2d there: its running statistics are those of the whole batch"),
    Rule("model.name", lambda c, name, module: isinstance(module, InstanceNorm)
         and module.running_mean is not None,
         "its {1} is an instance norm that keeps running statistics",
         "track_running_stats=False there, or a batch norm"),
    Rule("model.name", lambda c, name, module: isinstance(module, BatchNorm)
         and module.running_mean is None and not c.mixes_samples,
         "its {1} is a batch norm without running statistics, which evaluates with those of a "
         "microbatch: validation depends on the layout",
         "track_running_stats=True there, or a group norm"),
    Rule("split", lambda c, name, module: has_statistics(module) and isinstance(c.split, TraceSplit),
         "the tracer cannot see that {1} is a batch norm and keeps statistics",
         "split=points or split=even, which leave modules whole"),
    Rule("cp", lambda c, name, module: has_statistics(module) and c.cp > 1 and c.dp * c.cp,
         "its {1} keeps statistics over all tokens, and a rank has a part of them",
         "cp=1 dp={0}, or a group norm"),
    Rule("tp", lambda c, name, module: has_statistics(module) and c.tp > 1 and c.dp * c.tp,
         "its {1} keeps running statistics, for which tp has no style",
         "tp=1 dp={0}, or a group norm"),
    Rule("precision", lambda c, name, module: has_statistics(module) and c.precision.low,
         "its {1} is a batch norm, whose running statistics are too fine for bf16",
         "precision=fp32, or a group norm"),
)
_EMBEDDINGS = (  # of the same
    Rule("model.name", lambda c, name, module: module.max_norm is not None,
         "its {1} is an embedding with max_norm, which changes its weight in each forward",
         "nn.Embedding without max_norm, and F.normalize"),
    Rule("model.name", lambda c, name, module: module.sparse,
         "its {1} is an embedding with sparse, which has a gradient that is no dense tensor",
         "nn.Embedding without sparse"),
    Rule("model.name", lambda c, name, module: module.scale_grad_by_freq
         and (c.world_size > 1 or getattr(c.schedule, "microbatches", 1) not in (None, 1)),
         "its {1} is an embedding with scale_grad_by_freq, which counts ids in a microbatch of a "
         "rank, and not in the batch", "nn.Embedding without scale_grad_by_freq"),
)
SHARDING = (  # of a config and its order
    Rule("fsdp.zero", lambda c, order: c.fsdp.zero in (2, 3) and order.splits_backward,
         "schedule={c.schedule.name} splits the backward in two, and FSDP loses gradients when it "
         "reduces or reshards between the halves",
         "fsdp.zero=1, or a schedule with whole backwards such as interleaved1f1b"),
    Rule("fsdp.zero", lambda c, order: c.fsdp.zero in (2, 3) and c.shards == 1 and 2 * c.replicate,
         "dp={c.dp} replicate={c.replicate} shards nothing", "fsdp.zero=auto, or dp={0}"),
)
_MTP = "model.num_nextn_predict_layers predicts tokens from those after them, which other ranks may have"
MULTI_TOKEN = (  # of a config and its model
    Rule("tp", lambda c, model: getattr(model, "mtp", ()) and c.tp > 1 and c.dp * c.tp,
         _MTP, "tp=1 dp={0}"),
    Rule("cp", lambda c, model: getattr(model, "mtp", ()) and c.cp > 1 and c.dp * c.cp,
         _MTP, "cp=1 dp={0}"),
)
# fmt: on


def norm_problems(config: Config, model: nn.Module) -> list[Problem]:
    """Problems of norms whose statistics would depend on the layout, or that would hang."""
    problems: list[Problem] = []
    for name, module in model.named_modules():
        for problem in [*broken_rules(_NORMS, config, name, module)][:1]:
            problems.append(problem)
            if problem.key != "model.name":
                return problems  # the same holds for the model's other batch norms
    return problems


def changed_problems(config: Config, model: nn.Module) -> list[Problem]:
    """Problems of gradient hooks (a rank has only part of a gradient), of embeddings such as those
    that renormalize within a step, and of empty parameters, which FSDP cannot shard."""
    problems = []
    for name, parameter in model.named_parameters():
        if has_gradient_hooks(parameter):
            reason = f"its {name} has a hook on its gradient, of which a rank and a microbatch have parts"
            fix = "the change in an optimizer of your own, or in the forward"
            problems.append(Problem("model.name", config.model.name, reason, fix))
        if not parameter.numel() and parameter.requires_grad and wrapped_in_fsdp(config):
            reason = (
                f"its {name} of shape {list(parameter.shape)} has no elements, and FSDP cannot "
            )
            reason += "lay its gradient beside others"
            fix = f"None in place of {name}, or requires_grad=False"
            problems.append(Problem("model.name", config.model.name, reason, fix))
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            problems += broken_rules(_EMBEDDINGS, config, name, module)
    return problems[:_MOST]


def muon_problems(config: Config, model: nn.Module) -> list[Problem]:
    """Problems with Muon: a model without matrices, or patterns that match no parameter."""
    optimizer = config.optimizer
    if not isinstance(optimizer, Muon):
        return []
    from titanlike.core.optim.optimizer import hidden_matrices

    names = [name for name, _ in model.named_parameters()]
    problems = [
        Problem("optimizer.adamw", pattern, "no parameter has such a name", "optimizer.adamw=[]")
        for pattern in optimizer.adamw
        if not fnmatch.filter(names, pattern)
    ]
    if not problems and not hidden_matrices(model, optimizer):
        reason = "there is nothing for Muon to update: it is for 2-D parameters of blocks"
        problems.append(Problem("optimizer.name", "muon", reason, "optimizer=adamw"))
    return problems


def shared_norm_problems(
    config: Config, model: nn.Module, stages: Sequence[Sequence[str]]
) -> list[Problem]:
    """Problems of batch norms on several stages, each of which would keep separate statistics."""
    seen: set[str] = set()
    for unit in chain.from_iterable(stages):
        norms = [norm for norm in model.get_submodule(unit).modules() if has_statistics(norm)]
        if unit in seen and norms:
            reason = f"two stages call {unit}, whose batch norm has one set of running statistics"
            fix = "split=points with both calls in one stage, or a module for each"
            return [Problem("split", config.split.name, reason, fix)]
        seen.add(unit)
    return []


def split_problems(config: Config, model: nn.Module) -> list[Problem]:
    """Problems of the split that can be found without a forward."""
    if isinstance(config.split, (AutoSplit, TraceSplit)):
        return []
    from titanlike.core.graph.partition import SplitError, partition
    from titanlike.core.pipeline.from_config import stage_count

    try:
        partition(find_units(model), config.split, stage_count(config.schedule, config.pp))
    except SplitError as error:
        return [error.problem]
    except ValueError:
        pass  # the schedule has no number of stages: that is a problem already
    return []


def stage_problems(
    config: Config, model_graph: ModelGraph, graphs: list[StageGraph], evaluated: list[StageGraph]
) -> list[Problem]:
    """Problems between the cut stages: activations that cannot be sent, or differ in evaluation; a
    compiled model without blocks; what `numerics=exact` excludes; batch norms on several stages."""
    reasons = [text for graph in graphs if (text := message_problem(graph))]
    if not all(map(same_messages, graphs, evaluated)):
        reasons.append("a stage would send other tensors in evaluation than in training")
    if reasons:
        fix = "split=points with points elsewhere"
        return [Problem("split", config.split.name, reasons[0], fix)]
    if config.compile and not any(unit.block for unit in model_graph.units):
        reason = "the model has no blocks, that is no list of layers"
        if config.split.name == "trace":
            reason = "split=trace takes the blocks apart that would be compiled"
        return [Problem("compile", True, reason, "compile=false")]
    if config.exact:
        from titanlike.techniques.exact import model_problems

        if problems := model_problems(config, model_graph):
            return problems
    units = [graph.units for graph in graphs]
    return shared_norm_problems(config, model_graph.model, units)


# --- ids of a user's own samples: of the first ones before a launch, then of every batch, on the CPU -


def vocabulary_of(model: nn.Module, section: Custom) -> int | None:
    """Return the model's vocabulary size; None if it does not declare one, or a user's own model has
    no embedding of this size."""
    known = complete_arguments(section).get("vocab_size")
    known = getattr(getattr(model, "config", None), "vocab_size", known)
    sizes = {
        module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)
    }
    return known if section.name in MODELS or known in sizes else None


def check_first_ids(data: Data, known: int | None, config: Config) -> None:
    """Raise DataError if a sample that was read as the data were opened has a token id that a model
    of `known` ids does not have."""
    train: Any = data.train
    train = getattr(getattr(train, "open_reader", None), "checks", train)  # a stream's
    sources = {"training": train, "validation": data.validation}
    for part, source in sources.items():
        for bad, name, i in source.first_ids if isinstance(source, CheckedSource) else ():
            _check_id(bad, name, f"{part} sample {i}", known, config)


def with_known_ids(batch: Batch, known: int | None, config: Config) -> Batch:
    """Return the batch. Raises DataError for a token id that a model of `known` ids does not have;
    torch would stop in a kernel."""
    for name in ("inputs", "targets"):
        ids = batch[name]
        if known is None or ids.is_floating_point() or not ids.is_cpu or ids.dim() != 2:
            continue
        learned = ids.masked_fill(ids == IGNORE, 0) if name == "targets" else ids
        for bad in (int(end) for end in learned.aminmax()):
            if not 0 <= bad < known:
                row = int((ids == bad).nonzero()[0, 0])
                _check_id(bad, name, f"sample {row} of a batch", known, config)
    return batch


def _check_id(bad: int, name: str, sample: str, known: int | None, config: Config) -> None:
    # the targets of a user's own model may be anything
    if known is None or 0 <= bad < known or (name != "inputs" and config.model.name not in MODELS):
        return
    reason = f"{sample} has the id {bad} in {name!r}, and the model has {known}"
    fix = f"return ids from 0 to {known - 1}"
    fix += f", or a Data with vocab_size={bad + 1} or more" if bad >= known else ""
    raise DataError("data.name", config.data.name, reason, fix)
