"""Record the forward of a config's model on meta, and check it with its data and loss."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from torch import nn

from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.config.groups import optimization, pipeline
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.data.sources import Batch
from titanlike.core.device.choose import first_device
from titanlike.core.distributed.placement import freeze_statistics
from titanlike.core.distributed.sharding import compute_dtype
from titanlike.core.distributed.transform import Recorded, Transform
from titanlike.core.graph.cut import StageGraph, cut
from titanlike.core.graph.loss import Loss
from titanlike.core.graph.model_graph import Fields, ModelGraph, fields_of
from titanlike.core.graph.recording import RecordError, UnknownTokens
from titanlike.core.models.registry import build_model, constructed_buffers
from titanlike.core.optim.loss import check_loss, trained_outputs


def record_model(
    config: Config,
    resolved: Custom,
    model: nn.Module,
    batch: Batch,
    microbatches: int,
    loss: Loss,
    transforms: Mapping[str, Transform],
    variable: bool,
) -> Recorded:
    """Record the forward of a transformed model on a microbatch, and run the transforms' checks.

    batch: one sequence, see `example_batch`; loss: of the model's output; variable: batches differ
    in length. Raises ConfigError if model, data and loss do not fit each other.
    """
    _prepare(model, config)
    size = config.batch_size // config.dp // microbatches
    graph = _record(config, resolved, model, fields_of(batch), size, loss, transforms)
    for transform in transforms.values():
        transform.recorded(graph)
    microbatch = {name: x.repeat_interleave(size, 0) for name, x in batch.items()}
    for transform in transforms.values():
        microbatch = transform.batch(microbatch)
    targets, output = microbatch["targets"], graph.meta_output(graph.fields, True)
    if problems := check_loss(config.loss, output, targets, size):
        raise ConfigError(problems)
    if config.metrics.own:
        from titanlike.core.optim.custom_metrics import metric_problems

        if problems := metric_problems(config, output, targets):
            raise ConfigError(problems)
    graph.trained_outputs = trained_outputs(loss, output, targets)
    if not any(graph.trained_outputs):
        reason = "its loss has no gradient: weight decay alone would train it"
        fix = (
            "remove .detach(), no_grad or requires_grad_(False) from all of its forward or its loss"
        )
        raise ConfigError([Problem("model.name", resolved.name, reason, fix)])

    def unchanged() -> nn.Module:
        fresh = build_model(resolved)
        _prepare(fresh, config)
        return fresh

    recorded = Recorded(graph, batch, loss, output, targets, variable, unchanged)
    for transform in transforms.values():
        transform.check(recorded)
    return recorded


def _prepare(model: nn.Module, config: Config) -> None:
    """Cast parameters to the compute dtype; buffers keep their dtype, as in training."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(compute_dtype(config.precision))
    freeze_statistics(model)  # meta tensors have none


def _record(
    config: Config,
    resolved: Custom,
    model: nn.Module,
    fields: Fields,
    microbatch_size: int,
    loss: Loss,
    transforms: Mapping[str, Transform],
) -> ModelGraph:
    points = config.split.points if isinstance(config.split, pipeline.PointSplit) else []
    chunked = isinstance(config.loss, optimization.ChunkedCrossEntropy)
    sequence = next(filter(None, (t.sequence for t in transforms.values())), None)

    def before(fields: Fields) -> None:
        for transform in transforms.values():
            transform.prepare(fields)

    def graph() -> ModelGraph:
        return ModelGraph(
            model,
            fields,
            microbatch_size,
            points,
            traced=isinstance(config.split, pipeline.TraceSplit),
            device=first_device(config.device).type,
            buffers=buffers,
            before=before,
            sequence=sequence,
        )

    buffers = functools.cache(lambda: constructed_buffers(resolved, config.seed))
    key = "model.name"
    try:
        model_graph = graph()
        while chunked and (nested := _chunk_loss(model_graph, loss)):
            points = [*points, *nested]
            model_graph = graph()
        model_graph.recording(fields, False)
        return model_graph
    except ConfigError:
        raise
    except RecordError as error:
        reason, fix = error.reason, error.fix
    except UnknownTokens as error:
        assert sequence is not None
        raise ConfigError([sequence.problem(error)]) from None
    except TypeError as error:  # from the call's arguments, or from within the forward
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
    """Let the last stage compute the loss in chunks of tokens. Returns the modules at which the
    last unit must be split, because the head is nested in it."""
    from titanlike.techniques.chunked_loss import HeadNested, find_head, with_chunked_loss

    def last_stage(graph: StageGraph) -> StageGraph:
        return with_chunked_loss(graph, find_head(graph, model_graph.model, loss))

    recording = model_graph.recording(model_graph.fields, True)
    try:
        last_stage(cut(recording, [list(recording.starts)])[0])
    except HeadNested as nested:
        return nested.points
    except RecordError:
        pass  # raised again when the stages are cut
    model_graph.last_stage = last_stage
    return []
