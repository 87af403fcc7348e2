"""A user's package: a model, data and a loss, with their configs.

    my_models/
      mixer.py                 the model, an ordinary nn.Module
      data.py                  a function that returns the data
      losses.py                a function that returns the losses of a microbatch
      conf/model/mixer.yaml    model=mixer
      conf/data/echo.yaml      data=echo
      conf/loss/focal.yaml     loss=focal

The package must be on Python's path, and its configs are found by `--config-dir`. From the folder
of `train.py`:

    export PYTHONPATH=examples
    python train.py --config-dir examples/my_models/conf model=mixer pp=2 dp=2
    python train.py --config-dir examples/my_models/conf model=mixer data=echo loss=focal pp=2
    python tools/verify.py --config-dir examples/my_models/conf model=mixer pp=2 dp=2

All keys of `mixer.yaml` can be set (`model.width=256`), any part of the model may begin a stage
(`split=points split.points=[trunk.blocks.2.mix]`), and with `titanlike.plugins` as an entry point an
installed package needs no `--config-dir`.
"""
