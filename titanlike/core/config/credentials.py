"""Secrets (keys, tokens, passwords): refused in a config, replaced by *** in all other texts.

A config is stored (config.yaml, checkpoints, W&B), so it must not contain secrets. A secret is:
1. the value of a key whose name says so (password, api_key, hf_token; not max_tokens, pad_token);
2. the value of an environment variable whose name says so;
3. user:password@ in a URL.
`redact` replaces 2 and 3 by *** in errors, tracebacks and logs, `redact_value` and
`redact_override` all of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from titanlike.core.config.files import leaves

REDACTED = "***"
_MIN_LENGTH = 8  # characters; shorter values of environment variables are ignored
_USER = re.compile(r"""(?<=://)[^\s/?\#'"@:]*:[^\s/?\#'"]*(?=@)""")  # user:password@

# names, as words in lower case: _hf_token_
_SECRET_NAME = re.compile(
    r"""password | passwd | passphrase | secret | credential | apikey  # PGPASSWORD, clientsecret
    | _(?:accesskey|authtoken|bearer|creds|sas|dsn)_ | _connection_str(?:ing)?_
    | _(?:api|access|private|account|storage|auth|master|encryption|signing|ssh)_key_
    | [^_]_pwd_  # pwd alone is the working directory
    """,
    re.VERBOSE,
)
_SECRET_VARIABLE = re.compile(  # of the environment, besides: DB_PASS, SIGNING_KEY
    r"""_token_ | _(?!(?:public|primary|foreign|partition|sort|cache|index|text|row)_)[^_]+
    _(?:pass|key|pwd|auth|pat)_$""",
    re.VERBOSE,
)
# beside `token`: without one of these it may be a vocabulary's (pad_token, eos_token)
_ACCESS = re.compile(
    "_(?:auth|access|api|bearer|refresh|session|security|sas|aws|ci|hf|hub|huggingface|gh|git"
    "|github|gitlab|wandb|slack)_"
)
_LOCATION = re.compile("_(?:file|path|dir|folder|env|name|url|uri|endpoint|type|sock)_$")
_SETTINGS = {"disabled", "enabled", "required", "optional", "kerberos", "anonymous"}


@lru_cache(maxsize=4096)
def is_secret_name(name: str, environment: bool | None = None) -> bool:
    """Return whether a name is that of a secret.

    environment: True for an environment variable's name, where TOKEN never means a vocabulary's
    token; None = guess by whether the name is in capitals.
    """
    environment = name.isupper() if environment is None else environment
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    words = f"_{'_'.join(re.findall('[a-z0-9]+', spaced))}_"
    if _LOCATION.search(words):  # of a secret
        return False
    if _SECRET_NAME.search(words):
        return True
    if environment:
        return bool(_SECRET_VARIABLE.search(words))
    return words == "_token_" or ("_token_" in words and bool(_ACCESS.search(words)))


def redact(text: str) -> str:
    """Replace passwords of URLs, and values of secret environment variables, by ***."""
    for _, value in _environment_secrets():
        text = text.replace(value, REDACTED)
    return _USER.sub(REDACTED, text)


def redact_override(text: str) -> str:
    """Apply `redact` to an override; its key's name counts, too."""
    key, equals, value = text.partition("=")
    if equals and _names_secret(key, value.strip("'\"")):
        return f"{key}={REDACTED}"
    return redact(text)


def redact_value(key: str, value: Any) -> Any:
    """Replace each secret in a config value by ***."""
    if isinstance(value, dict):
        return {redact(str(k)): redact_value(f"{key}.{k}", item) for k, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(redact_value(key, item) for item in value)
    if _names_secret(key, value):
        return REDACTED
    return redact(value) if isinstance(value, str) else value


def find_secrets(plain: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, reason) for each secret in a plain config."""
    for name, value in leaves(plain, key):
        if _names_secret(name, value):
            yield redact(name), "it is a secret by its name"
        elif redact(text := f"{name}={value}" if isinstance(value, str) else name) != text:
            variables = (each for each, secret in _environment_secrets() if secret in text)
            reason = f"it contains the value of the environment variable {next(variables, '')}"
            yield redact(name), "it is a URL with a password" if _USER.search(text) else reason


def _names_secret(key: str, value: Any) -> bool:
    """Return whether any part of a dotted key names a secret that the value can be."""
    names = (re.sub(r"\[\d+\]", "", name) for name in key.split("."))
    if not any(map(is_secret_name, names)):
        return False
    if value is None or isinstance(value, bool) or value in ("", "null", "None", "???", REDACTED):
        return False
    if str(value).isdigit() and "token" in key.lower():
        return False  # a token id
    return not isinstance(value, str) or not (value in os.environ or _is_path(value))


def _environment_secrets() -> list[tuple[str, str]]:
    """Return (name, value) of secret environment variables, except common words (1, true) and
    paths. The longest value comes first: it may contain another, and is redacted as a whole."""
    secrets = []
    for name in [name for name in os.environ if is_secret_name(name, environment=True)]:
        value = os.environ.get(name, "").strip()
        if len(value) >= _MIN_LENGTH and value.lower() not in _SETTINGS and not _is_path(value):
            secrets.append((name, value))
    return sorted(secrets, key=lambda secret: len(secret[1]), reverse=True)


def _is_path(value: str) -> bool:
    """Return whether a value is the path of an existing file, which may be shown."""
    try:
        return value.startswith(("/", "~", "./")) and Path(value).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long for a path
        return False
