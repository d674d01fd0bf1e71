"""The one policy for errors of a store: what is decided for each error, and that every retry has a pause and a
bound."""

from __future__ import annotations

import hiredis
import pytest
from redis import exceptions as failures
from redis._parsers.base import BaseParser

from nvrx_slurm.store.retry import AWAY_PAUSE_S, FULL_PAUSE_S, Cause, GiveUp, Retry, StoreRetry, code_of

WHERE = "redis://site:6379"
PATIENCE_S = 30.0

WAITED_FOR = [
    "LOADING Redis is loading the dataset in memory",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "CLUSTERDOWN The cluster is down",
    "TRYAGAIN Multiple keys request during rehashing of slot",
    "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
    "NOSCRIPT No matching script.",
]
WRITES_REFUSED = [
    "MISCONF Errors writing to the AOF file: No space left on device",
    "OOM command not allowed when used memory > 'maxmemory'.",
    "NOREPLICAS Not enough good replicas to write.",
    "READONLY You can't write against a read only replica.",
]
ACCESS_REFUSED = [
    "NOAUTH Authentication required.",
    "WRONGPASS invalid username-password pair or user is disabled.",
    "NOPERM User alice has no permissions to run the 'xadd' command",
]
COMMAND_REFUSED = [
    "MOVED 3999 10.0.0.2:6381",
    "ASK 3999 10.0.0.2:6381",
    "WRONGTYPE Operation against a key holding the wrong kind of value",
    "ERR unknown command 'xadd'",
]


def of_redis_py(answer: str) -> Exception:
    return BaseParser.parse_error(answer)


def of_hiredis(answer: str) -> Exception:
    return hiredis.ReplyError(answer)


def of_a_pipeline(answer: str) -> Exception:
    error = of_redis_py(answer)
    error.args = (f"Command # 2 (XADD orders * m x) of pipeline caused error: {error.args}",)
    return error


def of_a_script_of_redis_6(answer: str) -> Exception:
    return failures.ResponseError(
        f"ERR Error running script (call to f_0a): @user_script:3: @user_script: 3: -{answer}"
    )


MAKERS = [of_redis_py, of_hiredis, of_a_pipeline, of_a_script_of_redis_6]


def decide(error: Exception, *, embedded: bool = False) -> Retry | GiveUp:
    return StoreRetry(WHERE, PATIENCE_S, embedded=embedded).failed(error, now=100.0)


@pytest.mark.parametrize("made", MAKERS)
@pytest.mark.parametrize("answer", [*WAITED_FOR, *WRITES_REFUSED])
def test_a_temporary_error_is_waited_for(answer, made):
    """The temporary error is recognized in each client's form, including those of a pipeline and of a script."""
    decision = decide(made(answer))
    assert isinstance(decision, Retry)
    assert decision.pause_s > 0
    assert not decision.reconfigure
    assert decision.reconnect == answer.startswith("READONLY")


@pytest.mark.parametrize("made", [of_redis_py, of_hiredis, of_a_pipeline])
@pytest.mark.parametrize("answer", ACCESS_REFUSED)
def test_a_refused_user_is_reported_at_once(answer, made):
    """Waiting does not help; the message names the server and what to check."""
    decision = decide(made(answer))
    assert isinstance(decision, GiveUp)
    assert decision.cause is Cause.ACCESS
    assert WHERE in decision.message
    assert ("ACL" if answer.startswith("NOPERM") else "password") in decision.message


@pytest.mark.parametrize("made", [of_redis_py, of_hiredis, of_a_pipeline])
@pytest.mark.parametrize("answer", COMMAND_REFUSED)
def test_a_refused_command_is_reported_at_once(answer, made):
    """The server would refuse the same command again."""
    decision = decide(made(answer))
    assert isinstance(decision, GiveUp)
    assert decision.cause is Cause.COMMAND
    assert decision.unreachable().refused


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError("Connection refused"),
        TimeoutError(),
        failures.ConnectionError("Connection closed by server."),
        failures.TimeoutError("Timeout reading from socket"),
        failures.InvalidResponse("Protocol Error: b'HTTP'"),
        failures.MaxConnectionsError(),
        of_redis_py("ERR max number of clients reached"),
    ],
    ids=repr,
)
def test_a_connection_that_fails_is_opened_again(error):
    """The client connects again: a server that is restarted answers within seconds."""
    assert code_of(error) == ""
    decision = decide(error)
    assert isinstance(decision, Retry)
    assert "does not answer" in decision.warning


def test_only_an_embedded_server_is_reconfigured_and_only_once():
    """A site's own server is waited for, not changed; so is an embedded one that still refuses writes after it was
    reconfigured."""
    error = of_hiredis(WRITES_REFUSED[0])
    retry = StoreRetry(WHERE, PATIENCE_S, embedded=True)
    first, second = retry.failed(error, 0.0), retry.failed(error, 0.0)
    assert isinstance(first, Retry) and first.reconfigure
    assert isinstance(second, Retry) and not second.reconfigure and second.pause_s > 0
    for answer in WRITES_REFUSED[1:]:
        decision = decide(of_hiredis(answer), embedded=True)
        assert isinstance(decision, Retry) and not decision.reconfigure


def test_an_embedded_server_that_was_restarted_is_reconfigured_again():
    """The server has answered in between, so this is another full disk."""
    retry = StoreRetry(WHERE, PATIENCE_S, embedded=True)
    for now in (0.0, 50.0):
        decision = retry.failed(of_hiredis(WRITES_REFUSED[0]), now)
        assert isinstance(decision, Retry) and decision.reconfigure
        assert retry.answered(now) == ""  # no wait to report


def waits(retry: StoreRetry, error: Exception, began: float = 0.0) -> tuple[list[Retry], GiveUp, float]:
    """Repeats an error until the policy gives up, on a clock that only the pauses advance."""
    now, retries = began, []
    while isinstance(decision := retry.failed(error, now), Retry):
        retries.append(decision)
        now += decision.pause_s
        assert len(retries) < 10_000
    return retries, decision, now


@pytest.mark.parametrize(
    ("answer", "longest_s", "most"),
    [(WAITED_FOR[0], AWAY_PAUSE_S, 130), (WRITES_REFUSED[0], FULL_PAUSE_S, 25)],
)
def test_every_retry_has_a_pause_and_a_bound(answer, longest_s, most):
    """Pauses grow up to a limit, their sum is the patience, and only the first retry has a warning."""
    retries, end, after_s = waits(StoreRetry(WHERE, PATIENCE_S, embedded=False), of_hiredis(answer))
    assert max(each.pause_s for each in retries) == longest_s
    assert len(retries) <= most
    assert after_s == pytest.approx(PATIENCE_S)
    assert [bool(each.warning) for each in retries] == [True, *[False] * (len(retries) - 1)]
    assert end.cause is Cause.SILENT
    assert WHERE in end.message


def test_the_wait_for_a_full_disk_says_what_to_do():
    """The warning names the server and the error, says what to do, and how long the wait may take."""
    decision = decide(of_redis_py(WRITES_REFUSED[0]))
    assert isinstance(decision, Retry)
    for words in (WHERE, "refuses writes", "Free space", "No space left on device", "waiting up to 30 s"):
        assert words in decision.warning


def test_a_wait_that_changes_its_reason_says_so():
    """The server is restarted, and then refuses writes: two warnings, one patience."""
    retry = StoreRetry(WHERE, 10.0, embedded=False)
    assert "does not answer" in retry.failed(ConnectionRefusedError(), 0.0).warning
    assert "refuses writes" in retry.failed(of_hiredis(WRITES_REFUSED[0]), 5.0).warning
    assert isinstance(retry.failed(of_hiredis(WRITES_REFUSED[0]), 10.0), GiveUp)


def test_the_patience_counts_from_the_calls_beginning_where_there_is_one():
    """Without a call it counts from the first failure; a successful answer ends the wait."""
    of_a_call = StoreRetry(WHERE, 10.0, embedded=False, began=0.0)
    assert isinstance(of_a_call.failed(TimeoutError(), 11.0), GiveUp)
    of_a_reader = StoreRetry(WHERE, 10.0, embedded=False)
    assert isinstance(of_a_reader.failed(TimeoutError(), 11.0), Retry)
    assert of_a_reader.answered(12.0) == "the store answers again, after 1.0 s"
    assert isinstance(of_a_reader.failed(TimeoutError(), 25.0), Retry)


def test_a_job_that_ends_waits_less():
    """The shorter patience counts from the moment at which the job began to end."""
    retry = StoreRetry(WHERE, 600.0, embedded=False, began=0.0)
    assert isinstance(retry.failed(TimeoutError(), 100.0), Retry)
    retry.hurry(5.0, at=200.0)
    assert isinstance(retry.failed(TimeoutError(), 204.0), Retry)
    assert isinstance(retry.failed(TimeoutError(), 205.0), GiveUp)


def test_time_in_which_this_process_stood_still_is_no_patience_spent():
    """The job was suspended for longer than its agents wait for the store: that time is not counted."""
    retry = StoreRetry(WHERE, 30.0, embedded=False)
    assert isinstance(retry.failed(TimeoutError(), 100.0), Retry)
    assert isinstance(retry.failed(TimeoutError(), 5000.0), Retry)
    assert isinstance(retry.failed(TimeoutError(), 5014.0), Retry)
    assert isinstance(retry.failed(TimeoutError(), 5016.0), GiveUp)
