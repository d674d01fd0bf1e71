from __future__ import annotations

import pytest

from nvrx_slurm.inprocess.attribution import in_words, place_of


def test_a_failure_is_one_line_with_its_place():
    """An exception of several lines is formatted in one, with the file, line and function that raised it."""

    def training() -> None:
        raise RuntimeError("loss is\nNaN")

    with pytest.raises(RuntimeError) as raised:
        training()
    assert in_words(raised.value) == "RuntimeError: loss is NaN"
    assert place_of(raised.value) == f"{__file__}:{training.__code__.co_firstlineno + 1}, in training"


def test_an_exception_that_was_never_raised_has_no_place():
    """One without a traceback is formatted too."""
    assert place_of(ValueError()) == "nowhere in Python"
