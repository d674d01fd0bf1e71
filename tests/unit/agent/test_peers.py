"""Which worker failures are consequences of another worker's failure."""

from __future__ import annotations

import pytest
import yaml

from nvrx_slurm.agent.peers import ended_by_peer, says_peer_lost
from nvrx_slurm.attribution.rules.catalogue import built_in_files


def samples(role: str, *faults: str) -> list[str]:
    """The sample lines of the built-in rules with that role, for these faults or, if none is given, for all."""
    rules = [rule for path in built_in_files() for rule in yaml.load(path.read_text(), yaml.CSafeLoader).values()]
    of_role = [rule for rule in rules if rule.get("role", "cause") == role]
    return [text for rule in of_role if not faults or rule["fault"] in faults for text in rule["sample"]]


@pytest.mark.parametrize("line", samples("consequence", "peer_lost", "nccl_remote_error", "gloo_timeout"))
def test_rules_agree(line):
    """What the log rules classify as a lost peer counts as one here too, except lines that a launcher prints about
    its ranks."""
    assert says_peer_lost(line) or line.startswith("mpirun")


def test_no_cause_is_taken_for_a_consequence():
    """No sample line of a cause counts as a lost peer, except one that quotes NCCL."""
    taken = [line for line in samples("cause") if says_peer_lost(line)]
    assert [line for line in taken if "Last NCCL warning(error) log entry" not in line] == []


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.2.0.5]",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:589] Read error [10.2.0.5]:41320: Con",
        "RuntimeError: Application timeout caused pair closure: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out "
        "waiting 1800000ms for recv operation to complete",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "DistNetworkError: Connection reset by peer",
        "DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:1970, remote process exited or there was a network",
        "DistStoreError: wait timeout after 300000ms, keys: /worker/group_1",
        "TrainerError: step 7 (after ConnectionResetError: [Errno 104] Connection reset by peer)",
    ],
)
def test_lost_connection_to_a_peer_is_a_consequence(error):
    assert says_peer_lost(error)


@pytest.mark.parametrize(
    "error",
    [
        "ValueError: bad day",
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "FileNotFoundError: [Errno 2] No such file or directory: 'data'",
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "KeyError: 'peer'",
        "RuntimeError: the connection pool is closed",
    ],
)
def test_error_of_its_own_is_none(error):
    assert not says_peer_lost(error)


def test_last_exception_of_what_was_printed_counts():
    """The last printed exception counts, since earlier ones were caught; without an exception the last lines are
    searched."""
    reset, own = "[rank3]: ConnectionResetError: [Errno 104] Connection reset by peer\n", "ValueError: bad day\n"
    assert ended_by_peer(f"Traceback …\n{own}Traceback …\n{reset}")
    assert not ended_by_peer(f"Traceback …\n{reset}Traceback …\n{own}")
    assert ended_by_peer(
        "terminate called\n  what():  NCCL error: remote process exited or there was a network error\n"
    )
    assert not ended_by_peer("step 8\n")
    assert not ended_by_peer("")
