"""The forward of a config's model, recorded on meta for a microbatch, and checked with its data and loss."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from titanlike.config import schema
from titanlike.config.errors import ConfigError, Problem
from titanlike.config.schema import Config, Custom
from titanlike.data.sources import Batch
from titanlike.device.choose import first_device
from titanlike.graph.cut import StageGraph, cut
from titanlike.graph.model_graph import Fields, ModelGraph, fields_of
from titanlike.graph.recording import RecordError
from titanlike.graph.token_parts import UnknownTokens
from titanlike.models.registry import build_model, constructed_buffers
from titanlike.optim.chunked_loss import HeadNested, find_head, with_chunked_loss
from titanlike.optim.loss import Loss, check_loss, trained_outputs
from titanlike.parallel.batchnorm import freeze_statistics
from titanlike.parallel.sharding import compute_dtype

if TYPE_CHECKING:
    from titanlike.parallel.tp.tensor_parallel import TensorDraft
    from titanlike.training.context_draft import ContextDraft


def record_model(
    config: Config,
    resolved: Custom,
    model: nn.Module,
    batch: Batch,
    microbatches: int,
    loss: Loss,
    tensor: TensorDraft | None,
    context: ContextDraft | None,
) -> tuple[ModelGraph, Tensor]:
    """The model's forward on a microbatch, recorded on meta, and the microbatch's targets.

    batch: see `example_batch`. Raises ConfigError where model, data and loss do not fit each other.
    """
    _prepare(model, config)
    fields = fields_of(batch)
    size = config.batch_size // config.dp // microbatches
    model_graph = _record(config, resolved, model, fields, size, loss, tensor, context)
    targets = batch["targets"].repeat_interleave(size, 0)
    if context is not None:
        targets = context.parallel.targets(targets)
    output = model_graph.meta_output(fields, True)
    problems = check_loss(config.loss, output, targets, size)
    if context is not None and not problems:
        problems = context.loss_problems(loss, output, targets)
    if problems:
        raise ConfigError(problems)
    model_graph.trained_outputs = trained_outputs(loss, output, targets)
    if context is not None:
        _check_tokens(config, resolved, context, batch, model_graph)
    return model_graph, targets


def _prepare(model: nn.Module, config: Config) -> None:
    """Cast parameters to what they are computed with; buffers keep their dtype, as in training."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(compute_dtype(config))
    freeze_statistics(model)  # meta tensors have none


def _check_tokens(
    config: Config,
    resolved: Custom,
    context: ContextDraft,
    batch: Batch,
    model_graph: ModelGraph,
) -> None:
    """Raise ConfigError where a forward does not compute each token by itself, but for attention."""
    model = model_graph.model
    if config.tp > 1:
        model = build_model(resolved)
        _prepare(model, config)
    model.train()
    size = model_graph.microbatch_size if config.tp == 1 else 2
    fields = {n: x.repeat_interleave(size, 0) for n, x in batch.items() if n != "targets"}
    context.check(model, fields, model_graph)


def _record(
    config: Config,
    resolved: Custom,
    model: nn.Module,
    fields: Fields,
    microbatch_size: int,
    loss: Loss,
    tensor: TensorDraft | None,
    context: ContextDraft | None,
) -> ModelGraph:
    points = config.split.points if isinstance(config.split, schema.PointSplit) else []
    chunked = isinstance(config.loss, schema.ChunkedCrossEntropy)
    traced = isinstance(config.split, schema.TraceSplit)
    key = "model.name"
    buffers = functools.cache(lambda: constructed_buffers(resolved, config.seed))
    device = first_device(config.device).type
    options: dict[str, Any] = {"traced": traced, "device": device, "buffers": buffers}
    if tensor is not None:
        options["before"] = functools.partial(tensor.prepare, tensor.like)
    if context is not None:
        options["sequence"] = context
    try:
        graph = ModelGraph(model, fields, microbatch_size, points, **options)
        while chunked and (nested := _chunk_loss(graph, loss)):
            points = [*points, *nested]
            graph = ModelGraph(model, fields, microbatch_size, points, **options)
        graph.recording(fields, False)
        if context is not None:
            for unit in graph.units:
                context.attention.around(model.get_submodule(unit.name), unit.name)
        return graph
    except ConfigError:
        raise
    except RecordError as error:
        reason, fix = error.reason, error.fix
    except UnknownTokens as error:
        reason = f"{error.call} {error.reason}, and a cp rank has a part of the tokens"
        fix = f"cp=1 dp={config.dp * config.cp}"
        raise ConfigError([Problem("cp", config.cp, reason, fix)]) from None
    except TypeError as error:  # of the call, or of something inside
        given = ", ".join(fields)
        reason = f"its forward cannot be called with what the data gives ({given}): {error}"
        fix = "a forward with these arguments, or data with those that it needs"
    except Exception as error:  # whatever a forward raises
        sizes = {name: [microbatch_size, *field.shape] for name, field in fields.items()}
        shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
        key, reason = "model", f"its forward on {shown} raised {type(error).__name__}: {error}"
        fix = "sizes of model and data that fit each other"
    raise ConfigError([Problem(key, resolved.name, reason, fix)])


def _chunk_loss(model_graph: ModelGraph, loss: Loss) -> list[str]:
    """Let the last stage compute the loss in chunks of tokens; returns where the last unit must be
    cut first, because the head is nested in it."""

    def last_stage(graph: StageGraph) -> StageGraph:
        return with_chunked_loss(graph, find_head(graph, model_graph.model, loss))

    recording = model_graph.recording(model_graph.fields, True)
    try:
        last_stage(cut(recording, [recording.units])[0])
    except HeadNested as nested:
        return nested.points
    except RecordError:
        pass  # raised again when the stages are cut
    model_graph.last_stage = last_stage
    return []
