"""`titanlike generate RUN --prompt TEXT`: text from a run, a checkpoint or a folder of transformers."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

from titanlike.checkpoint.state_dict import DTYPES
from titanlike.config.errors import nearest, quoted
from titanlike.config.imports import TRUST_CODE
from titanlike.config.program import program
from titanlike.generation.in_layout import run_in_layout
from titanlike.generation.sampling import Sampling

_DESCRIPTION = """\
Text from a trained model. RUN is a run directory, of which the newest checkpoint is taken, a checkpoint,
or a folder of transformers. KEY=VALUE: temperature (0 = greedy), top_p, top_k, seed."""


def main(argv: list[str] | None = None) -> int:
    """The exit code: 2 for an error of the user's."""
    parser = argparse.ArgumentParser(prog=shlex.join(program()), description=_DESCRIPTION)
    parser.add_argument("run", metavar="RUN", nargs="?")
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="*")
    text = "to be continued; may be given several times"
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help=text)
    text = "the most tokens of each text (default: %(default)s)"
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help=text)
    parser.add_argument(
        "--chat", action="store_true", help="ask for prompts, behind those of --prompt"
    )
    text = "a whole forward for each token, to compare with"
    parser.add_argument("--no-cache", action="store_true", help=text)
    text = "of the weights (default: %(default)s)"
    parser.add_argument("--dtype", choices=[*DTYPES], default="fp32", help=text)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (default: auto)")
    text = (
        "in the run's own pp, dp and tp, for a model that does not fit one process; KEY=VALUE may "
    )
    text += "then be any key of the run, such as pp=4"
    parser.add_argument("--layout", action="store_true", help=text)
    parser.add_argument("--trust-code", action="store_true", help=TRUST_CODE)
    arguments = parser.parse_intermixed_args(argv)
    if arguments.run is None:
        parser.error("which RUN? write the directory of a run, outputs/run")
    try:
        if arguments.tokens < 1:
            raise ValueError(f"--tokens {arguments.tokens}: must be at least 1; write --tokens 200")
        if not arguments.prompt and not arguments.chat:
            raise ValueError("there is no prompt; write --prompt TEXT, or --chat")
        if arguments.layout:
            return _in_layout(arguments)
        sampling = parse_sampling(arguments.settings)
        return _here(arguments, sampling)
    except (ValueError, OSError, ImportError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def parse_sampling(words: list[str]) -> Sampling:
    """Raises ValueError for all wrong words at once."""
    sampling, problems = Sampling(), []
    known = {field.name: type(getattr(sampling, field.name)) for field in fields(Sampling)}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in known or not equals:
            near = nearest(key, known)
            fix = f"write {near}={value or getattr(sampling, near)}" if near else ""
            problems.append(f"{word}: not one of {', '.join(known)}, nor with --layout; {fix}")
            continue
        try:
            sampling = replace(sampling, **{key: known[key](value)})
        except ValueError:
            example = getattr(sampling, key)
            problems.append(f"{word}: must be a number; write {key}={example}")
    problems += sampling.problems()
    if problems:
        raise ValueError("; ".join(problems))
    return sampling


def _here(arguments: argparse.Namespace, sampling: Sampling) -> int:
    from titanlike.device.choose import first_device
    from titanlike.generation.loaded_model import load_model

    loaded = load_model(
        arguments.run,
        first_device(arguments.device),
        DTYPES[arguments.dtype],
        arguments.trust_code,
    )
    if loaded.coder is None:
        reason = "its data were token ids, and it has no tokenizer"
        raise ValueError(
            f"{arguments.run}: {reason}; export it, and put a tokenizer.json into the folder"
        )
    if arguments.chat:
        from titanlike.generation.chat import chat

        return chat(loaded, arguments.tokens, sampling, arguments.prompt)
    from titanlike.generation.generate import generate

    prompts = [loaded.coder.encode(text) for text in arguments.prompt]
    begin = time.perf_counter()
    cached = not arguments.no_cache
    found = generate(loaded, prompts, arguments.tokens, sampling, cached=cached)
    seconds = time.perf_counter() - begin
    print_texts(arguments.prompt, [loaded.coder.decode(ids) for ids in found])
    count = sum(map(len, found))
    print(f"{count} tokens, {count / seconds:.0f} tok/s; {loaded.origin}", file=sys.stderr)
    return 0


def print_texts(prompts: list[str], texts: list[str]) -> None:
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        if len(prompts) > 1:
            print(f"{'' if number == 0 else chr(10)}--- {number + 1} of {len(prompts)}")
        print(prompt + text)


def _in_layout(arguments: argparse.Namespace) -> int:
    """By the job that samples in a run's own layout."""
    if arguments.chat or arguments.no_cache:
        raise ValueError("--layout: not with --chat or --no-cache; leave them out")
    own = [field.name for field in fields(Sampling)]
    settings: list[str] = []
    for word in arguments.settings:
        key = word.partition("=")[0]
        settings.append(f"sample.{word}" if key in own and key != "seed" else word)
    prompts = ",".join(map(quoted, arguments.prompt))
    words = [f"sample.prompts=[{prompts}]", f"sample.tokens={arguments.tokens}", *settings]
    return run_in_layout("sample", Path(arguments.run).expanduser(), words, arguments.trust_code)
