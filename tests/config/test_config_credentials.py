"""Keys, tokens and passwords: refused in a config, and *** wherever a text might show them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlike.config.credentials import (
    find_secrets,
    is_secret_name,
    redact,
    redact_command,
    redact_output,
    redact_override,
    redact_value,
)
from titanlike.config.errors import Problem
from titanlike.config.parse import to_plain
from titanlike.config.schema import VARIANTS, Checkpoint, Config, Custom
from titanlike.job.check import problems, secret_problems, secrets_in_command

VALUE = "pa ss/w\"ord%\\'1"
TEXTS = {  # with a credential -> how it may be shown
    "s3://me:sesame@bucket/runs": "s3://***@bucket/runs",
    "simplecache::https://me:se@same@host/x": "simplecache::https://***@host/x",
    "redis://:sesame@host": "redis://***@host",
    "GET https://sesame@host/x failed": "GET https://***@host/x failed",
    "https://h/x?X-Amz-Signature=sesame&v=1": "https://h/x?X-Amz-Signature=***&v=1",
    "https://h/x?v=1&sig=sesame": "https://h/x?v=1&sig=***",
    "abfs://c@h/x?sas_token=sesame": "abfs://c@h/x?sas_token=***",
    "hf_" + "a" * 34: "***",
    "bad key sk-" + "a1B" * 10 + "!": "bad key ***!",
    "sk-proj-ab_C-" + "a1B" * 10: "***",
    "AKIA" + "A1B2" * 4: "***",
    "ghp_" + "a1" * 18: "***",
    "xoxb-123456789012-abc": "***",
    "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.abc": "***",
    "-----BEGIN RSA PRIVATE KEY-----\nsesame\n-----END RSA PRIVATE KEY-----": "***",
    "login(password='open sesame', n=1)": "login(password=***, n=1)",
    "{'api_key': 'sesame', 'n': 1}": "{'api_key': ***, 'n': 1}",
    "AWS_SECRET_ACCESS_KEY=ses/ame not accepted": "AWS_SECRET_ACCESS_KEY=*** not accepted",
    "data.token=sesame: unknown key": "data.token=***: unknown key",
    "curl -H 'Authorization: Bearer sesame' h": "curl -H 'Authorization: Bearer ***' h",
    "X-Api-Key: sesame, Accept: *": "X-Api-Key: ***, Accept: *",
    "run --token sesame --api-key='se same' -n 1": "run --token *** --api-key=*** -n 1",
    "env DB_PASS=sesame SIGNING_KEY=sesame run": "env DB_PASS=*** SIGNING_KEY=*** run",
}
HARMLESS = [
    "ssh://git@github.com/a/b",
    "abfs://container@account.dfs.core.windows.net/x",
    "hf://datasets/user/name@revision/x",
    "http://host:8080/a@b",
    "https://host/x?tokenizer=a&max_tokens=5",
    "sk-learn-experiments/run",
    "/mnt/disk-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa/x",
    "pad_token=<s> max_tokens=5 tokenizer=bytes text_key=text",
    "step  1/1  loss 5.5423  grad_norm 0.78  lr 1.5e-04  476 tok/s  mem 328 MiB",
    "sbatch --time 1:00 --partition=gpu --max-tokens 5 --tokenizer bytes -p gpu",
    "PRIMARY_KEY_COLUMN=identity SORT_KEY=created KEY=value --key /etc/hosts",
    "0123456789abcdef0123456789abcdef01234567",  # a commit, or W&B's key: its name decides
]


def test_a_credential_in_a_text_is_shown_as_stars_and_what_looks_a_little_like_one_is_not() -> None:
    for text, shown in TEXTS.items():
        assert redact(text) == redact(redact(text)) == shown
    for text in HARMLESS:
        assert redact(text) == text and not list(find_secrets({"key": text}))


def test_names_of_secrets_are_told_from_names_of_tokens_keys_and_places() -> None:
    for name in (
        *("password", "db_pwd", "api_key", "apiKey", "token", "hf_token", "authToken", "secret"),
        *("access_key", "aws_secret_access_key", "client_secret", "private_key", "credentials"),
    ):
        assert is_secret_name(name), name
    for name in (
        *("max_tokens", "tokens", "tokenizer", "pad_token", "eos_token_id", "text_key", "key"),
        *("keep", "keep_every", "vocab_size", "token_file", "password_path", "secret_name"),
    ):
        assert not is_secret_name(name), name


def test_no_shipped_key_or_default_counts_as_a_secret() -> None:
    for group, variants in VARIANTS.items():
        for variant in variants.values():
            for name in variant.__dataclass_fields__:
                assert not is_secret_name(name), f"{group}.{name}"
    assert not list(secret_problems(to_plain(Config())))


def test_values_of_secret_environment_variables_are_found_however_they_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_DB_PASSWORD", VALUE)
    monkeypatch.setenv("PLAIN_TOKEN", "word-of-8\nline-of-11\n")
    monkeypatch.setenv("SHORT_TOKEN", "short")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "disabled")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/etc/hosts")  # a place
    quoted = "pa%20ss%2Fw%22ord%25%5C%271"
    for written in (VALUE, repr(VALUE), '{"x": "pa ss/w\\"ord%\\\\\'1"}', f"u?x={quoted}"):
        assert "ord%" not in redact(f"a {written} b") and "***" in redact(written)
        assert [key for key, _ in find_secrets({"a": [f"x{written}y"]})] == ["a[0]"]
    assert redact("a word-of-8 b line-of-11") == "a *** b ***"
    assert redact("short, disabled, /etc/hosts") == "short, disabled, /etc/hosts"


def test_the_flags_of_a_command_are_read_in_quotes_too_and_a_schedulers_partition_is_none() -> None:
    for command, shown in {
        "submit -p sesame -u me:sesame x": "submit -p *** -u *** x",
        "bash -c \"run --token 'sesame'\"": 'bash -c "run --token ***"',
        "/usr/bin/sbatch -p gpu --export=ALL,HF_TOKEN=sesame": (
            "/usr/bin/sbatch -p gpu --export=ALL,HF_TOKEN=***"
        ),
        "ssh -p 22 host run": "ssh -p 22 host run",
        "run --token $TOKEN {args}": "run --token $TOKEN {args}",
    }.items():
        assert redact_command(command) == redact_command(shown) == shown
        assert "sesame" not in redact_output(f"started me:sesame sesame {command}", command) or (
            command == shown
        )


def test_a_config_that_holds_a_secret_is_refused_and_the_secret_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever it is; told alone, for another room might quote it."""
    monkeypatch.setenv("HF_TOKEN", "sesame-from-the-environment")
    arguments = {
        "storage_options": {"secret": "sesame1", "key": "x"},
        "urls": ["https://h/x", "https://me:sesame2@h/x"],
        "password": 12345678,
        "token": 5,
        "pad_token": "<pad>",
        "under": "x/sesame-from-the-environment/y",
        "credentials": "/etc/hosts",
        "api_key": "HF_TOKEN",
    }
    folders = Checkpoint(folder="s3://me:sesame3@b/x", start_from="https://h/x?sig=sesame4")
    told = problems(Config(data=Custom("no.such.function", arguments), checkpoint=folders))
    assert [problem.key for problem in told] == [
        "data.storage_options.secret",
        "data.urls[1]",
        "data.password",
        "data.under",
        "checkpoint.folder",
        "checkpoint.start_from",
    ]
    text = "\n".join(map(str, told))
    assert "sesame" not in text and "12345678" not in text
    assert text.count("keep it in the environment") == 6
    assert "data.under=***: it contains the value of the environment variable HF_TOKEN" in text


def test_a_command_line_is_looked_at_before_it_is_understood() -> None:
    """All values of a sweep, keys that do not exist, and Hydra's own."""
    words = ["seed=1", "data.path=a,https://me:sesame@h/x", "+nonsense.password=a,b", "~data.path"]
    words += ["hydra.sweep.dir=s3://me:sesame@b", "data.tokenizer=x", "data.text_key=y"]
    told = secrets_in_command(words, None)
    keys = ["data.path", "nonsense.password", "hydra.sweep.dir"]
    assert [problem.key for problem in told] == keys
    assert "sesame" not in "\n".join(map(str, told))
    assert redact_override("data.password=open sesame,x") == "data.password=***"
    assert redact_override("data.password=null") == "data.password=null"


def test_a_mistake_at_a_secrets_key_does_not_show_it() -> None:
    for problem in (
        Problem("optimizer.password", "open sesame", "no such key as 'open sesame'", "x=sesame"),
        Problem("data", {"name": "x", "api_key": "sesame"}, "no such choice"),
        Problem("seed", "https://me:sesame@h", "must be an integer"),
        Problem("--config-name https://me:sesame@h", "", "not found"),
    ):
        assert "sesame" not in str(problem) and "***" in str(problem)
    assert str(Problem("pp", 3, "too many", "pp=2")) == "pp=3: too many; write pp=2"


@given(value=st.recursive(st.text() | st.integers() | st.none() | st.floats(), st.lists))
@settings(max_examples=20, deadline=None)
def test_what_is_no_secret_is_shown_as_it_is(value) -> None:
    if not list(find_secrets(value, "key")):
        assert [redact_value("key", value)] == [value]
