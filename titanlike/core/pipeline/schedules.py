"""Schedules: functions that return an Order. To add one, write it here and add it to SCHEDULES.

A custom schedule is a function in any importable package,

    def mine(pp: int, microbatches: int, ...) -> Order

named by its import path: `schedule.name=package.module.mine`; the config group's other keys are
passed to it. `from_config` checks the Order that it returns.

Letters: F forward, B full backward, I and W its two halves (see `Action`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from titanlike.core.pipeline.order import Action, Order


def loop(pp: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """Place stages as 0 1 2 0 1 2: each round of stages visits the ranks in the same direction."""
    return tuple(range(pp)) * stages_per_rank


def vee(pp: int) -> tuple[int, ...]:
    """Place stages as 0 1 2 2 1 0: the first rank has the first and the last stage, and the loss."""
    return (*range(pp), *reversed(range(pp)))


def gpipe(pp: int, microbatches: int) -> Order:
    """All forwards, then all backwards (arXiv 1811.06965)."""
    return looped_bfs(pp, microbatches, stages_per_rank=1)


def one_f_one_b(pp: int, microbatches: int) -> Order:
    """Backward as soon as possible: rank r holds at most pp - r microbatches (arXiv 1806.03377)."""
    return interleaved_1f1b(pp, microbatches, stages_per_rank=1)


def interleaved_1f1b(pp: int, microbatches: int, stages_per_rank: int) -> Order:
    """1F1B over several stages per rank, for a smaller bubble (arXiv 2104.04473).

    Microbatches pass through a rank's stages in rounds of pp, or slightly more if pp does not
    divide their number: rounds differ by at most one microbatch, longer ones first.
    """
    size, longer = divmod(microbatches, max(1, microbatches // pp))
    rounds: list[range] = []
    while (start := rounds[-1].stop if rounds else 0) < microbatches:
        rounds.append(range(start, start + size + (len(rounds) < longer)))
    ranks = []
    for rank in range(pp):
        stages = [chunk * pp + rank for chunk in range(stages_per_rank)]
        forwards = [Action("F", s, mb) for mbs in rounds for s in stages for mb in mbs]
        backwards = [Action("B", s, mb) for mbs in rounds for s in reversed(stages) for mb in mbs]
        # warmup as in Megatron-LM: the first round on all stages but the last one, and two steps
        # per later rank; with a single stage one step per later rank is enough
        fill = pp - 1 - rank
        warmup = fill if stages_per_rank == 1 else 2 * fill + (stages_per_rank - 1) * len(rounds[0])
        ranks.append(_one_by_one(forwards, backwards, warmup))
    return Order(tuple(ranks), loop(pp, stages_per_rank), microbatches)


def _one_by_one(forwards: list[Action], backwards: list[Action], warmup: int) -> tuple[Action, ...]:
    """`warmup` forwards, then alternating forward and backward, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    pairs = zip(forwards[warmup:], backwards, strict=False)
    steady = [act for pair in pairs for act in pair]
    return (*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :])


def looped_bfs(pp: int, microbatches: int, stages_per_rank: int) -> Order:
    """All microbatches through a rank's first stage, then through its next one (arXiv 2211.05953)."""
    ranks = []
    for rank in range(pp):
        stages = [chunk * pp + rank for chunk in range(stages_per_rank)]
        forwards = [Action("F", s, mb) for s in stages for mb in range(microbatches)]
        backwards = [Action("B", s, mb) for s in reversed(stages) for mb in range(microbatches)]
        ranks.append((*forwards, *backwards))
    return Order(tuple(ranks), loop(pp, stages_per_rank), microbatches)


def interleaved_zero_bubble(pp: int, microbatches: int, stages_per_rank: int) -> Order:
    """Interleaved 1F1B with weight gradients in the bubble (arXiv 2401.10241, as in torch)."""
    place = loop(pp, stages_per_rank)
    return _generated("InterleavedZeroBubble", pp, microbatches, place)


def zero_bubble_h1(pp: int, microbatches: int) -> Order:
    """1F1B with delayed weight gradients: a third of the bubble, same memory (arXiv 2401.10241)."""
    return _with_weights_later(pp, microbatches, ahead=1)


def zero_bubble_h2(pp: int, microbatches: int) -> Order:
    """ZB-H1 with twice the microbatches in flight: no rank is idle between its first and its last
    action (arXiv 2401.10241). Here all ranks begin a step together, because of the all-reduce of
    the gradient norm, so a step is no shorter than with ZB-H1 if stages are equal."""
    return _with_weights_later(pp, microbatches, ahead=2)


def _with_weights_later(pp: int, microbatches: int, ahead: int) -> Order:
    """1F1B with split backwards: `ahead` warmup forwards per later rank; W is delayed by as many
    microbatches as make all ranks hold equally many activations."""
    ranks = []
    for rank in range(pp):
        forwards, inputs, weights = (
            [Action(kind, rank, mb) for mb in range(microbatches)] for kind in "FIW"
        )
        delay = ahead * rank
        acts = []
        for act in _one_by_one(forwards, inputs, ahead * (pp - 1 - rank)):
            acts.append(act)
            if act.kind == "I" and act.mb >= delay:
                acts.append(weights[act.mb - delay])
        ranks.append((*acts, *weights[max(0, microbatches - delay) :]))
    return Order(tuple(ranks), loop(pp), microbatches)


def v_half(pp: int, microbatches: int) -> Order:
    """A V placement with half of 1F1B's activations, and about half its bubble (arXiv 2405.15362)."""
    from titanlike.core.pipeline.building_blocks import repeated, v_half_block

    return repeated(v_half_block(pp), vee(pp), microbatches)


def v_min(pp: int, microbatches: int) -> Order:
    """A V placement with a third of 1F1B's activations (arXiv 2405.15362)."""
    from titanlike.core.pipeline.building_blocks import repeated, v_min_block

    return repeated(v_min_block(pp), vee(pp), microbatches)


def zbv_zero_bubble(pp: int, microbatches: int) -> Order:
    """Split backwards on a V of two stages per rank (arXiv 2401.10241 section 6, as in torch)."""
    return _generated("ZBVZeroBubble", pp, microbatches, vee(pp))


def dual_pipe_v(pp: int, microbatches: int) -> Order:
    """DualPipe cut in half: forwards overlapped with backwards on a V (DeepSeek, as in torch)."""
    return _generated("DualPipeV", pp, microbatches, vee(pp))


def _generated(class_name: str, pp: int, microbatches: int, place: tuple[int, ...]) -> Order:
    from titanlike.core.torch_private.pipeline_runtime import generated_order  # imports torch

    ranks = generated_order(class_name, pp, microbatches, len(place) // pp)
    return Order(tuple(tuple(Action(*act) for act in acts) for acts in ranks), place, microbatches)


# config name -> function(pp, microbatches), for a LoopedSchedule also stages_per_rank
SCHEDULES: Mapping[str, Callable[..., Order]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved1f1b": interleaved_1f1b,
    "loopedbfs": looped_bfs,
    "interleavedzerobubble": interleaved_zero_bubble,
    "zbh1": zero_bubble_h1,
    "zbh2": zero_bubble_h2,
    "vhalf": v_half,
    "vmin": v_min,
    "zbvzerobubble": zbv_zero_bubble,
    "dualpipev": dual_pipe_v,
}

LOOPED = ("interleaved1f1b", "loopedbfs", "interleavedzerobubble")  # any stages per rank
V_SCHEDULES = ("vhalf", "vmin", "zbvzerobubble", "dualpipev")  # always two stages per rank
