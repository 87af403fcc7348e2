"""The tables in the documentation that repeat the code: `python docs/generate.py` writes them;
`python docs/generate.py pictures` draws the pictures of the schedules.

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`; NAME is one of `TABLES`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import tomllib
import typing
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from titanlike.core.config.errors import override_text  # noqa: E402
from titanlike.core.config.groups.user_code import Model  # noqa: E402
from titanlike.core.config.schema import VARIANTS, Config  # noqa: E402

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def keys() -> str:
    """Every key of the config, with its default and meaning."""
    hints = typing.get_type_hints(Config)
    nested, groups = [], []
    scalars: list[tuple[str, ...]] = []
    for field in dataclasses.fields(Config):
        if field.name in VARIANTS or hints[field.name] is Model:
            groups += _group(field)
        elif dataclasses.is_dataclass(hints[field.name]):
            nested += _keys(hints[field.name], field.name)
        else:
            scalars.append(_key(field, ""))
    return _table(("key", "default", "meaning"), [*scalars, *nested, *groups])


def _group(field: dataclasses.Field) -> Iterator[tuple[str, ...]]:
    """A group's choices, then their keys, each once with the choices that have it."""
    folder = ROOT / "conf" / field.name
    choices = ", ".join(f"`{path.stem}`" for path in sorted(folder.glob("*.yaml")))
    yield f"`{field.name}=`", "", f"**{field.metadata['doc']}**: {choices}"
    variants = VARIANTS.get(field.name, {"": Model})
    choices_of: dict[tuple[str, ...], list[str]] = {}
    for name, variant in variants.items():
        for row in _keys(variant, field.name):
            choices_of.setdefault(row, []).append(name)
    for row, names in choices_of.items():
        others = [name for name in variants if name not in names]
        some = f"not {', '.join(others)}" if len(others) < len(names) else ", ".join(names)
        yield *row[:2], row[2] + (f" ({some})" if others else "")


def _keys(cls: type, group: str) -> Iterator[tuple[str, ...]]:
    for field in dataclasses.fields(cls):
        if field.name not in ("name", "args"):
            yield _key(field, f"{group}.")


def _key(field: dataclasses.Field, prefix: str) -> tuple[str, ...]:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    shown = "" if default is dataclasses.MISSING else f"`{override_text(default)}`"
    return f"`{prefix}{field.name}`", shown, field.metadata["doc"]


def schedules() -> str:
    """Bubble, activations and messages of each schedule, walked through its Order."""
    from titanlike.core.pipeline.schedules import SCHEDULES
    from titanlike.planning.costs.simulate import equal_stages, in_flight, simulate

    rows = []
    for name, schedule in SCHEDULES.items():
        looped = "stages_per_rank" in inspect.signature(schedule).parameters
        cells = []
        for pp, microbatches in ((4, 8), (4, 16), (8, 32)):
            order = schedule(pp, microbatches, **({"stages_per_rank": 2} if looped else {}))
            chunks = order.stages // pp
            cells.append(f"{simulate(order, equal_stages(order)).bubble:.0%}")
        hops = sum(
            a != b for a, b in zip(order.stage_to_rank, order.stage_to_rank[1:], strict=False)
        )
        peak = max(map(in_flight, order.ranks)) / chunks
        rows.append((f"`{name}`", *cells, f"{peak:g} of 32", f"{2 * hops * 32}"))
    bubbles = ("bubble pp=4, 8 microbatches", "pp=4, 16", "pp=8, 32")
    return _table(("schedule", *bubbles, "in flight pp=8, 32", "messages pp=8, 32"), rows)


def pictures() -> None:
    """docs/pictures: a plan of each schedule, of the default model with longer sequences."""
    from titanlike.core.config.parse import parse
    from titanlike.core.pipeline.schedules import SCHEDULES
    from titanlike.planning.auto_schedule import with_found_order
    from titanlike.planning.estimate import make_estimate
    from titanlike.planning.estimate_text import chart_of
    from titanlike.planning.known_hardware import shipped
    from titanlike.watch.chart_picture import draw

    folder = ROOT / "docs" / "pictures"
    folder.mkdir(exist_ok=True)
    model = {"name": "llama", "num_hidden_layers": 32, "vocab_size": 256}
    model |= {"hidden_size": 1024, "intermediate_size": 4096}
    model |= {"num_attention_heads": 8, "num_key_value_heads": 8}
    device = shipped("h100_sxm")
    for name in (*SCHEDULES, "auto"):
        plain = {"pp": 4, "batch_size": 8, "seq_len": 4096, "model": model}
        plain |= {"schedule": {"name": name, "microbatches": 8}, "precision": {"name": "bf16"}}
        config, problems = parse({**plain, "data": {"name": "synthetic"}})
        assert not problems, problems
        with TemporaryDirectory() as found:
            config = dataclasses.replace(config, hardware=device, run_dir=found)
            plan = make_estimate(with_found_order(config), device)
        draw(chart_of(plan), folder / f"{name}.svg")


def styles() -> str:
    """How a plan of tensor parallelism divides a module."""
    from titanlike.techniques.tp.plan import STYLES

    return _table(("style", "what is sharded"), [(f"`{n}`", text) for n, text in STYLES.items()])


def families() -> str:
    """The families of Hugging Face decoders that are tested."""
    from titanlike.hf.hf_config import FAMILIES

    return "\n".join(_wrapped(", ".join(FAMILIES) + "."))


def rooms() -> str:
    """The rooms, from the top of the import contract to the bottom, by their docstrings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    rows = []
    for contract in project["tool"]["importlinter"]["contracts"][:2]:  # the rooms, and the core's
        within = contract["containers"][0]
        for name in (name for layer in contract["layers"] for name in layer.split(" | ")):
            folder = f"{within}.{name}"
            if (ROOT / folder.replace(".", "/")).is_dir():
                text = inspect.getdoc(import_module(folder)) or ""
                sentence = re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()))[0]
                rows.append((f"`{folder.replace('.', '/')}/`", sentence))
    return _table(("room", "what it is for"), rows)


def closures() -> str:
    """How much of titanlike each command imports, at most."""
    import yaml

    rows = yaml.safe_load((ROOT / "tests/run/closures.yaml").read_text(encoding="utf-8"))
    told = [(f"`{r['command']}`", str(r["files"]), f"{r['lines']:,}") for r in rows]
    return _table(("command", "files", "lines"), told)


_TOUR = {
    "core/models/llama.py": "a model: shapes, no parallelism",
    "core/pipeline/schedules.py": "schedules as plain data, a paper a function",
    "core/graph/cut.py": "the recorded forward, cut into stages",
    "core/training/build.py": "this rank's stages: changed, sharded, filled",
    "core/training/step.py": "forward and backward, clip, update",
    "core/training/loop.py": "steps, validation, checkpoints, stops",
}


def tour() -> str:
    """The files to read first, and how long they are."""
    counts = {f: len((ROOT / "titanlike" / f).read_text().splitlines()) for f in _TOUR}
    rows = [(str(n), f"`titanlike/{f}`", str(counts[f]), _TOUR[f]) for n, f in enumerate(_TOUR, 1)]
    total = [("", "", str(sum(counts.values())), "")]
    return _table(("", "file", "lines", "what it is"), rows + total)


def main_path() -> str:
    """The files on the way from train.py to the optimizer's step."""
    import yaml

    path = ROOT / "tests/run/main_path.yaml"
    files = yaml.safe_load(path.read_text(encoding="utf-8"))["files"]
    counts = {f: len((ROOT / "titanlike" / f).read_text().splitlines()) for f in files}
    rows = [(f"`titanlike/{name}`", str(counts[name]), does) for name, does in files.items()]
    return _table(("file", "lines", "what it does"), [*rows, ("", str(sum(counts.values())), "")])


def stage_source() -> str:
    """The generated forward of the second of two stages."""
    import torch
    import yaml

    from titanlike.core.config.groups.data import SyntheticData
    from titanlike.core.config.groups.pipeline import Schedule
    from titanlike.core.graph.stage import Stage
    from titanlike.core.models.registry import build_model
    from titanlike.core.training.train_plan import make_plan

    sizes = yaml.safe_load((ROOT / "conf/model/llama_tiny.yaml").read_text())
    layers = next(key for key in sizes if "layers" in key)
    model = Model(sizes.pop("name"), sizes | {layers: 2})
    config = Config(
        pp=2, model=model, schedule=Schedule("1f1b", 4), data=SyntheticData(vocab_size=64)
    )
    plan = make_plan(config)
    stage = Stage(build_model(plan.model), *plan.stage_modules[1])
    graphs = plan.model_graph.graphs(plan.fields, True)
    stage.add_forwards((), {True: graphs[1]}, 1, torch.device("cpu"))
    return f"```python\n{stage.source.strip()}\n```"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(c.replace('|', chr(92) + '|') for c in r)} |" for r in lines)


def _wrapped(text: str) -> list[str]:
    from textwrap import wrap

    return wrap(text, 100, break_on_hyphens=False)


TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table
    for table in (keys, schedules, styles, families, rooms, closures, tour, main_path, stage_source)
}


def generated(text: str) -> str:
    """A page with its tables as the code gives them."""
    return _BLOCK.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}\n{m[3]}", text)


if __name__ == "__main__":
    if "pictures" in sys.argv[1:]:
        pictures()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(generated(text), encoding="utf-8")
