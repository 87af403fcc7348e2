"""DataError: an error in the data's config keys or in the user's files."""

from __future__ import annotations

from typing import Any

from titanlike.config.errors import Problem


class DataError(ValueError):
    """A config key whose value cannot be used, why, and what to write instead."""

    def __init__(self, key: str, value: object, reason: str, remedy: str) -> None:
        super().__init__(f"{key}={value}: {reason}. {remedy}")
        self.key, self.value, self.reason, self.remedy = key, value, reason, remedy

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by arguments: loader processes pass it to the training process."""
        return type(self), (self.key, self.value, self.reason, self.remedy)


def data_problem(error: DataError) -> Problem:
    """The error of a config."""
    remedy = error.remedy.removeprefix("Write ")
    return Problem(error.key, error.value, error.reason, remedy[:1].lower() + remedy[1:])


def missing_extra(key: str, value: object, package: str, extra: str = "text") -> DataError:
    """The error for a package of an optional extra that is not installed."""
    fix = f"Install it with: pip install 'titanlike[{extra}]'"
    return DataError(key, value, f"the package {package} is not installed", fix)
