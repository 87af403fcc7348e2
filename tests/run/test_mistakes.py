"""Mistakes on the command line, also of users who come from elsewhere: all are told at once, before
anything starts, with what to write instead, which works."""

from __future__ import annotations

import copy
import dataclasses
import pkgutil
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.types import RunMode
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig

from support.cells import slow
from support.command_lines import applied, examined, problems_of, proposals, with_fix
from support.commands import TINY, command
from support.launched import Launched
from support.paths import ROOT
from titanlike.cli import JOBS, TOOLS
from titanlike.core.config import other_frameworks
from titanlike.core.config.errors import Problem
from titanlike.core.config.other_frameworks import Context, translate
from titanlike.core.config.overrides import key_of
from titanlike.core.config.schema import OPEN_GROUPS, VARIANTS, Config
from titanlike.run.argv import flat_keys

COUNTED = f"""
import runpy
from hydra._internal.config_loader_impl import ConfigLoaderImpl
compose = ConfigLoaderImpl.load_configuration
def counted(*args, **kwargs):
    print("composed")
    return compose(*args, **kwargs)
ConfigLoaderImpl.load_configuration = counted
from titanlike.core.config import validate
from titanlike.run import overrides
for module, name, done in (
    (overrides, "parse", "parsed"), (validate, "problems", "validated")
):
    def counted(*args, function=getattr(module, name), done=done):
        print(done)
        return function(*args)
    setattr(module, name, counted)
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
"""


def test_a_run_composes_and_parses_its_config_once(tmp_path: Path) -> None:
    """To check it and to run it; each composition takes a fifth of a second of every start. With
    hydra.verbose Hydra asks for it again, to print it."""
    (tmp_path / "counted.py").write_text(COUNTED)
    words = *TINY, "steps=1", "hydra.verbose=true"
    done = command(*words, cwd=tmp_path, tool=str(tmp_path / "counted.py"))
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(f"{what}\n") for what in ("composed", "parsed", "validated")] == [
        1
    ] * 3


def test_a_right_command_line_is_composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    composed, compose = [], ConfigLoaderImpl.load_configuration
    monkeypatch.setattr(
        ConfigLoaderImpl,
        "load_configuration",
        lambda *args, **kwargs: composed.append(args) or compose(*args, **kwargs),
    )
    for words in (["pp=2"], ["logger=none", "schedule=gpipe", "steps=3"]):
        composed.clear()
        assert not examined(*words).problems and len(composed) == 1


def test_the_last_of_repeated_keys_wins() -> None:
    found = examined("steps=1", "schedule=gpipe", "steps=2", "schedule=1f1b", "steps=1")
    assert found.problems == [] and found.config is not None and found.composed is not None
    assert (found.config.steps, found.config.schedule.name) == (1, "1f1b")
    lines = ["steps=1", "schedule=gpipe", "steps=2", "schedule=1f1b", "steps=1"]
    assert found.composed.hydra.overrides.task == lines, "result.json has what was typed"


def test_a_merged_mapping_reports_the_keys_that_remain(tmp_path: Path) -> None:
    """Hydra merges mappings: a plan of tensor parallelism that was to be another has both."""
    file = tmp_path / "model/planned.yaml"
    file.parent.mkdir()
    file.write_text("defaults: [llama_tiny]\ntp_plan: {a: colwise, b: rowwise}\n")
    at = f"hydra.searchpath=[{tmp_path}]", "model=planned"
    (line,) = examined(*at, "model.tp_plan={a:rowwise}").notes
    assert line.endswith("into the file's 2; of these stay: b")
    for plan in ("{a:rowwise,b:colwise}", "null"):
        assert not examined(*at, f"model.tp_plan={plan}").notes


def test_mistakes_of_every_kind_are_reported_together(tmp_path: Path) -> None:
    """Key, choice, another choice's key, added key, syntax, type, and rules between keys."""
    mistakes = ["dpp=2", "schedule=1f1bb", "data=synthetic", "data.path=x", "+foo=1", "a b"]
    mistakes += ["steps=x"]
    launched = Launched("hello", *mistakes, "dp=2", "batch_size=7", f"run_dir={tmp_path / 'run'}")
    code, out, err = launched.wait()
    assert code == 2 and out == "" and "Traceback" not in err
    lines = err.splitlines()
    assert lines[0] == "7 errors in the config; nothing was started"
    for start, remedy in {
        "dpp=2:": "write dp=2",
        "schedule=1f1bb:": "write schedule=1f1b",
        "data.path=x:": "write data=text data.path=x",
        "foo=1:": "unknown key",
        "a b:": "no such key",
        "steps=x:": "write steps=300",
        "batch_size=7:": "write batch_size=8",
    }.items():
        (line,) = (line for line in lines if line.strip().startswith(start))
        assert remedy in line
    assert not (tmp_path / "run").exists()


def test_terminal_control_sequences_are_escaped() -> None:
    for problem in problems_of(["tp=\x1b[31mred", "split.name=a\u202eb", "steps='\a'"]):
        assert str(problem).isprintable()
    assert "tp=\\x1b[31mred: must be an integer" in str(problems_of(["tp='\x1b[31mred'"])[0])
    assert "(5000 characters)" in str(Problem("seed", 5000 * "x", "must be an integer"))


def test_an_experiment_may_be_written_with_a_plus() -> None:
    findings = examined("+experiment=llama3_8b", "dp=32")
    assert findings.problems == []
    assert findings.config is not None and findings.config.dp == 32
    assert findings.config.schedule.name == "interleaved1f1b"


def test_every_choice_of_a_sweep_is_checked_before_its_first_job() -> None:
    findings = examined("-m", "schedule=gpipe,1f1bb", "schedule.stages_per_rank=2", "pp=1,two")
    keys = ["schedule", "schedule.stages_per_rank"]
    assert [problem.key for problem in findings.problems] == keys
    findings = examined("-m", "schedule=interleaved1f1b,gpipe", "schedule.stages_per_rank=2")
    assert [problem.key for problem in findings.problems] == ["schedule.stages_per_rank"]
    assert examined("-m", "schedule=gpipe,1f1b", "seed=range(3)").problems == []


def test_keys_of_a_choice_that_does_not_exist_are_no_errors_of_their_own() -> None:
    assert [problem.key for problem in problems_of(["data=custom", "data.name=my.data"])] == [
        "data"
    ]


def test_a_users_config_folder_adds_choices_and_must_exist(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("name: my.models.Mine\nwidth: 3\n")
    words = ["model=mine", "model.width=4", "+model.depth=2"]
    for arguments in (["--config-dir", str(tmp_path)], [f"hydra.searchpath=[{tmp_path}]"]):
        findings = examined(*arguments, *words)
        assert findings.problems == []
        assert findings.config.model.args == {"width": 4, "depth": 2}
    (problem,) = examined("--config-dir", str(tmp_path / "none")).problems
    assert problem.key == "--config-dir"


@pytest.mark.slow
def test_a_custom_experiment_names_its_choices(tmp_path: Path) -> None:
    """As on a command line, where `data.name=mine.sums` chooses own data."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "x.yaml").write_text("""# @package _global_
defaults:
  - override /optimizer: sgd
data: {name: mine.sums, length: 3}
lr: {name: mine.rsqrt}
logger: {name: none}
schedule: {name: interleaved1f1b, stages_per_rank: 3}
optimizer: {name: sgd, momentum: 0.5}
pp: 2
""")
    for how in (["--config-dir", str(tmp_path)], [f"hydra.searchpath=[{tmp_path}]"]):
        found = examined(*how, "experiment=x", "+data.width=4")
        assert found.problems == [] and found.config is not None
        config = found.config
        assert (config.data.name, config.data.args) == ("mine.sums", {"length": 3, "width": 4})
        assert config.lr.name == "mine.rsqrt" and config.logger.name == "none"
        assert (config.schedule.stages_per_rank, config.optimizer.momentum) == (3, 0.5)
    found = examined("--config-dir", str(tmp_path), "experiment=x", "logger=tensorboard")
    assert found.config is not None and found.config.logger.name == "tensorboard"
    (tmp_path / "experiment" / "y.yaml").write_text("# @package _global_\nlr: {name: cosine}\n")
    at = "--config-dir", str(tmp_path)
    for words in ("experiment=x,y", "experiment=y lr=linear,wsd", "lr.name=cosine,constant"):
        assert examined(*at, "-m", *words.split()).problems == []
    (problem,) = examined(*at, "-m", "experiment=y", "lr=wsd,nope").problems
    assert (problem.key, problem.fix) == ("lr", "lr=wsd,cosine")


def test_a_config_file_that_is_not_to_be_composed_is_refused_by_its_name(tmp_path: Path) -> None:
    """Without the line that gives its keys their place; with aliases that no machine expands."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "experiment/bare.yaml").write_text("steps: 5\nlr: {name: cosine}\n")
    names = [f"a{i}: &a{i} [{','.join(9 * [f'*a{i - 1}'])}]" for i in range(1, 9)]
    (tmp_path / "model/wide.yaml").write_text("\n".join(["name: llama", "a0: &a0 x", *names]))
    for word, said in {
        "experiment=bare": "bare.yaml has no line `# @package _global_`",
        "model=wide": "wide.yaml: it has 5.4e+07 values, by aliases of aliases",
    }.items():
        (problem,) = examined("--config-dir", str(tmp_path), word).problems
        assert word == f"{problem.key}={problem.value}" and said in problem.reason


@pytest.fixture(autouse=True, scope="module")
def _composed_once() -> Iterator[None]:
    """Hydra reads the same files for every command line: once is enough here."""
    compose, known = ConfigLoaderImpl.load_configuration, {}

    def load(self: ConfigLoaderImpl, name: str, lines: list[str], mode: RunMode) -> DictConfig:
        key = str(self.config_search_path), name, tuple(lines)
        if key not in known:
            known[key] = compose(self, name, lines, mode)
        return copy.deepcopy(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigLoaderImpl, "load_configuration", load)
        yield


LINES = [
    tuple(part.strip() for part in line.split("|"))
    for line in Path(__file__).with_name("command_lines.txt").read_text().splitlines()
    if not line.startswith("#")
]
TABLE = yaml.safe_load(Path(other_frameworks.__file__).with_suffix(".yaml").read_text())


# those that are fixed by default differ in what is wrong
SOME = {
    "lr=3e-4", "schedule.stages_per_rank=4", "batch_size=10k dp=3", "checkpoint.evry=5",
    "dp=4 sharding_strategy=FULL_SHARD", "model=llama_7b",
}  # fmt: skip


@pytest.mark.parametrize(
    "line, said, fixed",
    [pytest.param(*row, marks=[] if row[0] in SOME else pytest.mark.slow) for row in LINES],
    ids=[row[0] for row in LINES],
)
def test_a_mistake_is_explained_and_the_fix_that_is_proposed_is_accepted(
    line: str, said: str, fixed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("PATH").write_bytes(bytes(4 * 2**20))  # what data.path=PATH stands for
    words = shlex.split(line)
    assert said in "\n".join(map(str, problems_of(words)))
    assert applied(words) == (shlex.split(fixed), [])


MISTAKES = [  # the first three by default
    "replicate=2", "max_tokens=10B", "checkpoint.keep=x", "optimizer.betas=[1,2]", "loss.chunk=128",
    "pp=two dp=2 steps=x foo=1", "dp=3", "steps=1e99", "batch_size=7 dp=2", "max_time=soon",
    "deterministic=yes", "on_spike=halt", "value=accuracy", "fsdp.zero=4", "checkpoint.rename=[a]",
    "sweep.parallel=0", "split=balanced", "split.points=layers.3", "data.boundary=3",
    "schedule.path=a.csv", "data.workers=-1", "optimizer.eps=0", "lr.decay=2", "precision=half",
    "logger.entity=me/you", "logger=none logger.entity=me", "model=llama", "+trainer.max_steps=3",
    "checkpoint.start_from=a checkpoint.resume=b", "trainer=x",
]  # fmt: skip


@pytest.mark.parametrize("line", [*MISTAKES[:3], *slow(*MISTAKES[3:])])
def test_each_proposed_fix_ends_its_error(line: str) -> None:
    words = line.split()
    problems = problems_of(words)
    assert problems
    for problem in problems:
        assert str(problem).endswith(problem.fix)
        for fix in proposals(problem.fix):
            left = problems_of(with_fix(words, problem, fix))
            same = [p for p in left if (p.key, p.reason) == (problem.key, problem.reason)]
            assert not same, f"{line}: {fix} changes nothing"


ASKS_FOR_A_PATH = {"data.boundary=3", "model=llama"}  # of token files, which only a user knows


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(sorted({*MISTAKES} - ASKS_FOR_A_PATH)), min_size=2, max_size=5))
def test_the_fixes_of_several_mistakes_work_together(lines: list[str]) -> None:
    words: list[str] = []
    for line in lines:  # of keys that are not those of another line
        sections = {re.split(r"[.=]", word)[0] for word in line.split()}
        if not sections & {re.split(r"[.=]", word)[0] for word in words}:
            words += line.split()
    assert len(problems_of(words)) > 0
    assert applied(words)[1] == []


@pytest.mark.parametrize(
    "line, key",
    [
        ("batch_size=0 dp=2", "batch_size"),
        *slow(
            ("batch_size=0 dp=2 tp=2 ep=4 model=moe_tiny schedule.microbatches=4", "batch_size"),
            ("dp=2 ep=2 model=moe_tiny ramp=[{tokens:2048,batch_size:1}]", "ramp[0]"),
        ),
    ],
)
def test_a_batch_smaller_than_dp_is_one_error(line: str, key: str) -> None:
    """No model is tried with it, which would divide by zero."""
    [problem] = problems_of(line.split())
    assert problem.key == key


@pytest.mark.slow
def test_replacements_for_other_frameworks_keys_are_valid() -> None:
    """Every entry of the table, with a value that such a key has; many in each command line."""
    lines: list[dict[str, str]] = []
    for words in sorted({words for entry in TABLE for words in _written(entry)}):
        line = next((line for line in lines if not {*map(key_of, words)} & {*line}), None)
        if line is None:
            lines.append(line := {})
        line.update({key_of(word): word for word in words})
    # a choice among these words may lack the keys of another one; 2 is no share of 1
    known = re.compile(".*(has no such key|required|must be (below|at most) 1$)")
    wrong = [p for line in lines for p in examined(*line.values()).problems]
    assert [p for p in wrong if not known.match(p.reason)] == []


def _written(entry: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    write = entry.get("write", "")
    texts = "project|run_name|group|path|folder|run_dir|resume|start_from|tokenizer|text_key"
    if isinstance(write, dict):
        values = ["true" if key is True else "false" if key is False else str(key) for key in write]
    elif "betas={value}" in write:
        values = ["[0.9,0.99]"]
    elif "balance={value}" in write:
        values = ["[8]"]
    else:
        values = ["words" if re.search(texts, write) else "2"]
    for value in values:
        yield tuple(translate(entry["keys"].split()[0], value, Context())[0])


def test_options_of_torch_pipe_are_answered_with_this_programs_keys() -> None:
    """torchgpipe's Pipe(model, balance=[3, 5], devices=[0, 1], chunks=4)."""
    asked = {"balance": "[3,5]", "devices": "[0,1]", "chunks": "4"}
    answers = [translate(key, value, Context()) for key, value in asked.items()]
    words = [word for answer in answers if answer for word in answer[0]]
    assert words == ["split=balance", "split.balance=[3,5]", "dp=2", "schedule.microbatches=4"]
    config = examined("pp=2", *(word for word in words if word != "dp=2"))
    assert config.problems == []


def test_the_table_of_foreign_keys_holds_none_of_our_keys() -> None:
    names = [name for entry in TABLE for name in entry["keys"].split()]
    assert len(names) == len(set(names)) > 500
    own = {field.name for field in dataclasses.fields(Config)} - {*VARIANTS, *OPEN_GROUPS}
    # fsdp has keys below it here, and is a switch there
    assert own & set(names) == {"fsdp"}


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_an_option_of_a_tool_is_answered_with_the_tool(
    tool: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        pkgutil.resolve_name(f"titanlike.{TOOLS[tool].function}")(["--help"])
    options = {*re.findall(r"(?<= --)[a-z][a-z-]+", capsys.readouterr().out)} - {"help", "no-"}
    for option in options:
        answer = translate(f"{tool}.{option}", "1", Context())
        assert answer and f"titanlike {tool} --help" in answer[1], f"{tool} --{option}"


SECTIONS = {*TOOLS, *JOBS} - {"train", "perplexity"}  # a `perplexity` has the keys of `evaluate`


@pytest.mark.parametrize("tool", ["verify", *slow(*sorted(SECTIONS - {"verify"}))])
def test_a_key_of_one_tool_is_not_answered_with_another_tool(tool: str) -> None:
    """Each option of a tool, and each key of a section, under each other tool's name."""
    known = flat_keys(examined().composed)
    names = {name for entry in TABLE for name in entry["keys"].split() if "tool" in entry}
    names |= {name for name in known if name.partition(".")[0] in SECTIONS}
    options = {name.rpartition(".")[2] for name in names} - {*known}
    words = [f"{tool}.{option}=5" for option in sorted(options) if f"{tool}.{option}" not in known]
    found = [p for p in problems_of(words) if p.key.partition(".")[2] in options]
    assert len(found) > 40
    for problem in found:
        said = f"{problem.reason} {problem.fix}"
        others = SECTIONS - {tool, "sample" if "layout" in problem.key else ""}
        crossed = re.findall(rf"titanlike ({'|'.join(others)})\b|\b({'|'.join(others)})\.", said)
        assert not crossed, f"{problem.key}: {said}"


WORDS = st.lists(
    st.one_of(
        st.sampled_from(["pp=2", "--", "-m", "=", "steps", "3", "[1,", "2]", "logger=null", "~pp"]),
        st.builds(
            "{}{}{}".format,
            st.sampled_from(["", "+", "++", "~", "--", "-", "model.", "hydra.", "lr@"]),
            st.sampled_from(["pp", "model", "optimizer.lr", "hydra.run.dir", "a.b", "data", "x y", ""]),
            st.sampled_from(["=", "=null", "=${x}", "=${", "={a:1}", "=[a]", "='", "=1,2", "", " = 3"]),
        ),
        st.text("ab=.,:[]{}'\"$~+@/-\\ \n\tä0", max_size=8),
    ).filter(lambda word: not word.startswith(("-c", "-p", "-h", "-i", "-s", "-r"))),
    max_size=3,
)  # fmt: skip


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(WORDS)
@example(["--", "pp=${x}"])
def test_no_command_line_raises(words: list[str]) -> None:
    for problem in problems_of(words):
        assert "Traceback" not in str(problem)


@pytest.mark.parametrize(
    "tool, mode",
    [
        ("train.py", ["-m", "seed=1,2"]),
        ("tools/verify.py", ["--check"]),
        *slow(("train.py", []), ("train.py", ["--cfg", "job"])),
    ],
)
def test_every_command_reports_a_config_error_alike_and_exits_with_2(
    tmp_path: Path, tool: str, mode: list[str]
) -> None:
    words = ["logger=null", "--max-steps", "3", "trainer.devices=2"]
    done = command(*words, *mode, cwd=tmp_path, tool=tool)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    for fix in ("write logger=none", "write steps=3", "write dp=2"):
        assert fix in done.stderr
