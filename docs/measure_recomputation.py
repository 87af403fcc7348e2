"""Print the table of docs/layouts.md: what activation checkpointing and weight gradients cost.

python docs/measure_recomputation.py  (about three minutes; forwards, products and peaks are exact,
seconds depend on the machine)
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

MODEL = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
MODEL |= {"intermediate_size": 352, "num_hidden_layers": 8, "vocab_size": None}


def main() -> None:
    from support.live_memory import measured
    from support.models import tiny
    from support.world import run_world
    from titanlike.core.config.groups.computation import (
        ActivationCheckpoint,
        EveryActivationCheckpoint,
        SelectiveActivationCheckpoint,
    )
    from titanlike.core.config.groups.pipeline import (
        LoopedSchedule,
        LoopedZeroBubbleSchedule,
        Schedule,
        ZeroBubbleSchedule,
    )
    from titanlike.core.config.groups.user_code import Custom

    schedules = [Schedule("1f1b", 8), LoopedSchedule(microbatches=8)]
    for gradients in ("deferred", "together"):
        schedules += [
            LoopedZeroBubbleSchedule(microbatches=8, weight_gradients=gradients),
            ZeroBubbleSchedule("zbvzerobubble", 8, gradients),
            ZeroBubbleSchedule("dualpipev", 8, gradients),
        ]
    choices = [
        ActivationCheckpoint("none"),
        SelectiveActivationCheckpoint(),
        EveryActivationCheckpoint(),
        ActivationCheckpoint("full"),
    ]
    print("| schedule | weight gradients |", *(f"`{how.name}` |" for how in choices))
    print("| --- | --- |", *("--- |" for _ in choices))
    for schedule in schedules:
        calls = MODEL["num_hidden_layers"] * schedule.microbatches
        cells = [f"`{schedule.name}`", getattr(schedule, "weight_gradients", "")]
        for how in choices:
            config = tiny(
                2, 1, schedule, model=Custom("llama", MODEL), seq_len=128, activation_checkpoint=how
            )
            with tempfile.TemporaryDirectory() as folder:
                ranks = run_world(measured, config, Path(folder))
            numbers = (
                f"{sum(rank.forwards for rank in ranks) / calls:.2f}",
                f"{sum(rank.products for rank in ranks) / calls:.1f}",
                f"{max(rank.peak for rank in ranks) / 2**20:.1f} MiB",
                f"{sum(rank.seconds for rank in ranks):.2f} s",
            )
            cells.append(" / ".join(numbers))
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
