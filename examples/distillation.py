"""Distillation: the logits of a frozen pipelined model are the targets of a smaller one.

torchrun --nproc-per-node 2 distillation.py [RUN]

RUN: the directory of the teacher's run; without it, the teacher has its initial weights.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

import titanlike

COMMON = ("pp=2", "data=synthetic", "batch_size=8", "seq_len=32", "logger=none")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}


def divergence(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """KL divergence [B, T] of the student's logits from the teacher's, [B, T, V] each."""
    ours, wanted = F.log_softmax(output.float(), -1), F.log_softmax(targets.float(), -1)
    return F.kl_div(ours, wanted, log_target=True, reduction="none").sum(-1)


def main() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo")
    teacher = titanlike.build(titanlike.config(*COMMON, model={**SIZES, "num_hidden_layers": 4}))
    if len(sys.argv) > 1:
        teacher.load(sys.argv[1], weights_only=True)
    # check=False: the loss takes logits as targets, which data=synthetic does not have
    config = titanlike.config(
        *COMMON,
        check=False,
        loss={"name": divergence},
        model={**SIZES, "num_hidden_layers": 2},
        optimizer={"lr": 1e-3},
        lr={"warmup": 1},
        steps=20,
    )
    like = next(teacher.batches())
    example = {"inputs": like["inputs"], "targets": torch.empty(*like["inputs"].shape, 256)}
    student = titanlike.build(config, example=example)
    for batch in teacher.batches():
        logits = teacher.forward(batch, everywhere=True)
        result = student.step({"inputs": batch["inputs"], "targets": logits})
        if dist.get_rank() == 0:
            print(f"step {result.step}: divergence {result.loss:.5f}")
        if result.step == config.steps:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
