"""Whether a divided model computes what the whole one does, before anything starts.

The model's forward runs on meta twice: whole, and divided as the first tensor-parallel rank has it.
Layers that the plan divides are known to be right. Of each operation outside of them the second run
finds which dimensions the rank has a part of (`layout.py`) and whether it computes its part of the
result (`operators.py`), and of each whole parameter whether its gradient is a part of a sum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from torch import Tensor, nn

from titanlike.distributed.placement import Placement
from titanlike.parallel.tp.collectives import TensorRanks
from titanlike.parallel.tp.divided_run import DividedRun, Mistake, Need, PlanError
from titanlike.parallel.tp.layout import WrongCall
from titanlike.parallel.tp.plan import Entry
from titanlike.parallel.tp.seen_run import (
    CallKey,
    WholeRun,
    shapes_of,
    tensors_in,
)
from titanlike.parallel.tp.styles import mark
from titanlike.torch_private.compiler import as_if_compiling


class Comparison:
    """Of a model's forward whole and divided: `before` it is divided, and `after`."""

    def __init__(self, model: nn.Module, modules: Mapping[str, Entry], key: CallKey) -> None:
        """key: equal for calls of modules that compute the same; None where that is not known."""
        self._model, self._modules, self._key = model, modules, key
        self._whole: WholeRun | None = None
        self._compiling = False
        self.unchecked = ""  # why there is nothing to compare with

    def before(self, batch: dict[str, Tensor]) -> None:
        """batch: on meta, of one microbatch, in the dtypes of the model."""
        for name, entry in self._modules.items():
            mark(self._model.get_submodule(name), entry)
        try:
            self._record(batch)
        except Exception:  # whatever a forward raises
            self._compiling = True
            try:
                with as_if_compiling():
                    self._record(batch)
            except Exception as error:
                self.unchecked = str(error).strip().splitlines()[0] if str(error) else repr(error)

    def _record(self, batch: dict[str, Tensor]) -> None:
        whole = WholeRun(self._model, self._modules, self._key)
        whole.output = shapes_of(tensors_in(whole.run(batch)))
        self._whole = whole

    def after(
        self,
        model: nn.Module,
        batch: dict[str, Tensor],
        placements: Mapping[str, Placement],
        ranks: TensorRanks,
        vocabulary: bool,
    ) -> dict[str, set[bool]]:
        """model: divided, a copy of its own; vocabulary: the loss takes divided logits.

        Gives the modules that draw random numbers in training, and whether for whole tensors (False),
        for parts (True) or both. Raises PlanError.
        """
        if self._whole is None:
            return {}
        run = DividedRun(model, self._modules, self._key, self._whole.steps, placements)
        compiling = as_if_compiling() if self._compiling else contextlib.nullcontext()
        try:
            with compiling:
                output = run.run(batch)
            run.finish(output, self._whole.output, vocabulary)
        except PlanError:
            raise
        except WrongCall as wrong:
            called = f"calls {run.called}: " if run.called else ""
            mistake = Mistake(
                run.path, called + wrong.reason, wrong.division, wrong.pieces, wrong.style
            )
            raise PlanError([mistake]) from None
        except Exception as error:  # of the forward's own
            text = str(error).strip().splitlines()[0] if str(error) else ""
            reason = f"raises {type(error).__name__}: {text}"
            raise PlanError([Mistake(run.path, reason)]) from error
        mistakes = _gradient_mistakes(model, run.needs(), placements, ranks)
        if mistakes:
            raise PlanError(mistakes)
        return run.draws


def _gradient_mistakes(
    model: nn.Module,
    needs: Mapping[str, set[Need]],
    placements: Mapping[str, Placement],
    ranks: TensorRanks,
) -> list[Mistake]:
    """Whole parameters whose gradients are summed over ranks and should not be, or the reverse."""
    found: dict[str, Mistake] = {}
    for name, own in needs.items():
        if name not in placements and own - {"never"}:
            module = name.removeprefix("the result of ")
            reason = "gives whole activations, which meet a rank's part of others elsewhere"
            found.setdefault(module, Mistake(module, reason, style="gather"))
    for name, parameter in model.named_parameters():
        placement, own = placements[name], needs[name]
        if placement.part is not None or not own or not parameter.requires_grad:
            continue
        module, _, last = name.rpartition(".")
        if "never" in own and len(own) > 1:
            reason = f"its {last} is used with whole activations and with a rank's part of others"
            found.setdefault(module, Mistake(module, reason))
            continue
        if "features" in own:
            needed, style, what = "always", "replicate_sum", "a rank's part of heads or features"
        elif "tokens" in own:
            needed, style, what = "sequence", "sequence", "a rank's part of the tokens"
        else:
            needed, style, what = "never", "replicate", "whole activations"
        given = placement.partial
        given = "never" if given == "sequence" and not ranks.sequence else given
        if given != needed:
            summed = "is not summed" if given == "never" else "is summed"
            summed = "is summed in some batches" if given == "sequence" else summed
            reason = f"computes with {what}, and the gradient of its {last} {summed} over the ranks"
            found.setdefault(module, Mistake(module, reason, style=style))
    return list(found.values())
