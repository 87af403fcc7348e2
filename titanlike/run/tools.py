"""Commands that launch nothing: `titanlike plan [search|run] ...`, `timeline RUN [RUN]`, `report RUN
[RUN]`, `scripts SCHEDULER DIR`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlike.core.config import validate
from titanlike.core.config.errors import ConfigError, Problem, Refused
from titanlike.core.config.groups.data import SyntheticData
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.groups.watching import TIMELINE
from titanlike.core.config.imports import TRUST_CODE
from titanlike.core.config.keys import MAX_RANKS
from titanlike.core.config.parse import MISSING, convert
from titanlike.core.config.program import argument_parser, exit_code, scripts_dir, train_program
from titanlike.core.config.schema import MESH_AXES, Config
from titanlike.core.data.kinds import DataError, vocabulary
from titanlike.run.argv import complete_args, parse_argv, parse_override
from titanlike.run.job import print_problems
from titanlike.run.overrides import CheckedOverrides, check_overrides

if TYPE_CHECKING:
    from titanlike.planning.timeline_report import TimelineReport
    from titanlike.planning.whole_run import RunTerms

_PLAN = (
    "Says what a run will cost before anything is paid for: memory of each rank, time of a step, "
    "tokens/s, MFU, bubble, traffic, and what is slow. No GPU, process group or data are needed. "
    "hardware= names the devices. `search` tries every layout of gpus=N devices for the global "
    "batch. `run` plans the whole run with its failures: days, money and goodput of tokens=N, with "
    "price= of a device and an hour, mtbf= of the job, start=, down=, storage= and step=. A search "
    "with days= and money= answers which of hardware=A,B, and how many, end such a run in time."
)


def plan(argv: list[str]) -> int:
    """Return the exit code: 0; 1 if the run would not fit; 2 for errors in the config."""
    usage = "%(prog)s [search|run] [key=value ...] [group=choice ...] [FLAG ...]"
    epilog = f"Takes the overrides of training: {shlex.join(train_program())} --help lists them."
    epilog += " Example: search experiment=llama3_8b gpus=64 hardware=h100_sxm"
    parser = argument_parser(_PLAN, usage=usage, epilog=epilog, allow_abbrev=False)
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object")
    text = "draw the pipeline: .svg or .png (%(const)s)"
    add("--picture", metavar="FILE", type=Path, nargs="?", const=Path("plan.svg"), help=text)
    text = "layouts that a search prints (%(default)s)"
    add("--top", metavar="N", type=int, default=10, help=text)
    flags, words = parser.parse_known_args(argv)
    mode = words.pop(0) if words[:1] in (["search"], ["run"]) else ""
    problems = list[Problem]()
    gpus = [word.partition("=")[2] for word in words if word.startswith("gpus=")][-1:]
    words = [word for word in words if not word.startswith("gpus=")]
    counts = gpus[0].split(",") if gpus else []
    for number in counts:
        if mode != "search":
            reason = f"is for a search; the devices of a plan are {' x '.join(MESH_AXES)}"
            problems.append(Problem("gpus", number, reason, f"plan search gpus={number}"))
        elif not number.isdigit() or not 1 <= int(number) <= MAX_RANKS:
            problems.append(Problem("gpus", number, "must be a number of devices", "gpus=64"))
    if flags.picture is not None and flags.picture.suffix not in (".svg", ".png"):
        key, reason = f"--picture {flags.picture}", "the picture's file must end in .svg or .png"
        problems.append(Problem(key, "", reason, "write --picture plan.svg"))
    devices = _devices(words, problems) if mode == "search" else [words]
    asked = [one for words in devices if (one := _read(words, mode, problems)) is not None]
    if problems or len(asked) < len(devices):
        return print_problems([*{str(problem): problem for problem in problems}.values()])
    environment = asked[0].environment
    try:
        if mode == "search":
            return _search(asked, [*map(int, counts)], flags)
        return _plan(asked[0].config, flags, asked[0].terms)
    except ConfigError as error:
        return print_problems([p.hiding(environment) for p in error.problems])
    except Refused as error:
        return print_problems([error.problem.hiding(environment)])
    except ModuleNotFoundError as error:  # an extra is not installed
        return print_problems([Problem("plan", "", f"{error.name} is not installed")])
    except BrokenPipeError:  # piped to `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


@dataclass(frozen=True)
class _Asked:
    """What a plan is asked for: a config, training's words that make it, and terms of the run."""

    config: Config
    words: list[str]
    terms: Any  # RunTerms of a whole run, Budget of a search for one, None of a step
    environment: Mapping[str, str]  # whose values are not shown


def _devices(words: list[str], problems: list[Problem]) -> list[list[str]]:
    """The words for each device of hardware=A,B, with its own of the prices, if there are several;
    adds to the problems if these are not as many."""
    named = [word for word in words if word.startswith("hardware=")][-1:]
    prices = [word for word in words if word.startswith("price=")][-1:]
    titles, costs = (("".join(each).partition("=")[2]).split(",") for each in (named, prices))
    if len(titles) < 2:
        return [words]
    rest = [word for word in words if word not in (*named, *prices)]
    costs = costs * len(titles) if len(costs) == 1 else costs
    if len(costs) != len(titles):
        reason = f"must be one price, or one for each of {', '.join(titles)}"
        problems.append(Problem("price", ",".join(costs), reason, f"price={costs[0]}"))
    return [
        [*rest, f"hardware={title}", *([f"price={cost}"] if cost else [])]
        for title, cost in zip(titles, costs, strict=False)
    ]


def _read(words: list[str], mode: str, problems: list[Problem]) -> _Asked | None:
    """Read the words of a plan on one device; adds to the problems what is wrong with them."""
    terms: Any = None
    if mode:
        from titanlike.planning.whole_run import RunTerms

        kind = RunTerms
        if mode == "search":
            from titanlike.planning.budget import Budget

            kind = Budget
        own = [word for word in words if word.partition("=")[0] in kind.__dataclass_fields__]
        words = [word for word in words if word not in own]
        given = dict[str, Any]()
        for word in own:
            name, _, text = word.partition("=")
            override = parse_override(word)
            swept = override is not None and override.is_sweep_override()
            given[name] = text if override is None or swept else override.value()
        if given or mode == "run":
            terms = convert(kind, given, "", problems)
    checked, _ = _examined(words)
    config, found = _without_data(checked)
    if checked.multirun:
        reason = "plans one layout, or searches for all of gpus=N"
        found.append(Problem("plan", "", f"{reason}; a sweep is for train.py"))
    if config is not None and not problems and not found:
        found += validate.problems(config)
    problems += [problem.hiding(checked.environment) for problem in found]
    return None if config is None else _Asked(config, words, terms, checked.environment)


def _search(asked: Sequence[_Asked], gpus: list[int], flags: argparse.Namespace) -> int:
    """Search the fastest layouts of a number of devices; or which devices, and how many, end a whole
    run in time."""
    say = partial(print, file=sys.stderr, flush=True)
    first = asked[0]
    if first.terms is None and len(asked) == 1 and len(gpus) < 2:
        from titanlike.planning.search import search, search_data, search_text

        devices = gpus[0] if gpus else first.config.world_size
        layouts = search(first.config, first.words, devices, flags.top, say)
        as_json = flags.json and json.dumps(search_data(layouts, flags.top))
        print(as_json or search_text(layouts, flags.top, _width()))
        return 0 if layouts.ranked else 1
    from titanlike.planning.budget import Budget, draw_offers, offers, offers_text

    budgets = [each.terms or Budget() for each in asked]
    devices = [(each.config, each.words, own) for each, own in zip(asked, budgets, strict=True)]
    found = offers(devices, gpus, say)
    if flags.json:
        print(json.dumps([offer.as_data() for offer in found]))
    else:
        print(offers_text(found, budgets[0], _width()))
    if flags.picture is not None:
        draw_offers(found, budgets[0], flags.picture)
    return 0 if any(offer.within for offer in found) else 1


def _examined(words: list[str]) -> tuple[CheckedOverrides, bool]:
    """Return the config of training's words, with its problems, and whether they have --check."""
    args = parse_argv(words)
    args.multirun = False
    complete_args(args)
    return check_overrides(args), args.check


def _without_data(checked: CheckedOverrides) -> tuple[Config | None, list[Problem]]:
    """Return the config and its problems. Data that are not here are no problem: random tokens of
    the model's vocabulary, if it says how large that is, take their place."""
    config, problems = checked.config, [*checked.problems]
    size = None if config is None else config.model.args.get("vocab_size")
    if config is None or type(size) is not int or isinstance(config.data, Custom):
        return config, problems
    missing = [p for p in problems if p.key.startswith("data.") and p.value == MISSING]
    try:
        if not missing:
            vocabulary(config.data)
    except DataError as error:
        missing = [error.problem]
    if missing:
        print(f"planned without data, with model.vocab_size={size}: {missing[0]}", file=sys.stderr)
        config = replace(config, data=SyntheticData(vocab_size=size))
    return config, [problem for problem in problems if problem not in missing]


def _plan(config: Config, flags: argparse.Namespace, terms: RunTerms | None) -> int:
    from titanlike.planning.advice import memory_warning
    from titanlike.planning.auto_schedule import WHY, with_found_order
    from titanlike.planning.estimate import make_estimate
    from titanlike.planning.estimate_text import as_data, as_text, chart_of
    from titanlike.planning.known_hardware import planned_hardware

    hardware = planned_hardware(config)
    say = (lambda _: None) if flags.json else print
    with contextlib.ExitStack() as stack:
        folder = config.run_dir  # of a run; nothing is written elsewhere
        if not (Path(folder) / WHY).exists():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
        ordered = with_found_order(replace(config, run_dir=folder), say)
        estimate = make_estimate(ordered, hardware)
        warning = ""
        if not estimate.fits:
            warning = memory_warning(config, estimate.plan, hardware.usable, 4.0)
        if terms is not None:
            from titanlike.planning.whole_run import plan_run, run_text

            run = plan_run(estimate, terms)
            print(json.dumps(run) if flags.json else run_text(run, estimate, warning, _width()))
        elif flags.json:
            print(json.dumps(as_data(estimate, warning)))
        else:
            print(as_text(estimate, warning, _width()))
        if flags.picture is not None:
            from titanlike.watch.chart_picture import draw

            draw(chart_of(estimate), flags.picture)
            if not flags.json:
                print(f"written: {flags.picture}")
    return 0 if estimate.fits else 1


_REHEARSE = (
    "Proves that the ranks of this command line cannot get out of step and wait for each other for "
    "ever, or names the line where they do. Each rank's own code runs without devices and without the "
    "other ranks: some steps, validation, saves, a stop request, a step with NaN, and a resume."
)


def rehearse(argv: list[str]) -> int:
    """Return the exit code: 0; 1 if ranks get out of step; 2 if that cannot be said, and for errors
    in the config."""
    parser = argument_parser(_REHEARSE, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    text = "run every rank, not one of each class of ranks that are equal by construction"
    parser.add_argument("--all", action="store_true", help=text)
    flags, words = parser.parse_known_args(argv)
    checked, only_check = _examined(words)
    config, problems = checked.config, checked.problems
    if config is not None and not problems:
        problems = validate.problems(config)
    if problems or config is None:
        return print_problems([problem.hiding(checked.environment) for problem in problems])
    if only_check:
        return 0
    from titanlike.proof.rehearse import as_data, as_text, rehearse

    try:
        result = rehearse(config, every_rank=flags.all)
    except ConfigError as error:
        return print_problems([p.hiding(checked.environment) for p in error.problems])
    lines = [json.dumps(as_data(result))] if flags.json else as_text(result, _width())
    print("\n".join(lines))
    return result.exit_code


def _width() -> int:
    return max(60, shutil.get_terminal_size().columns)


_TIMELINE = (
    "Prints the timeline that a run has recorded (timeline=true) next to its plan: what each rank "
    "computed and waited for, and how heavy stages are. Several runs are compared."
)


def timeline(argv: list[str]) -> int:
    """Return the exit code: 0; 2 if a run has no timeline."""
    parser = argument_parser(_TIMELINE, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument("--json", action="store_true", help="print one JSON object a run")
    parser.add_argument("--trust-code", action="store_true", help=TRUST_CODE)
    flags = parser.parse_args(argv)
    from titanlike.core.config.received import Consent, refuse_links
    from titanlike.planning.timeline_report import as_data, as_text, report_of

    consent = Consent(line=argv, trusted=flags.trust_code)
    reports: list[tuple[str, TimelineReport]] = []
    try:
        for run in flags.runs:
            refuse_links(run)
            reports.append((str(run), report_of(run, consent)))
        if flags.json:
            lines = [json.dumps(as_data(report)) for _, report in reports]
        else:
            lines = [as_text(reports, _width())]
    except ConfigError as error:
        return print_problems(error.problems)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        reason = f"a {TIMELINE} is not as it was recorded ({type(error).__name__}: {error})"
        fix = "give runs that recorded one: timeline=true"
        return print_problems([Problem("timeline", str(flags.runs[-1]), reason, fix)])
    print("\n".join(lines))
    return 0


def report(argv: list[str]) -> int:
    """Return the exit code: 0; 2 for a folder that is not a run's."""
    from titanlike.core.config.received import Consent, refuse_links
    from titanlike.planning.run_charts import planned_goodput, run_charts
    from titanlike.watch.report import FILE, write_reports

    parser = argument_parser(
        "Write a run's curves, events, configuration, layout, pictures and samples as one page, "
        "also while it runs; several runs are laid over each other."
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run_dir")
    parser.add_argument("--out", type=Path, help=f"the page (RUN/{FILE}; of several runs ./{FILE})")
    parser.add_argument("--trust-code", action="store_true", help=TRUST_CODE)
    flags = parser.parse_args(argv)
    out = flags.out or (flags.runs[0] / FILE if len(flags.runs) == 1 else Path(FILE))

    def write() -> int:
        for run in flags.runs:
            refuse_links(run)
        charts_of = partial(run_charts, planned=Consent((), argv, flags.trust_code))
        runs = [*dict.fromkeys(flags.runs)]
        page = write_reports(out, runs, charts_of, planned_goodput=planned_goodput)
        print(f"written: {page}")
        return 0

    return exit_code(write)


def scripts(argv: list[str]) -> int:
    """Copy the job scripts. The exit code is 2 if nothing was copied."""
    text = "Copy the job scripts of a scheduler into a folder. They need no checkout."
    parser = argument_parser(text)
    parser.add_argument("scheduler", choices=("slurm", "kubernetes", "skypilot"))
    parser.add_argument("folder", metavar="DIR", type=Path, help="made if it does not exist")
    parser.add_argument("--force", action="store_true", help="overwrite files")
    arguments = parser.parse_args(argv)
    source, folder = scripts_dir() / arguments.scheduler, arguments.folder
    files = sorted(path for path in source.iterdir() if path.is_file())

    def copy() -> int:
        existing = [path.name for path in files if (folder / path.name).exists()]
        if existing and not arguments.force:
            names = ", ".join(existing)
            raise FileExistsError(f"{folder} already has {names}; --force overwrites them")
        folder.mkdir(parents=True, exist_ok=True)
        for path in files:
            shutil.copy(path, folder)
        print(f"copied to {folder}: {', '.join(path.name for path in files)}")
        return 0

    return exit_code(copy)


def versions() -> str:
    """Return two lines: titanlike with its checkout's commit, torch with its build."""
    from importlib.metadata import version  # the import takes 0.05 s

    import torch

    from titanlike.core.device.accelerator import nccl_version
    from titanlike.core.metrics.run_files import own_version

    cuda, hip = torch.version.cuda, torch.version.hip
    lines = {
        "titanlike": own_version(),
        "torch": str(torch.__version__),
        "ROCm" if hip else "CUDA": hip or cuda or "none",
        "RCCL" if hip else "NCCL": nccl_version(),
        "Hydra": version("hydra-core"),
        "Python": sys.version.split()[0],
    }
    return "\n".join(f"{name:10}{text}" for name, text in lines.items())
