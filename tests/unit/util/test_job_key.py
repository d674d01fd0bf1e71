"""The job's key: a signature is valid only at the place for which it was made."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.errors import ForgedRecord
from nvrx_slurm.util.job_key import SIGNATURE_BYTES, JobKey, is_proof, proof

KEY = JobKey("a token")


@given(place=st.text(), data=st.binary())
def test_what_was_signed_verifies(place, data):
    """At the same place, with the same key, verifying returns the data."""
    assert KEY.verify(place, KEY.sign(place, data)) == data


@given(place=st.text(), other=st.text(), data=st.binary())
def test_a_record_is_bound_to_its_place(place, other, data):
    """A record that is copied to another place is refused there."""
    if place != other:
        with pytest.raises(ForgedRecord):
            KEY.verify(other, KEY.sign(place, data))


@given(data=st.binary(), where=st.integers(min_value=0), bit=st.integers(0, 7))
def test_one_changed_bit_is_seen(data, where, bit):
    """A change in the signature or in the data is detected."""
    signed = bytearray(KEY.sign("place", data))
    signed[where % len(signed)] ^= 1 << bit
    with pytest.raises(ForgedRecord):
        KEY.verify("place", bytes(signed))


@given(data=st.binary(max_size=64))
def test_another_keys_records_and_bare_bytes_do_not_verify(data):
    """They are refused, and so is anything shorter than a signature."""
    for signed in (data, JobKey("another token").sign("place", data)):
        with pytest.raises(ForgedRecord):
            KEY.verify("place", signed)
    assert len(KEY.sign("place", data)) == SIGNATURE_BYTES + len(data)


def test_each_purpose_has_its_own_key_and_each_side_its_own_proof():
    """A proof made by one side is not accepted as the other side's."""
    assert KEY.derive("one") != KEY.derive("other")
    key = KEY.derive("one")
    assert is_proof(proof(key, "server", b"a", b"b"), proof(key, "server", b"a", b"b"))
    assert not is_proof(proof(key, "server", b"a", b"b"), proof(key, "client", b"a", b"b"))
    assert not is_proof(proof(key, "server", b"ab", b""), proof(key, "server", b"a", b"b"))


def test_the_key_does_not_show_in_a_log():
    """Neither `repr` nor `str` shows the key."""
    assert "a token" not in repr(KEY) + str(KEY)
