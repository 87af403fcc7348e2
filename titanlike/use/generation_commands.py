"""`titanlike generate` and `titanlike evaluate`: text and metrics from a run, a checkpoint or a
transformers folder, in this process; perplexity by a job in the run's own layout."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from titanlike.core.checkpoint.state_dict import DTYPES
from titanlike.core.config import received
from titanlike.core.config.errors import nearest, quoted
from titanlike.core.config.groups.jobs import Sample
from titanlike.core.config.imports import TRUST_CODE
from titanlike.core.config.keys import value_problems
from titanlike.core.config.parse import write_config
from titanlike.core.config.program import argument_parser, exit_code
from titanlike.core.device.choose import first_device
from titanlike.core.launch.environment import child_environment, python
from titanlike.use.generate import LoadedModel, generate, load_model
from titanlike.use.sampling import Sampling

_GENERATE = """\
Text from a trained model. RUN is a run directory, of which the newest checkpoint is taken, a checkpoint,
or a folder of transformers. KEY=VALUE: temperature (0 = greedy), top_p, top_k, seed."""

_EVALUATE = """\
Perplexity and bits a byte of a run's newest checkpoint, on its validation data or on others
(KEY=VALUE are keys of the run: data.path=..., pp=2); or tasks of lm-evaluation-harness in one process, of
a run, a checkpoint or a folder of transformers. Results are written beside the checkpoint."""


def generate_main(argv: list[str]) -> int:
    """Run `titanlike generate`; returns the exit code, 2 for a user's error."""
    parser = _parser(_GENERATE, "")
    text = "to be continued; may be given several times"
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help=text)
    text = "the most tokens of each text (default: %(default)s)"
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help=text)
    parser.add_argument("--chat", action="store_true", help="ask for prompts, behind --prompt")
    text = "a whole forward for each token, to compare with"
    parser.add_argument("--no-cache", action="store_true", help=text)
    return _run(parser, argv, _generate)


def evaluate_main(argv: list[str]) -> int:
    """Run `titanlike evaluate`; returns the exit code, 2 for a user's error."""
    parser = _parser(_EVALUATE, "of tasks: ")
    parser.add_argument("--tasks", metavar="A,B", help="of lm-evaluation-harness")
    text = "a folder with task files (YAML) of your own; may be given several times"
    parser.add_argument("--task-files", action="append", default=[], metavar="DIR", help=text)
    text = "only so many documents of each task"
    parser.add_argument("--limit", type=int, metavar="N", help=text)
    text = "documents at a time (default: %(default)s)"
    parser.add_argument("--batch", type=int, default=8, metavar="N", help=text)
    return _run(parser, argv, lambda args: _tasks(args) if args.tasks else _perplexity(args))


def _parser(description: str, of: str) -> argparse.ArgumentParser:
    parser = argument_parser(description)
    parser.add_argument("run", metavar="RUN", nargs="?")
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="*")
    text = f"{of}of the weights (default: %(default)s)"
    parser.add_argument("--dtype", choices=[*DTYPES], default="fp32", help=text)
    text = f"{of}auto, cpu, cuda (default: %(default)s)"
    parser.add_argument("--device", default="auto", help=text)
    parser.add_argument("--ema", action="store_true", help="with the average of the weights")
    parser.add_argument("--trust-code", action="store_true", help=TRUST_CODE)
    return parser


def _run(
    parser: argparse.ArgumentParser,
    argv: list[str],
    command: Callable[[argparse.Namespace], int],
) -> int:
    arguments = parser.parse_intermixed_args(argv)
    arguments.line = argv
    if arguments.run is None:
        parser.error("which RUN? write the directory of a run, outputs/run")
    return exit_code(lambda: command(arguments))


def _load(arguments: argparse.Namespace) -> LoadedModel:
    device, dtype = first_device(arguments.device), DTYPES[arguments.dtype]
    return load_model(arguments.run, device, dtype, ema=arguments.ema, consent=_consent(arguments))


def _consent(arguments: argparse.Namespace) -> received.Consent:
    return received.Consent(arguments.settings, arguments.line, arguments.trust_code)


# --- generate -----------------------------------------------------------------------------------


def _generate(arguments: argparse.Namespace) -> int:
    if arguments.tokens < 1:
        raise ValueError(f"--tokens {arguments.tokens}: must be at least 1; write --tokens 200")
    if not arguments.prompt and not arguments.chat:
        raise ValueError("there is no prompt; write --prompt TEXT, or --chat")
    keys: dict[str, Any] = {field.name: field.default for field in fields(Sampling)}
    sampling, problems = Sampling(), []
    for word in arguments.settings:
        if received.is_place(word):
            continue
        key, equals, value = word.partition("=")
        if key not in keys or not equals:
            near = nearest(key, keys)
            fix = f"; write {near}={value or keys[near]}" if near else ""
            problems.append(f"{word}: not one of {', '.join(keys)}{fix}")
            continue
        try:
            sampling = replace(sampling, **{key: type(keys[key])(value)})
        except ValueError:
            problems.append(f"{word}: must be a number; write {key}={keys[key]}")
    drawn = {key: value for key, value in asdict(sampling).items() if key != "seed"}
    if problems := [*problems, *(str(p) for p in value_problems(Sample(**drawn)))]:
        raise ValueError("; ".join(problems))
    loaded = _load(arguments)
    if loaded.coder is None:
        reason = "its data were token ids, and it has no tokenizer"
        fix = "export it, and put a tokenizer.json into the folder"
        raise ValueError(f"{arguments.run}: {reason}; {fix}")
    if arguments.chat:
        return chat(loaded, arguments.tokens, sampling, arguments.prompt)
    prompts = [loaded.coder.encode(text) for text in arguments.prompt]
    begin = time.perf_counter()
    cached = not arguments.no_cache
    texts = generate(loaded, prompts, arguments.tokens, sampling, cached=cached)
    seconds = time.perf_counter() - begin
    for number, (prompt, ids) in enumerate(zip(arguments.prompt, texts, strict=True), 1):
        if len(texts) > 1:
            print(f"{'' if number == 1 else chr(10)}--- {number} of {len(texts)}")
        print(prompt + loaded.coder.decode(ids))
    count = sum(map(len, texts))
    print(f"{count} tokens, {count / seconds:.0f} tok/s; {loaded.origin}", file=sys.stderr)
    return 0


def chat(loaded: LoadedModel, tokens: int, sampling: Sampling, first: Sequence[str] = ()) -> int:
    """Answer the prompts `first`, then read more until the end of the input; returns the exit code.

    With a chat template the model answers the conversation so far; without one it continues the
    text. Tokens are printed as they are generated.
    """
    assert loaded.coder is not None
    coder, decode = loaded.coder, loaded.coder.decode
    print(f"{loaded.origin}; an empty line begins anew, Ctrl-D ends")
    messages: list[dict[str, str]] = []
    text, prompts = "", list(first)
    new, shown = list[int](), ""

    def show(_: int, token: int) -> None:
        nonlocal shown
        new.append(token)
        so_far = decode(new).rstrip("\ufffd")  # one character may take several tokens
        print(so_far[len(shown) :], end="", flush=True)
        shown = max(shown, so_far, key=len)

    while True:
        try:
            if prompts:
                print(f"> {(prompt := prompts.pop(0))}")
            else:
                prompt = input("> ")
        except EOFError:
            print()
            return 0
        if not prompt:
            messages, text = [], ""
            continue
        messages.append({"role": "user", "content": prompt})
        text += prompt
        ids = loaded.chat.prompt(messages) if loaded.chat else coder.encode(text)
        if loaded.most_tokens is not None and len(ids) + tokens > loaded.most_tokens:
            ids = ids[tokens - loaded.most_tokens :]  # keep the end of a long conversation
        new.clear()
        shown = ""
        [answered] = generate(loaded, [ids], tokens, sampling, on_token=show)
        answer = decode(answered)
        print(answer[len(shown) :])
        messages.append({"role": "assistant", "content": answer})
        text += answer


# --- evaluate -----------------------------------------------------------------------------------


def _perplexity(arguments: argparse.Namespace) -> int:
    """Run the perplexity job: on a run, in its layout; on a transformers folder, in the given
    layout. On data other than the run's, all of them are evaluated, not only the validation part.
    """
    run = Path(arguments.run).expanduser()
    words = arguments.settings
    keys = [word.partition("=")[0] for word in words]
    is_run = (run / "config.yaml").exists()
    if not is_run and not (run / "config.json").is_file():
        fix = "write the directory of a run, which has a config.yaml"
        raise ValueError(f"RUN={run}: is no run directory; {fix}")
    # the run's own path is no other data: it is named to say that it may be read
    own = f"data.path={getattr(received.read_run(run).data, 'path', None)}" if is_run else ""
    others = [word for word in words if word.startswith(("data=", "data.path=")) and word != own]
    is_other = not is_run or bool(others)
    part = ["evaluate.part=all"] if is_other and "evaluate.part" not in keys else []
    if is_other and is_run and not any(key.startswith("validation.data") for key in keys):
        part.append("validation.data=null")  # drop the run's own validation sets
    if is_run:
        return _in_layout(arguments, [*part, *words])
    if arguments.ema:
        raise ValueError(f"--ema: {run} is a folder with one set of weights; write it without")
    folder, line = quoted(str(run.absolute())), ["model=hf", "checkpoint.resume=never", *part]
    line += [f"model.path={folder}", "model.weights=load"]
    if "data.tokenizer" not in keys and not {"data=tokens", "data=synthetic"} & {*words}:
        line.append(f"data.tokenizer={folder}")
    with tempfile.TemporaryDirectory(prefix="titanlike-") as written:
        return _job([*line, f"run_dir={written}", "logger=none", *words])


def _job(words: list[str]) -> int:
    """Run `titanlike perplexity` in a process of its own; returns the exit code."""
    command = [*python(), "-m", "titanlike", "perplexity", *words]
    return subprocess.call(command, env=child_environment())


def _tasks(arguments: argparse.Namespace) -> int:
    received.check_places(arguments.settings)
    for package in ("lm_eval", "transformers"):
        if importlib.util.find_spec(package) is None:
            reason = f"{package} is not installed"
            raise ImportError(f"--tasks: {reason}; run pip install 'titanlike[eval]'")
    from titanlike.use.harness import evaluate_tasks

    loaded, tasks = _load(arguments), arguments.tasks.split(",")
    results = evaluate_tasks(loaded, tasks, arguments.task_files, arguments.limit, arguments.batch)
    for task, metrics in results.items():
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                print(f"  {task}  {name}  {value:.4f}")
    result = {"kind": "tasks", "limit": arguments.limit, "results": results}
    print(f"{loaded.origin}: written to {loaded.record(result)}")
    return 0


def _in_layout(arguments: argparse.Namespace, words: list[str]) -> int:
    """Run `titanlike perplexity` on a run with its config, as `read_run` reads it; returns the exit
    code.

    Raises ValueError if the config names files or code outside the run that the user has not
    allowed.
    """
    if arguments.ema:
        fix = "give --tasks, or read val_loss_ema in metrics.jsonl"
        raise ValueError(f"--ema: a job in the run's own layout loads its weights; {fix}")
    run = Path(arguments.run).expanduser()
    path, config = run / "config.yaml", received.read_run(run)
    named, checkpoints = received.named_outside(config, run), run / "checkpoints"
    is_link = config.checkpoint.folder is None and checkpoints.is_symlink()
    if is_link and not received.is_inside([str(checkpoints)], run):
        named["checkpoint.folder"] = str(checkpoints.resolve())
    _consent(arguments).check(path, named)
    folder = run / "perplexity"
    paths = chain([folder], folder.rglob("*"))
    if link := next((path for path in paths if path.is_symlink()), None):
        raise ValueError(f"{link}: is a link, and perplexity would write where it leads; remove it")
    with tempfile.TemporaryDirectory(prefix="titanlike-") as written:
        write_config(replace(config, run_dir=written), Path(written))
        return _job(["--config-path", written, f"run_dir={quoted(config.run_dir)}", *words])
