"""Secrets (keys, tokens, passwords): refused in a config, replaced by *** in all other texts.

A config is stored (config.yaml, checkpoints, W&B), so it must not contain secrets. A secret is:
1. text under a key whose name says so (password, api_key, hf_token; not max_tokens, pad_token), and
   in a text what follows such a name: password=..., {password: ...};
2. user:password@ in a URL, or a query parameter such as ?token=... or ?X-Amz-Signature=...;
3. text in the format of a well-known service's token (hf_..., sk-..., AKIA..., a private key), a
   line of `_TOKENS` for each;
4. the value of an environment variable whose name says so.
`redact` replaces them by *** in errors, tracebacks and logs.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

REDACTED = "***"
_MIN_LENGTH = 8  # characters; shorter values of environment variables are ignored
_MIN_MIXED = 6  # the limit for values of letters and other characters, matched as a word

# --- names, as words in lower case: _hf_token_
# -------------------------------------------------------

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

# --- values ------------------------------------------------------------------------------------

_TOKENS = re.compile(
    r"""(?<![A-Za-z0-9])(?:
      # Hugging Face, GitHub, npm, Replicate, Groq, DigitalOcean, Stripe
      (?:hf | gh[pousr] | npm | r8 | gsk | dop_v1 | [sr]k_(?:live|test))_[A-Za-z0-9]{20,}
      # GitHub, Docker, GitLab, NVIDIA, PyPI, Vault, Google, W&B
    | (?:github_pat_ | dckr_pat_ | gl(?:pat|rt)- | nvapi- | pypi- | hvs\. | ya29\. | wandb_v\d_)[\w-]{20,}
    | sk-(?:[A-Za-z0-9_]+-){0,3}[A-Za-z0-9_]{20,}[\w-]* # OpenAI, Anthropic and others
    | sk-(?=[\w-]*[0-9])(?=[\w-]*[A-Z])[\w-]{20,}
    | (?:AKIA|ASIA)[A-Z0-9]{16}                        # AWS
    | (?:xox[a-z]|xapp)-[A-Za-z0-9-]{10,}              # Slack
    | AIza[\w-]{35} | dapi[0-9a-f]{32}                 # Google, Databricks
    | SG\.[\w-]{16,}\.[\w-]{16,}                       # SendGrid
    | eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]*             # a JSON web token
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----(?:.*?-----END[ ][A-Z ]*PRIVATE[ ]KEY-----)?
    )""",
    re.VERBOSE | re.DOTALL,
)
# user:password@, and of http a lone user@, which is then a token
_USER = re.compile(
    r"""(?<=://)(?:
      [^\s/?\#'"@:]*:[^\s/?\#'"]*
    | (?:(?<=http://)|(?<=https://))[^\s/?\#'"@]+
    )(?=@)""",
    re.VERBOSE | re.IGNORECASE,
)
# Authorization: Bearer ..., Basic ...: in texts alone, since a config may well speak of a bearer
_HEADER = re.compile(r"(?<=earer )[\w.~+/=-]{8,}|(?<=asic )(?=\w*[A-Z])(?=\w*[a-z])[\w+/]{12,}=*")
_QUERY = re.compile(r"(?<=[?&;#])([\w.-]+)=([^\s&;#'\"]+)")
_VARIABLE = re.compile(r"\$(\{.*\}|\(.*\)|[A-Z_][A-Z0-9_]*)")  # of a shell, or an interpolation
_TEXT = r"""('[^']*'|"[^"]*"|[^\s,;&)\]}]+?(?=:?(?:[\s,;&)\]}]|$)))"""
_NAMED = re.compile(  # password=..., {password: ...}
    rf"""((?:(?<![\w.?&;])[A-Za-z_][\w.-]*[ \t]*=[ \t]*|[{{,]\s*['"]?[A-Za-z_][\w.-]*['"]?:\s*)){_TEXT}"""
)


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
    """Replace each secret in a text by ***."""
    for _, value in _environment_secrets():
        for written in _encodings(value):
            if len(written) >= _MIN_LENGTH:
                text = text.replace(written, REDACTED)
            elif written in text:  # as a whole word
                text = re.sub(rf"(?<!\w){re.escape(written)}(?!\w)", REDACTED, text)
    text = _HEADER.sub(REDACTED, _TOKENS.sub(REDACTED, text))
    text = _USER.sub(REDACTED, text)
    text = _QUERY.sub(lambda m: f"{m[1]}={REDACTED}" if _is_secret_parameter(m[1]) else m[0], text)
    position = 0
    while match := _NAMED.search(text, position):  # a value that is no secret may contain one
        position = match.end(1)
        if _names_secret(match[1], match[2].strip("'\"")):
            text = text[:position] + REDACTED + text[match.end() :]
            position += len(REDACTED)
    return text


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
    if isinstance(plain, dict):
        for name, item in plain.items():
            if redact(str(name)) != str(name):
                yield redact(f"{key}.{name}".lstrip(".")), "it looks like a token or key itself"
            yield from find_secrets(item, f"{key}.{name}".lstrip("."))
    elif isinstance(plain, (list, tuple)):
        for index, item in enumerate(plain):
            yield from find_secrets(item, f"{key}[{index}]")
    elif reason := _secret_reason(key, plain):
        yield redact(key), reason


def _secret_reason(key: str, value: Any) -> str:
    """Return why a value is a secret; "" if it is not."""
    if _names_secret(key, value):
        return "it is a secret by its name"
    if not isinstance(value, str):
        return ""
    for name, secret in _environment_secrets():
        if any(written in value for written in _encodings(secret)):
            return f"it contains the value of the environment variable {name}"
    if _TOKENS.search(value):
        return "it looks like a token or key"
    in_query = any(_is_secret_parameter(match[1]) for match in _QUERY.finditer(value))
    return "it is a URL with a password or token" if _USER.search(value) or in_query else ""


def _names_secret(key: str, value: Any) -> bool:
    """Return whether any part of a dotted key names a secret that the value can be."""
    names = (re.sub(r"\[\d+\]", "", name) for name in key.split("."))
    if not any(map(is_secret_name, names)):
        return False
    if value is None or isinstance(value, bool) or value in ("", "null", "None", "???", REDACTED):
        return False
    if str(value).isdigit() and "token" in key.lower():
        return False  # a token id
    if not isinstance(value, str):
        return True
    return not (_VARIABLE.fullmatch(value) or value in os.environ or _is_path(value))


def _is_secret_parameter(name: str) -> bool:
    """Return whether a URL's query parameter is a secret, by its name."""
    word = name.lower()
    return word in ("sig", "key", "auth") or "signature" in word or is_secret_name(name)


def _environment_secrets() -> list[tuple[str, str]]:
    """Return (name, value) of secret environment variables, longest value first, except common
    words (1, true) and paths."""
    secrets = []
    for name in [name for name in os.environ if is_secret_name(name, True)]:
        value = os.environ.get(name, "").strip()
        is_mixed = len(value) >= _MIN_MIXED and not (value.isalpha() or value.isdigit())
        is_long = len(value) >= _MIN_LENGTH or is_mixed
        if is_long and value.lower() not in _SETTINGS and not _is_path(value):
            secrets.append((name, value))
    return sorted(secrets, key=lambda secret: len(secret[1]), reverse=True)


def _encodings(secret: str) -> list[str]:
    """Return a secret verbatim, by line, URL-encoded, and escaped for JSON and Python."""
    lines = [line.strip() for line in secret.splitlines() if len(line.strip()) >= _MIN_LENGTH]
    return [secret, *lines, quote(secret, safe=""), json.dumps(secret)[1:-1], repr(secret)[1:-1]]


def _is_path(value: str) -> bool:
    """Return whether a value is the path of an existing file, which may be shown."""
    try:
        return value.startswith(("/", "~", "./")) and Path(value).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long for a path
        return False
