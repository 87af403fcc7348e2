"""The documentation is true: commands run, tables are the code's, what it names exists."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from pathlib import Path

import pytest

import titanlike
from support.commands import shell
from support.paths import ROOT
from support.typed import typed
from titanlike.core.config import validate
from titanlike.core.config.overrides import in_full
from titanlike.core.config.parse import parse
from titanlike.core.config.schema import OPEN_GROUPS
from titanlike.planning.budget import Budget

_spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)

PAGES = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in generate.PAGES}
PAGES["CHANGELOG.md"] = (ROOT / "CHANGELOG.md").read_text("utf-8")
BLOCKS = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)

# Commands that no test of this file runs: a regular expression, and the reason.
NOT_RUN = {
    r"\bpip install|\bpre-commit|-m venv": "installs: .ci/run does it, in a fresh environment",
    r"^(pytest|ruff|\.ci/run)": "the tests themselves",
    r"\b(sbatch|srun)\b|#PBS|#BSUB": "needs a scheduler: tests/scripts runs SLURM's",
    r"kubectl": "needs Kubernetes: tests/scripts runs what the manifests run",
    r"mpirun|ssh |torch\.distributed\.run": "needs several machines: tests/launch runs two torchruns",
    r"(data|model)\.path=|data\.sources=|tokenize_corpus": "needs files of the user's: tests/data and tests/models have some",
    r"tools/bench\.py": "measures: tests/proof/test_overhead.py runs it",
    r"constraints\.txt": "prepares an environment",
    r"plan\.py search": "half a minute: tests/planning/test_plan.py searches",
    r"examples/\w+\.py": "tests/library runs them",
}
# What is added to runs of the default model, so that they take a second and not ten.
SMALLER = " model.hidden_size=32 model.intermediate_size=64 seq_len=16 validation.batches=1"
# Names that look like keys in inline code and are none of the schema's.
NOT_KEYS = {
    *[
        "trainer.max_steps",
        "loss.gamma",
        "data.delay",
        "last_call_timeout",
        "join_timeout",
        "lengths",
        "track_running_stats",
    ]
}
NOT_KEYS |= {"validation.data.path"}  # of a section of data, whose keys are checked there
NOT_KEYS |= {"temperature", "timeline"}  # of titanlike generate; short for timeline.enabled
NOT_KEYS |= {"gpus", *Budget.__dataclass_fields__}  # of titanlike plan run and search
# the changelog says what to use instead
NOT_KEYS |= {"sweep.submit", "sweep.wait", "sweep.share", "launch.elastic"}
NOT_KEYS |= {"warn_zero_gradients", "optimizer.state_dtype", "verify.repro"}


def commands(text: str) -> list[str]:
    """The commands of a page's sh blocks; a block that is a script, whole."""
    found = []
    for language, block in BLOCKS.findall(text):
        if language != "sh":
            continue
        lines = block.replace("\\\n", " ").splitlines()
        script = re.search(r"#PBS|#BSUB|mpirun|ssh |kubectl|TORCH_DISABLE", block)
        found += [block] if script else [line for line in lines if line.strip()]
    return found


def reason(command: str) -> str | None:
    """Why a command is not run."""
    return next((why for kind, why in NOT_RUN.items() if re.search(kind, command)), None)


def chains() -> dict[str, list[str]]:
    """The commands that run, by what they write; those with the same folder in their order."""
    found: dict[str, list[str]] = {}
    every = (line for _, text in sorted(PAGES.items()) for line in commands(text))
    for line in dict.fromkeys(every):
        if reason(line) is None:
            folder = re.search(r"outputs/\w+|order\.csv", line)
            if not re.search(r"--(check|cfg|help|list)|outputs/| steps=|printf", line):
                line += " --check"
            found.setdefault(folder[0] if folder else line, []).append(line)
    return found


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the checkout and takes what the commands write."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("train.py", "tools", "conf", "titanlike", "hydra_plugins", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return folder


# Of every kind of command one runs by default: the others do the same, with other overrides.
DEFAULT = {
    "order.csv",
    "python train.py --help",
    "python train.py experiment=gpt2_124m optimizer.lr=3e-4 --cfg job",
    "python tools/gpu_check.py --device cpu --list",
    "titanlike verify pp=2 tp=2 --check",
}
SHARDS = 4


def test_commands_run(checkout: Path) -> None:
    """In full where one says for how many steps, or names a run directory; else with --check."""
    assert chains().keys() >= DEFAULT
    for name in sorted(DEFAULT):
        for line in chains()[name]:
            run(line, checkout)


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_all_other_commands_run(shard: int, checkout: Path) -> None:
    others = [lines for name, lines in chains().items() if name not in DEFAULT]
    for lines in others[shard::SHARDS]:
        for line in lines:
            run(line, checkout)


def test_the_overrides_of_commands_are_right() -> None:
    """Of those that the checkout alone can run: known keys and choices, and values that may be."""
    seen = 0
    for page, text in PAGES.items():
        for line in commands(text):
            words = shlex.split(line) if not re.search(r"[|&;<>\n]", line) else []
            overrides = [word for word in words if re.match(r"[a-z_.]+=", word)]
            own = re.search(
                r"(^| )(-m|--config|PYTHONPATH|gpus=|[a-z.]*path=)|outputs/.*\.csv", line
            )
            known = not own and "experiment=" not in line and reason(line) is None
            if not known or "generate.py" in line or "evaluate.py" in line:
                continue
            config, wrong = parse(typed(map(in_full, overrides)))
            assert [*wrong, *validate.problems(config)] == [], f"{page}: {line}"
            seen += bool(overrides)
    assert seen > 25


def run(line: str, checkout: Path) -> None:
    if re.search(r"train\.py(?!.*(--| model=)).* steps=", line):
        line += SMALLER
    environment = {**os.environ, "WANDB_MODE": "disabled"}  # a second each
    done = shell(line, checkout, environment)
    assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_the_first_two_commands_install_and_run_and_install_and_test() -> None:
    """`.ci/run` takes the second from the README; the first is the main job of test_runs."""
    first, second = (line for line in commands(PAGES["README.md"]) if "pip install" in line)
    assert first == "pip install -e . -c constraints.txt && python train.py"
    assert second == "pip install -e '.[test]' -c constraints.txt && pytest"


def test_the_readme_stays_short_and_nothing_is_left_to_be_filled_in() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 180
    assert not [page for page, text in PAGES.items() if "@@" in text]


@pytest.mark.parametrize("page", PAGES)
def test_every_table_has_a_header_and_rows_of_its_width(page: str) -> None:
    lines = BLOCKS.sub("", PAGES[page]).splitlines()
    width = 0
    for above, line, below in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        if line.startswith("|"):
            columns = len(re.findall(r"(?<!\\)\|", line))
            if not above.startswith("|"):
                assert re.fullmatch(r"[|:\- ]+", below), f"a table begins without a header: {line}"
                width = columns
            assert columns == width, line


def test_the_promises_of_sources_name_tests_that_exist() -> None:
    tests = "".join(path.read_text("utf-8") for path in (ROOT / "tests" / "data").glob("*.py"))
    named = set(re.findall(r"`(test_\w+)`", PAGES["docs/data.md"]))
    assert named and [name for name in named if f"def {name}(" not in tests] == []


def test_users_import_from_titanlike_alone_and_one_page_lists_all_of_it() -> None:
    listed = (ROOT / "docs/library.md").read_text(encoding="utf-8")
    assert [n for n in titanlike.__all__ if f"`titanlike.{n}" not in listed] == []
    for name in titanlike.__all__:  # a package of the name would take its place once imported
        assert getattr(titanlike, name) and not (ROOT / "titanlike" / name).exists(), name
    examples = [
        *(ROOT / "examples").rglob("*.py"),
        *(ROOT / "docs").glob("*.md"),
        ROOT / "README.md",
    ]
    for file in examples:
        text = file.read_text(encoding="utf-8")
        assert not re.findall(r"(?m)^\s*(?:from|import) titanlike\..*", text), file


def test_generated_tables_match_the_code() -> None:
    for page, text in PAGES.items():
        assert generate.generated(text) == text, f"{page}: run python docs/generate.py"


@pytest.mark.parametrize("page", PAGES)
def test_every_key_file_and_link_of_a_page_exists(page: str) -> None:
    """Files, modules, keys, links and their headings."""
    text = PAGES[page]
    prose = BLOCKS.sub("", text)
    for span in re.findall(r"`([^`\n]+)`", prose):
        if re.fullmatch(r"(titanlike|tests|conf|docs|tools|examples|\.ci)/[a-z0-9_./-]*", span):
            assert (ROOT / span).exists(), f"{page}: no file {span}"
        if re.fullmatch(r"\w+\.py", span):
            assert next(ROOT.glob(f"**/{span}"), None), f"{page}: no file {span}"
        if re.fullmatch(r"titanlike(\.\w+){2,}", span) and span != "titanlike.plugins":
            module, _, name = span.rpartition(".")
            assert hasattr(importlib.import_module(module), name), f"{page}: no {span}"
        for key in keys_in(span):
            assert key in KEYS | NOT_KEYS, f"{page}: no key {key}"
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page}: link to {target}"
        assert not anchor or anchor in anchors(path.read_text("utf-8")), f"{page}: {target}"


def keys_in(span: str) -> list[str]:
    """The keys in a piece of inline code that is made of overrides, or is one key."""
    words = span.split()
    if words[:2] == ["python", "train.py"] or words[0] == "titanlike":
        words = [word for word in words if "=" in word]
    names = [re.fullmatch(r"\+?([a-z_]+(?:\.[a-z_]+)*)=\S*", word) for word in words]
    if names and all(names):
        return [name[1] for name in names if not name[1].startswith(("hydra.", "model."))]
    whole = re.fullmatch(r"([a-z]+)\.([a-z_]+)", span)
    return [span] if whole and whole[1] in GROUPS and whole[2] not in SUFFIXES else []


def known_keys() -> set[str]:
    rows = re.findall(r"^\| `([a-z_.]+)=?` \|", generate.keys(), flags=re.MULTILINE)
    own = {f"{group}.name" for group in OPEN_GROUPS} | {"optimizer.exact_on_shards"}
    return {*rows, *own, "experiment", "hydra/launcher", "hydra/sweeper"}


KEYS = known_keys()
GROUPS = {key.partition(".")[0] for key in KEYS if "." in key}
SUFFIXES = {"csv", "md", "html", "png", "svg", "json", "jsonl", "yaml", "py"}


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", BLOCKS.sub("", text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
