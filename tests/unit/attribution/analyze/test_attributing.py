"""From hits and facts to one answer."""

from __future__ import annotations

import re

import pytest

from nvrx_slurm.attribution.analyze.aftermath import TailLine
from nvrx_slurm.attribution.analyze.attributing import SideEvidence, attribute
from nvrx_slurm.attribution.analyze.spread import fingerprint
from nvrx_slurm.attribution.analyze.verdict import CycleEnding
from nvrx_slurm.attribution.rules.catalogue import Rule
from nvrx_slurm.attribution.scan import Hit
from nvrx_slurm.journal.verdicts import Attribution, Scope, Verdict
from tests.unit.attribution.analyze.evidence import (
    ANY_ERROR,
    KEY_ERROR,
    NOISE,
    OOM,
    RESET,
    SEGFAULT,
    TIMEOUT,
    XID,
    failed,
    hit,
    inquiry,
    rule,
    scan,
)


def test_a_cascade_is_folded_under_its_cause() -> None:
    """One rank ran out of memory; the timeouts of the seven ranks that waited for it are consequences."""
    cascade = [hit(TIMEOUT, rank, line=line, t=700.0 + rank) for rank in (0, 1, 2, 4, 5, 6, 7) for line in (5, 6)]
    found = attribute(inquiry(failed(3, exit_code=1)), scan(*cascade, hit(OOM, 3, t=100.0, text="out of memory")))
    assert (found.verdict, found.fault, found.ranks, found.missing) == (Verdict.STOP, "cuda_oom", (3,), (3,))
    assert found.primary is not None
    assert (found.primary.text, found.primary.rank, found.primary.node) == ("out of memory", 3, "n1")
    assert [each.rank for each in found.secondary] == [0, 1, 2]
    assert "Then followed nccl timeout (7 ranks)" in found.explanation
    assert found.confidence >= 0.8


def test_a_failure_that_is_reported_twice_does_not_follow_from_itself() -> None:
    """Several lines of a rank about one fault, such as the assertion of each thread and the exception, are one
    failure."""
    found = attribute(inquiry(failed(3)), scan(hit(OOM, 3), hit(OOM, 3, line=11), hit(RESET, 0)))
    assert found.explanation == "Rank 3 on n1 failed first: cuda oom. Then followed peer lost (1 rank)."


def test_clocks_that_are_apart_do_not_mislead() -> None:
    """The clock of n2 is 600 s ahead: its error, which looks later, came first."""
    timeouts = [
        hit(TIMEOUT, rank, node=node, t=1000.0 + ahead, line=50, groups={"seq": "4"}, file=f"t-{rank}")
        for rank, node, ahead in ((0, "n1", 0.0), (1, "n1", 0.2), (4, "n2", 600.0), (5, "n2", 600.1), (6, "n3", 0.0))
    ]
    user = hit(KEY_ERROR, 5, node="n2", t=950.0 + 600.0)
    late = hit(OOM, 1, node="n1", t=990.0)
    found = attribute(inquiry(nodes=()), scan(*timeouts, user, late))
    assert (found.fault, found.ranks) == ("key_error", (5,))


def test_a_line_of_noise_is_nothing() -> None:
    """A line that noise matches counts for no other rule."""
    found = attribute(inquiry(), scan(hit(OOM, 0, line=4), hit(NOISE, 0, line=4)))
    assert (found.verdict, found.fault, found.primary) == (Verdict.UNKNOWN, "unknown", None)


def test_a_specific_rule_wins_over_the_one_for_all_exceptions() -> None:
    """If both rules match a line, the specific one gives the fault."""
    lines = scan(hit(ANY_ERROR, 0, line=4), hit(RESET, 0, line=4), hit(ANY_ERROR, 1), hit(SEGFAULT, 1))
    assert attribute(inquiry(), lines).fault == "segfault"
    assert attribute(inquiry(), scan(*lines.hits[:2])).fault == "peer_lost"


def test_an_error_that_the_rank_survived_is_not_the_cause() -> None:
    """An error with training steps after it was caught."""
    caught = hit(OOM, 3, line=1, t=10.0)
    steps = tuple(TailLine(200 + step, f"step {step} loss 2.1", 3) for step in range(40))
    found = attribute(
        inquiry(failed(3)), scan(caught, hit(XID, None, node="n1", kind="health", t=500.0)), tails(caught, steps)
    )
    assert (found.fault, found.nodes) == ("gpu_lost", ("n1",))


def tails(caught: object, steps: tuple[TailLine, ...]) -> SideEvidence:
    """The end of the rank's own file, as side evidence."""
    return SideEvidence(tails={"/logs/rank-3.err": steps})


def test_hardware_beside_an_error_of_the_program_is_no_stop() -> None:
    """A hardware error at that time prevents a STOP, whichever came first: a failing GPU makes programs fail in every
    way."""
    lines = scan(hit(KEY_ERROR, 3, t=100.0), hit(XID, None, node="n1", kind="health", t=160.0))
    found = attribute(inquiry(failed(3, exit_code=1)), lines)
    assert found.verdict is Verdict.UNKNOWN
    assert "At that time there was also gpu_lost" in found.explanation


def test_what_the_kernel_said_long_before_does_not_count() -> None:
    """A kernel message from long before the failure does not count: training went on after it."""
    lines = scan(hit(KEY_ERROR, 3, t=9000.0), hit(XID, None, node="n1", kind="health", t=100.0))
    found = attribute(inquiry(failed(3, exit_code=1)), lines)
    assert (found.verdict, found.fault) == (Verdict.STOP, "key_error")


def test_what_the_kernel_said_long_before_a_timeout_counts() -> None:
    """Before a timeout an old kernel message counts: ranks wait half an hour for one whose GPU is lost."""
    waiting = [hit(TIMEOUT, rank, t=1900.0) for rank in range(8) if rank != 3]
    found = attribute(inquiry(failed(0)), scan(*waiting, hit(XID, None, node="n1", kind="health", t=100.0)))
    assert (found.fault, found.nodes, found.ranks, found.missing) == ("gpu_lost", ("n1",), (3,), (3,))


def test_the_kernel_names_a_process_which_is_a_rank() -> None:
    """The cycle's pids show which rank the kernel's message names."""
    killed = rule("host_oom.kernel", Verdict.UNKNOWN, scope=Scope.USER_CODE, severity=88)
    line = hit(killed, None, node="n2", kind="health", groups={"pid": "4711"})
    found = attribute(inquiry(failed(6, signal=9, node="n2"), pids={4710: 1, 6: 4711}), scan(line))
    assert (found.fault, found.ranks) == ("host_oom", (6,))


def test_two_nodes_have_a_process_of_the_same_pid() -> None:
    """A kernel's message is about the process on its own node."""
    killed = rule("host_oom.kernel", Verdict.UNKNOWN, scope=Scope.USER_CODE, severity=88)
    line = hit(killed, None, node="n1", kind="health", groups={"pid": "4711"})
    found = attribute(inquiry(failed(2, signal=9), pids={2: 4711, 6: 4711}), scan(line))
    assert (found.fault, found.ranks) == ("host_oom", (2,))


FAULT = rule("gpu_application_fault.xid_31", Verdict.UNKNOWN, severity=68)
ILLEGAL = rule("cuda_illegal_access.raised", Verdict.UNKNOWN, severity=64)


def kernel_line(pid: int, *, of: Rule = FAULT, line: int = 10) -> Hit:
    return hit(of, None, node="n1", kind="health", t=100.0, line=line, groups={"pid": str(pid)})


@pytest.mark.parametrize("own", [KEY_ERROR, ANY_ERROR, TIMEOUT])
def test_an_xid_of_another_process_is_no_cause(own: Rule) -> None:
    """The node may be shared: the job's own line explains its failure, and the other process's Xid is not even
    listed."""
    found = attribute(inquiry(failed(3), pids={3: 4711}), scan(hit(own, 3, t=101.0), kernel_line(999)))
    assert (found.fault, found.secondary, found.runner_up) == (own.fault, (), None)


@pytest.mark.parametrize("own", [(), (hit(ILLEGAL, 3, t=101.0),)])
def test_an_xid_of_a_process_that_may_be_a_child_of_a_rank(own: tuple[Hit, ...]) -> None:
    """Such an Xid explains an error of the CUDA context, and a failure that nothing else explains."""
    found = attribute(inquiry(failed(3), pids={3: 4711}), scan(*own, kernel_line(999)))
    assert found.fault == "gpu_application_fault"


def test_an_xid_of_a_ranks_own_process() -> None:
    """An Xid of a rank's own process counts for that rank, and Xids of other processes do not count beside it."""
    own = hit(ILLEGAL, 3, t=101.0)
    found = attribute(inquiry(failed(3), pids={3: 4711}), scan(own, kernel_line(999), kernel_line(4711, line=11)))
    assert (found.fault, found.ranks) == ("gpu_application_fault", (3,))
    assert found.primary is not None
    assert (found.primary.line, found.primary.rank) == (11, 3)
    assert [each.rule for each in found.secondary] == ["cuda_illegal_access.raised"]


@pytest.mark.parametrize(("of", "pids"), [(XID, {3: 4711}), (FAULT, {})])
def test_other_xids_count_whichever_process_they_name(of: Rule, pids: dict[int, int]) -> None:
    """An Xid of the hardware counts whichever process it names; so does one of a process that may be a rank's, as
    pids are unknown."""
    found = attribute(inquiry(failed(3), pids=pids), scan(hit(ANY_ERROR, 3, t=101.0), kernel_line(999, of=of)))
    assert found.fault == of.fault


KERNEL_SEGFAULT = rule("segfault.kernel", Verdict.UNKNOWN, scope=Scope.USER_CODE, severity=76)
OOM_KILL = rule("host_oom.kernel_job", Verdict.UNKNOWN, scope=Scope.USER_CODE, severity=88)
NODE_OOM = rule("host_oom.kernel_node", Verdict.RESTART, scope=Scope.NODE, severity=88)
LOADER = rule("data_worker_killed.signal", Verdict.UNKNOWN, scope=Scope.USER_CODE, severity=50)


@pytest.mark.parametrize("kernels", [KERNEL_SEGFAULT, OOM_KILL])
def test_a_crash_of_another_process_is_no_cause(kernels: Rule) -> None:
    """A crash of another process, or its kill by the OOM killer within its own job, is no cause: the line of this job
    explains the failure."""
    found = attribute(
        inquiry(failed(3), pids={3: 4711}), scan(hit(KEY_ERROR, 3, t=101.0), kernel_line(999, of=kernels))
    )
    assert (found.fault, found.secondary, found.runner_up) == ("key_error", (), None)


@pytest.mark.parametrize(
    ("kernels", "own"),
    [
        (KERNEL_SEGFAULT, ()),
        (OOM_KILL, (hit(ANY_ERROR, 3, t=101.0),)),
        (OOM_KILL, (hit(LOADER, 3, t=101.0),)),
        (NODE_OOM, (hit(KEY_ERROR, 3, t=101.0),)),
    ],
    ids=["nothing else", "any error", "a child of a rank", "of the node"],
)
def test_a_crash_of_a_process_that_may_be_a_child_of_a_rank(kernels: Rule, own: tuple[Hit, ...]) -> None:
    """It explains what no strong line explains, and what a rank reports of its child."""
    found = attribute(inquiry(failed(3), pids={3: 4711}), scan(*own, kernel_line(999, of=kernels)))
    assert found.fault == kernels.fault


def test_a_kill_without_a_reason_stays_unknown() -> None:
    """Its peers' complaints do not explain a kill."""
    found = attribute(inquiry(failed(2, signal=9)), scan(hit(RESET, 0), hit(ANY_ERROR, 1)))
    assert (found.verdict, found.fault, found.ranks) == (Verdict.UNKNOWN, "killed", (2,))
    assert [each.rule for each in found.secondary] == ["peer_lost.reset"]


def test_an_exception_does_not_explain_a_kill() -> None:
    """The rank that printed the exception was ended by SIGKILL, which an exception does not explain."""
    found = attribute(inquiry(failed(3, signal=9)), scan(hit(KEY_ERROR, 3)))
    assert (found.verdict, found.fault) == (Verdict.UNKNOWN, "key_error")
    assert "ended by SIGKILL, which this error does not explain" in found.explanation


def test_a_lost_node_is_blamed() -> None:
    """A lost node is blamed without any log line, and its peers' complaints blame none of them."""
    lost = inquiry(failed(None, node="n2", cause="connection to its agent closed"))
    for complaints in ((), (hit(RESET, 0, node="n1"), hit(ANY_ERROR, 1, node="n1"))):
        found = attribute(lost, scan(*complaints))
        assert (found.verdict, found.scope, found.nodes, found.ranks) == (Verdict.RESTART, Scope.NODE, ("n2",), ())


AGAIN = [
    ((), Verdict.UNKNOWN, Scope.USER_CODE, ()),
    ((("n2",),), Verdict.STOP, Scope.USER_CODE, ()),
    (((),), Verdict.STOP, Scope.USER_CODE, ()),
    ((("n1",),), Verdict.RESTART, Scope.NODE, ("n1",)),
]


@pytest.mark.parametrize(("before", "verdict", "scope", "nodes"), AGAIN)
def test_what_happens_again_is_no_accident(
    before: tuple[tuple[str, ...], ...], verdict: Verdict, scope: Scope, nodes: tuple[str, ...]
) -> None:
    """A failure that happens again on another node is the program's; on the same node it is the node's."""
    found = again(before)
    assert (found.verdict, found.scope, found.nodes) == (verdict, scope, nodes)


def test_a_repeat_makes_surer() -> None:
    """A repeated failure gives a higher confidence than a single one."""
    assert again((("n2",),)).confidence > again(()).confidence


def again(nodes: tuple[tuple[str, ...], ...]) -> Attribution:
    """A segmentation fault on n1, after earlier ones on these nodes."""
    crash = hit(SEGFAULT, 3, groups={"frames": "ops.py:12 in fused"})
    once = attribute(inquiry(failed(3)), scan(crash))
    assert once.primary is not None
    print_ = fingerprint(once.fault, once.primary, "ops.py:12 in fused")
    earlier = tuple(CycleEnding(once.fault, print_, each) for each in nodes)
    return attribute(inquiry(failed(3)), scan(crash), SideEvidence(earlier=earlier))


def test_nothing_at_all_is_unknown() -> None:
    """Without any line or fact the verdict is UNKNOWN, with a confidence of 0."""
    found = attribute(inquiry(nodes=()), scan())
    assert (found.verdict, found.fault, found.confidence) == (Verdict.UNKNOWN, "unknown", 0.0)
    assert found.explanation == "No line reports a failure."


@pytest.mark.parametrize(("lasted_s", "verdict"), [(90.0, Verdict.STOP), (7200.0, Verdict.UNKNOWN)])
def test_too_little_memory_shows_at_the_start(lasted_s: float, verdict: Verdict) -> None:
    """Memory that runs out at the start is too small; later it may be a leak, which a restart works around."""
    own_limit = rule("host_oom.cgroup", Verdict.UNKNOWN, scope=Scope.USER_CODE, severity=82)
    line = hit(own_limit, None, node="n1", kind="health", t=1000.0 + lasted_s)
    assert attribute(inquiry(failed(3, signal=9), started_at=1000.0), scan(line)).verdict is verdict


def test_a_rank_within_its_node_is_a_rank_of_the_world() -> None:
    """A launcher counts ranks from 0 on every node; they are converted to ranks of the world."""
    told = rule("segfault.launcher", Verdict.UNKNOWN, severity=60)
    line = hit(told, None, node="n2", file="launcher.log", groups={"local_rank": "1"})
    assert attribute(inquiry(), scan(line)).ranks == (5,)


def test_of_equally_many_the_first_is_named_first() -> None:
    """Of equally frequent consequences the first is named first, so that the explanation does not depend on a
    process's order of sets."""
    lines = [hit(rule(f"fault_{n}.seen", role="consequence"), 1, line=20 + n) for n in (3, 1, 2)]
    explanation = attribute(inquiry(failed(rank=0)), scan(hit(OOM, 0), *lines)).explanation
    assert re.findall(r"fault (\d) \(1 rank\)", explanation) == ["3", "1", "2"]
