"""Folders as they are published are trained in a layout, and come back: the same logits in
transformers 5 and 4, and the same keys of their configs."""

from __future__ import annotations

import json
import os
import subprocess
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from support.cells import slow
from support.exported import ours, with_args
from support.published import published, small, write_published
from support.saved_runs import a_run, train_all
from titanlike.core.config.groups.jobs import Validation
from titanlike.core.config.groups.user_code import Model
from titanlike.core.config.received import Consent
from titanlike.core.models.registry import complete_arguments
from titanlike.core.models.rope_scaling import scaling_of
from titanlike.hf.hf_config import exported_config
from titanlike.hf.hf_export import export
from titanlike.hf.hf_names import FAMILIES, whole_sizes
from titanlike.run.checks import problems

OLD = os.environ.get("TITANLIKE_TEST_TRANSFORMERS4")  # an interpreter that has transformers 4
CONF = Path(__file__).parents[2] / "conf" / "model"
BUILT_IN = [name for name, entry in published().items() if "built_in" in entry]
FIRST = [("llama_3.2_1b", "built-in")]
REST = [
    (name, how) for how, names in (("hf", published()), ("built-in", BUILT_IN)) for name in names
]
# a built-in model leaves out what only training or a tokenizer's program reads
LEFT_OUT = {"initializer_range", "pretraining_tp", "transformers_version", "is_llama_config"}
LEFT_OUT |= {"bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "architectures"}
# keys that transformers 4.51 reads in the place of transformers 5's, with its defaults
ROPE = {"rope_theta": 10000.0, "rope_scaling": None}
READ_BY_4 = dict.fromkeys(("llama", "qwen2", "qwen3", "deepseek_v3", "olmo2", "granite"), ROPE)
READ_BY_4 |= {
    **{
        "mistral": {"rope_theta": 1e4},
        "mixtral": {"rope_theta": 1e6},
        "gemma2": {"rope_theta": 1e4},
    },
    "phi3": ROPE | {"partial_rotary_factor": 1.0},
    "qwen3_moe": ROPE | {"num_experts": 128},
    "gemma3_text": {"rope_theta": 1e6, "rope_scaling": None, "rope_local_base_freq": 10000.0}
    | {"sliding_window_pattern": 6},
}


def preset(entry: dict[str, Any]) -> Model:
    """A built-in model by the name of its file, or with its defaults."""
    file = CONF / f"{entry['built_in']}.yaml"
    args = yaml.safe_load((file if file.exists() else CONF / "llama_tiny.yaml").read_text())
    return Model(args.pop("name"), args)


def sizes_of(config: dict[str, Any]) -> dict[str, Any]:
    """The sizes of the built-in model that a config is."""
    settings = transformers.AutoConfig.for_model(**deepcopy(config)).to_dict()
    every = [theirs for several in FAMILIES.values() for theirs in several]
    [theirs] = [theirs for theirs in every if theirs.model_type == config["model_type"]]
    assert theirs.unsupported(settings) == []
    return theirs.our_sizes(settings)


@pytest.mark.parametrize("name", BUILT_IN)
def test_presets_are_the_published_models(name: str) -> None:
    entry = published()[name]
    model = preset(entry)
    differ = {
        key: value
        for key, value in sizes_of(entry["config"]).items()
        if whole_sizes(complete_arguments(model))[key] != value
    }
    if entry["built_in"] == model.name:  # without a preset
        return
    assert differ.keys() <= {"bias_rate"}  # of training alone


@pytest.mark.parametrize("name", published())
def test_a_config_from_scratch_has_the_keys_of_both_versions(name: str) -> None:
    config = small(published()[name]["config"])
    settings = transformers.AutoConfig.for_model(**deepcopy(config))
    written = exported_config(transformers, settings, None)
    again = transformers.AutoConfig.for_model(**deepcopy(written))
    for key in settings.to_dict().keys() - {"dtype", "architectures", "transformers_version"}:
        one, other = (getattr(each, key) for each in (settings, again))
        if key == "rope_parameters":
            one.pop("type", None), other.pop("type", None)  # an older name of rope_type
        assert one == other, key
    defaults = READ_BY_4.get(config["model_type"], {})
    for key in settings.to_dict().keys() & config.keys() - LEFT_OUT:
        assert written[key] == getattr(settings, key), key
    for key in defaults:
        value = config.get(key, defaults[key])
        if isinstance(value, dict) and "type" in value and value["type"] != "longrope":
            value = {"rope_type": value["type"], **value}
            del value["type"]
        assert written[key] == value, key


@pytest.mark.parametrize("name, how", [*FIRST, *slow(*(row for row in REST if row not in FIRST))])
def test_a_published_folder_is_trained_and_comes_back(name: str, how: str, tmp_path: Path) -> None:
    config = write_published(name, tmp_path / "in")
    run = a_run(tmp_path / "run", 2, 2, steps=1, last=True, every=0)
    run = replace(run, optimizer=replace(run.optimizer, lr=0.01), validation=Validation(every=0))
    if how == "hf":
        run = replace(run, model=Model("hf", {"path": str(tmp_path / "in")}))
    else:
        start = replace(run.checkpoint, start_from=f"hf:{tmp_path / 'in'}")
        model = with_args(preset(published()[name]), **sizes_of(config))
        run = replace(run, model=model, checkpoint=start)
    assert list(problems(run)) == []
    assert train_all(run) == [""]
    out = tmp_path / "out"
    export(run.run_dir, str(out), "fp32", consent=Consent(files=True))
    written = json.loads((out / "config.json").read_text())
    if how == "hf":
        assert written == {
            **config,
            **dict.fromkeys(written.keys() & {"dtype", "torch_dtype"}, "float32"),
        }
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            assert json.loads((out / file).read_text()) == json.loads(
                (tmp_path / "in" / file).read_text()
            )
    else:
        assert sizes_of(written) == sizes_of(config)
        for key, default in READ_BY_4.get(config["model_type"], {}).items():
            one, other = (each.get(key, default) for each in (written, config))
            if key == "rope_scaling":
                one, other = scaling_of(one), scaling_of(other)
            assert one == other, key
    ids = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mine = ours(run)(ids)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        assert (theirs(ids).logits - mine).abs().max() < 3e-5 < 0.1 < mine.std()
    if OLD and config["model_type"] not in ("gpt_oss", "smollm3", "deepseek_v2"):
        code = Path(__file__).parents[1] / "support/logits_of_folder.py"
        torch.save(ids, out / "ids.pt")
        subprocess.run([OLD, "-P", code, out], check=True, env={**os.environ, "PYTHONPATH": ""})
        assert (torch.load(out / "logits.pt") - mine).abs().max() < 3e-5
