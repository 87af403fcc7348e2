"""`TrainingRun`, for a custom training loop (`titanlike.build`): this rank's part of a model with
methods to step, save and run forward, by the same functions as the command's loop.

Shapes: B = batch_size / dp, the samples of this dp rank in a batch; T = seq_len.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.core.checkpoint.checkpointer import Checkpointer
from titanlike.core.checkpoint.discovery import Progress
from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.config.parse import write_config
from titanlike.core.config.schema import Config
from titanlike.core.data.loader import batches, example_batch
from titanlike.core.data.sources import IGNORE, REAL, Batch, Data, with_real_tokens
from titanlike.core.device.accelerator import kernels
from titanlike.core.distributed.mesh import close_mesh
from titanlike.core.graph.loss import OutputError
from titanlike.core.graph.recording import tree_flatten, tree_map
from titanlike.core.launch.failures import describe
from titanlike.core.launch.rendezvous import barrier, forget
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics.run_files import Events
from titanlike.core.optim.loss import logits_of, takes_divided_logits
from titanlike.core.training import build as building
from titanlike.core.training.anomalies import AnomalyDetector, BadNumbers
from titanlike.core.training.checks import may_mix_samples, vocabulary_of
from titanlike.core.training.device_batches import to_device
from titanlike.core.training.layout import layout
from titanlike.core.training.session import keep_first_day
from titanlike.core.training.step import measured_step
from titanlike.core.training.step import validate as validation_losses

_GRACE = 10.0  # seconds between timeouts of ranks that wait for the same missing rank


@dataclass(frozen=True)
class StepOutput:
    """The result of a training step, the same on every rank."""

    step: int  # the first is 1
    loss: float  # of the global batch: mean over valid tokens, or over the terms a loss counts
    losses: list[float]  # of each microbatch of the global batch, in order
    grad_norm: float  # 2-norm of all gradients, before clipping
    lr: float  # 0.0 if the update was skipped
    skipped: str | None  # "nonfinite" or "spike" if the update was skipped
    record: dict[str, Any]  # as a row of metrics.jsonl


class TrainingRun:
    """This rank's part of a model and its optimizers, made by `build`. All methods except `batches`
    and `parameters` are collective."""

    def __init__(
        self, config: Config, worker: Worker, data: Data, run: building.Run, closes_group: bool
    ) -> None:
        self.config, self.data, self.plan, self.mesh = config, data, run.plan, run.mesh
        self.last: StepOutput | None = None
        self._run, self._closes_group = run, closes_group
        self._worker = replace(worker, run_dir=Path(config.run_dir))
        self._progress, self._detector = Progress(), AnomalyDetector(config, {})
        self._calls, self._met = 0, ""  # number of collective calls; name of the last barrier
        metrics = replace(config.metrics, microbatch_losses=True)
        self._step_config = replace(config, metrics=metrics)

    @property
    def steps(self) -> int:
        """Steps done so far, including those before a loaded checkpoint."""
        return self._progress.step

    def batches(self) -> Iterator[Batch]:
        """Yield this dp rank's batches of the training data after `steps`, endlessly, as the
        command reads them: "inputs" and "targets" [B, T] int64 on the CPU, and further fields of
        the samples."""
        self._own_data()
        source, dp_rank = self.data.train, self.mesh.dp_rank
        stream = batches(source, self.config, dp_rank=dp_rank, start_step=self.steps)
        if REAL in self._run.pipeline.used_fields():  # `step` gives it to experts, not to the model
            return stream
        return ({name: x for name, x in each.items() if name != REAL} for each in stream)

    def step(self, batch: Mapping[str, Tensor]) -> StepOutput:
        """Train on this dp rank's part of a batch: forward, backward, clip, update; waits for the
        result.

        batch: "inputs", "targets" and other inputs of the model, [B, ...] each, on any device,
        equal on all ranks of a dp rank. Raises BadNumbers if loss or gradients are not finite
        (on_nonfinite=stop), ConfigError if fields, shapes or dtypes differ from the config's.
        """
        batch, number = self._checked(batch), self.steps + 1
        if REAL in self._run.pipeline.used_fields():
            batch = with_real_tokens(batch)
        with self._collective("step", meet=self.last is None):
            if not self.last:
                self._first_step(batch)
            config, stream = self._step_config, iter([batch])
            result = measured_step(self._run, config, number, stream, self._detector, self._worker)
        record, anomaly = result.record, result.anomaly
        if anomaly is not None:
            if anomaly.action == "stop":
                raise BadNumbers(anomaly.text)
            record["skipped"] = anomaly.kind
        guard = self._detector.state()
        self._progress = replace(self._progress, step=number, value=record["loss"], guard=guard)
        self._worker.notify("step", record)
        self.last = StepOutput(
            step=number,
            loss=record["loss"],
            losses=record["microbatch_losses"],
            grad_norm=record["grad_norm"],
            lr=record["lr"],
            skipped=record.get("skipped"),
            record=record,
        )
        return self.last

    def forward(
        self, batch: Mapping[str, Tensor], *, microbatches: bool = False, everywhere: bool = False
    ) -> Any:
        """Run the model on this dp rank's batch in evaluation mode, without gradients. Returns its
        output on ranks with the last stage, None elsewhere.

        batch: as for `step`; targets are optional. microbatches: return a list of outputs, else one
        output [B, ...] of the same structure. everywhere: return it on all pipeline ranks. Logits
        cover the full sequence and vocabulary; with cp and tp other tensors are this rank's part.
        """
        checked = self._checked(batch, trains=False)
        with self._collective("forward"), torch.no_grad():
            self._run.train_mode(False)
            try:
                device_batch = to_device(checked, self.mesh, self.config)
                outputs = self._run.pipeline.outputs(device_batch, lambda output, _: output)
            finally:
                self._run.train_mode(True)
            outputs = [self._whole(output, checked["inputs"].shape[1:2]) for output in outputs]
        order = self.plan.order
        if everywhere and self.mesh.pp > 1:
            group = self.mesh.axes.get_group("pp")
            sent, source = [_on(outputs, torch.device("cpu"))], order.stage_to_rank[-1]
            source = dist.get_global_rank(group, source)
            dist.broadcast_object_list(sent, source, group, self.mesh.device)
            outputs = _on(sent[0], self.mesh.device)
        if not outputs:
            return None
        return outputs if microbatches else _concatenated(outputs)

    def validate(self) -> float:
        """Compute the loss of the validation data, as the command does."""
        self._own_data()
        with self._collective("validate"):
            metrics = validation_losses(self._run, self.config, self.data)
        assert metrics is not None, "it is not stopped"
        self._worker.notify("validation", self.steps, metrics["loss"])
        return metrics["loss"]

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank's stages by their names in the full model: DTensors if FSDP
        shards them, with tp and ep this rank's part."""
        return {n: p for state in self._run.stage_states for n, p in state.parameters()}

    def save(self) -> str:
        """Write a checkpoint, from which the command can resume, too; returns its path."""
        if not self.steps:
            raise ValueError("nothing to save: no step has been done")
        with self._collective("save"):
            if self._worker.rank == 0:
                write_config(self.config, self._worker.run_dir)
                keep_first_day(self.config)
            self._checkpointer.save(self._progress)
            self._checkpointer.finish(self._progress, done=False)  # waits, as checkpoint.mode=sync
        path = str(self._checkpointer.folder_of(self.steps))
        self._worker.notify("save", self.steps, path)
        return path

    def load(self, path: str | Path | None = None, *, weights_only: bool = False) -> int:
        """Load a checkpoint, saved in any layout; returns the number of steps it had done.

        path: a checkpoint, or a run for its newest one; None = as `checkpoint.resume` says: the
        newest of run_dir, or nothing if there is none. weights_only: keep optimizers and steps.
        Raises ValueError if the checkpoint is of a different model or different data.
        """
        with self._collective("load"):
            checkpointer = self._checkpointer
            if weights_only:
                checkpointer.loader.start_from(str(path or self.config.run_dir))
                return self.steps
            self._progress = (
                checkpointer.resume() if path is None else checkpointer.loader.load(str(path))
            )
        self._detector.load(self._progress.guard)
        return self.steps

    def close(self) -> None:
        """Stop threads, and destroy the process group if it was created here."""
        if "_checkpointer" in vars(self):
            self._checkpointer.close()
        if self._closes_group and dist.is_initialized():
            close_mesh()

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        # a rank that leaves its group would hide the first error from the others
        if error is None or self.mesh.world_size == 1:
            self.close()

    def __repr__(self) -> str:
        loss = f", loss {self.last.loss:.4f}" if self.last else ""
        described, step = self._layout(), f"step {self.steps}{loss}"
        return f"<TrainingRun of {described['model']}: {described['mesh']}; {step}>"

    def _repr_html_(self) -> str:
        """Show the stages as a table, and the schedule as a picture, in notebooks."""
        rows = self._layout()["stages"]
        heads = "".join(f"<th>{name}</th>" for name in rows[0])
        cells = ("".join(f"<td>{html.escape(f'{v}')}</td>" for v in row.values()) for row in rows)
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        text = f"<p>{html.escape(repr(self)[1:-1])}</p><table><tr>{heads}</tr>{body}</table>"
        return text + self.plan.order._repr_svg_()

    def _layout(self) -> dict[str, Any]:
        return layout(self.config, self.plan, self.mesh, self.data.description)

    # --- details ---------------------------------------------------------------------------------

    @contextmanager
    def _collective(self, call: str, meet: bool = True) -> Iterator[None]:
        """A context for a collective call, with the config's kernels. Raises BarrierTimeout if a
        rank does not come: with `meet` before the call, which costs the store a few requests per
        rank, else when communication has failed (a gloo send waits forever)."""
        self._calls += 1
        name, timeout = f"{call}() (call {self._calls} of a run)", self.config.launch.timeout
        if meet:
            barrier(self._worker, name, timeout)
            forget(self._worker, self._met)  # all ranks have left it, and keys must not pile up
            self._met = name
        try:
            with kernels(self.config, self.mesh.device):
                yield
        except RuntimeError as error:
            if not meet and describe(self._worker.rank, error).transport:
                barrier(self._worker, name, min(timeout, _GRACE))
            raise

    def _first_step(self, batch: Batch) -> None:
        """Check for coupled samples and compile, as the command does before its first step."""
        if not self.steps and may_mix_samples(self.config) and len(batch["targets"]) > 1:
            from titanlike.core.training.first_batch import refuse_mixed_samples

            refuse_mixed_samples(self._run, self.config, iter([batch]))
        if self._run.compiled:
            from titanlike.core.training.first_batch import compile_blocks

            compile_blocks(self._run, self.config, batch, self._worker)

    @functools.cached_property
    def _example(self) -> Batch:
        """A batch of one sample with this run's fields, shapes and dtypes, on meta."""
        return example_batch(self.config, self.data)

    def _checked(self, batch: Mapping[str, Tensor], trains: bool = True) -> Batch:
        """Check a batch, and make its tensors contiguous. Raises ConfigError if it does not fit
        this run.

        trains: whether targets are needed; missing ones are replaced by the inputs.
        """
        fields = ["inputs", "targets", *(n for n in self.plan.fields if n != "inputs")]
        if not isinstance(batch, Mapping):
            reason, fix = f"is a {type(batch).__name__}", f"a dict of tensors: {', '.join(fields)}"
            raise ConfigError([Problem("batch", "", reason, fix)])
        problems: list[Problem] = []
        for name in fields:
            if name in batch:
                problems += self._field_problems(name, batch[name])
            elif trains or name != "targets":
                problems.append(Problem("batch", "", f"has no {name}", f"a batch with {fields}"))
        for name in batch.keys() - {*fields, REAL}:
            problems.append(Problem("batch", name, "is not taken by the model", "leave it out"))
        alike = self._example["inputs"].shape == self._example["targets"].shape
        if not problems and "targets" in batch and alike:
            shapes = [list(batch[name].shape) for name in ("inputs", "targets")]
            if shapes[0] != shapes[1]:
                reason = f"inputs are {shapes[0]}, and targets {shapes[1]}"
                problems.append(Problem("batch", "", reason, "targets of the shape of inputs"))
        if problems:
            raise ConfigError(problems)
        checked = {name: value.contiguous() for name, value in batch.items()}
        return {"targets": checked["inputs"], **checked}

    def _field_problems(self, name: str, value: Any) -> Iterator[Problem]:
        """Yield a problem if a field's shape, dtype or ids do not fit this run."""
        key, example, dp = f"batch.{name}", self._example[name], self.config.dp
        size, _ = self.config.batch_shape(self.steps + 1)
        fix = f"a dense tensor {['B', *example.shape[1:]]} of {example.dtype}, "
        fix += f"B = batch_size / dp = {size} / {dp} = {size // dp} rows of each dp rank"
        if not isinstance(value, Tensor):
            yield Problem(key, "", f"is a {type(value).__name__}", fix)
            return
        floats = value.is_floating_point() and example.is_floating_point()
        same = value.dim() == example.dim() and (floats or value.dtype == example.dtype)
        dense = not value.is_meta and value.layout is torch.strided
        if not (same and dense and len(value) == size // dp):
            reason = f"has the shape {list(value.shape)}, and is {value.dtype} on {value.device}"
            yield Problem(key, "", f"{reason}, {value.layout}", fix)
            return
        names = ["inputs", *(["targets"] * takes_divided_logits(self.config.loss))]
        known = vocabulary_of(self.plan.model_graph.model, self.plan.model)
        # reading a GPU's would synchronize
        if floats or known is None or name not in names or not value.is_cpu:
            return
        ids = value[value != IGNORE] if name == "targets" else value
        low, high = (int(end) for end in ids.aminmax()) if ids.numel() else (0, 0)
        if low < 0 or high >= known:
            reason = f"has ids from {low} to {high}, and the model {known} ids"
            yield Problem(key, "", reason, f"ids from 0 to {known - 1}")

    def _own_data(self) -> None:
        if self.data.example is not None:
            raise ValueError("there are no data to read: build(example=...) was called")

    def _whole(self, output: Any, tokens: Sequence[int]) -> Any:
        """Gather an output's logits over cp and tp; tokens: [sequence length], or []."""
        if self.config.cp == self.config.layer_ranks == 1:
            return output
        try:
            gathered = logits = logits_of(output)
        except OutputError:  # there may be none with a custom loss
            return output
        for transform in self._run.transforms.values():
            gathered = transform.logits(gathered)
        if self.config.cp > 1:
            gathered = gathered[:, : tokens[0]]  # without padding
        leaves, rebuild = tree_flatten(output)
        return rebuild([gathered if leaf is logits else leaf for leaf in leaves])

    @functools.cached_property
    def _checkpointer(self) -> Checkpointer:
        """Created at the first save or load, on all ranks."""
        rank, run_dir, states = self._worker.rank, self._worker.run_dir, self._run.stage_states
        if rank == 0:
            run_dir.mkdir(parents=True, exist_ok=True)
        events = Events(run_dir, print if rank == 0 else None)
        return Checkpointer(states, self.config, self.data, events, self.mesh.dp_rank)


def _concatenated(outputs: Sequence[Any]) -> Any:
    """Concatenate microbatches' outputs over dim 0; unbatched leaves are the first output's."""
    leaves = [tree_flatten(output)[0] for output in outputs]
    _, rebuild = tree_flatten(outputs[0])

    def joined(same: Sequence[Any]) -> Any:
        batched = isinstance(same[0], Tensor) and same[0].dim() > 0
        return torch.cat([*same]) if batched else same[0]

    return rebuild([joined(same) for same in zip(*leaves, strict=True)])


def _on(outputs: Sequence[Any], device: torch.device) -> list[Any]:
    """Move the tensors in outputs to a device."""
    move = lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf  # noqa: E731
    return [tree_map(output, move) for output in outputs]
