from __future__ import annotations

import pytest

from nvrx_slurm.inprocess.attribution import in_words, place_of
from nvrx_slurm.inprocess.exception import HealthCheckError


def test_a_failure_is_one_line_with_its_place():
    """An exception of several lines is formatted in one, with the file, line and function that raised it."""

    def training() -> None:
        raise RuntimeError("loss is\nNaN")

    with pytest.raises(RuntimeError) as raised:
        training()
    assert in_words(raised.value) == "RuntimeError: loss is NaN"
    assert place_of(raised.value) == f"{__file__}:{training.__code__.co_firstlineno + 1}, in training"


def test_the_place_of_a_failed_health_check_is_in_the_check():
    """The wrapper and a chain of checks raise their own errors from the check's error."""

    def check() -> None:
        raise ValueError("the disk is full")

    def fail_by(call: object) -> None:
        try:
            call()  # type: ignore[operator]
        except Exception as error:
            raise HealthCheckError("unfit") from error

    with pytest.raises(HealthCheckError) as raised:
        fail_by(lambda: fail_by(check))
    assert place_of(raised.value) == f"{__file__}:{check.__code__.co_firstlineno + 1}, in check"


def test_an_exception_that_was_never_raised_has_no_place():
    """An exception without a traceback is formatted too."""
    assert place_of(ValueError()) == "nowhere in Python"
