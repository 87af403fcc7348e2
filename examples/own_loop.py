"""A training loop of one's own, in any layout:

torchrun --nproc-per-node 4 own_loop.py pp=2 dp=2 steps=20
"""

import sys

import torch.distributed as dist

import titanlike


class Printed(titanlike.Callback):
    """What rank 0 prints."""

    def on_step(self, record):
        print(f"step {record['step']}: loss {record['loss']:.4f}")

    def on_save(self, step, path):
        print(f"saved {path}")


def main() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo")
    config = titanlike.config("data=synthetic", "steps=20", *sys.argv[1:])
    callbacks = [Printed()] if dist.get_rank() == 0 else []
    with titanlike.build(config, callbacks=callbacks) as run:
        run.load()  # the newest checkpoint of run_dir, if there is one
        for batch in run.batches():
            if run.steps >= config.steps:
                break
            result = run.step(batch)
            if max(result.losses) > 2 * result.loss:
                print(f"rank {dist.get_rank()}: a microbatch is unlike the others")
        loss = run.validate()
        run.save()
    if dist.get_rank() == 0:
        print(f"validation loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
