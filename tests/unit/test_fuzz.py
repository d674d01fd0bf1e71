"""The decoders of outside bytes: 10,000 wrong inputs each; `make fuzz` takes a million."""

from __future__ import annotations

import pytest

from ci.fuzz import TARGETS, Target, fuzz, inputs

INPUTS, SEED = 10_000, 18


@pytest.mark.parametrize("name", TARGETS)
def test_only_its_own_errors_come_out_of_a_decoder(name: str) -> None:
    """For any wrong bytes the decoder raises its own kind of error, and soon."""
    assert fuzz(TARGETS[name], INPUTS, SEED) is None


@pytest.mark.parametrize("name", TARGETS)
def test_samples_are_what_a_decoder_takes(name: str) -> None:
    """The decoder takes each sample: otherwise no input near a valid one would ever be tried."""
    for sample in TARGETS[name].samples:
        TARGETS[name].decode(sample)


def test_a_decoder_that_raises_something_else_is_found() -> None:
    """`fuzz` returns the input that caused it; the same seed gives the same inputs."""

    def careless(data: bytes) -> str:
        return data.decode()

    target = Target(careless, (b"text",))
    found = fuzz(target, INPUTS, SEED)
    assert found is not None
    with pytest.raises(UnicodeDecodeError):
        careless(found.data)
    assert list(inputs(target.samples, 100, SEED)) == list(inputs(target.samples, 100, SEED))
