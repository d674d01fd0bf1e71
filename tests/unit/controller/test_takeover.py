"""How a new controller treats the time without a controller, and broken connections; in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from nvrx_slurm.controller.failure_detector import PROBE_SETTLE_S
from nvrx_slurm.journal.records import (
    ControllerStarted,
    DecisionsLate,
    Fence,
    LogFindings,
    NodeJoined,
    NodeLost,
    NodeReady,
    Progress,
    RendezvousClosed,
    RendezvousOpened,
    RestartDecided,
    StoreDataLost,
    WorkerFailed,
)
from tests.unit.controller.virtual_host import PROBED_S, VirtualHost
from tests.unit.core.fleet import plain

INTERVAL_S, TIMEOUT_S = 1.0, 10.0
JOIN_S = 3.0


def host(**bounds: float) -> VirtualHost:
    keys = {"heartbeat__interval": INTERVAL_S, "heartbeat__timeout": TIMEOUT_S, "heartbeat__startup_timeout": 300.0}
    return VirtualHost(plain(nodes=2, spares=1, **{**keys, **bounds}), answers_after_s=0.02)


async def running(host: VirtualHost) -> None:
    """Three nodes have joined, and cycle 0 runs on two of them."""
    await host.start_controller()
    await host.join(*host.nodes)
    await host.later(INTERVAL_S)
    assert [closed.nodes for closed in await host.journal(RendezvousClosed)] == [("n1", "n2")]


def test_what_was_said_while_no_controller_ran_is_taken_in() -> None:
    """Nodes join while there is no controller: the next controller has them in its journal, and assigns ranks."""

    async def story(host: VirtualHost) -> None:
        await host.join(*host.nodes)
        await host.start_controller()
        await host.later(INTERVAL_S)
        assert {joined.node for joined in await host.journal(NodeJoined)} == set(host.nodes)
        assert len(await host.journal(RendezvousClosed)) == 1

    host().play(story)


def test_a_store_that_has_lost_its_data_ends_its_controller_and_the_next_one_goes_on() -> None:
    """The next controller has the copy: its epoch is newer, its entries follow on, and all agents join again. The
    controller after that finds nothing lost."""

    async def story(host: VirtualHost) -> None:
        await running(host)
        host.server.lose_data()
        await host.later(2 * INTERVAL_S)
        assert not host.has_controller
        for n in range(2):
            await host.start_controller()
            await host.later(INTERVAL_S)
            assert [lost.entries > 3 for lost in await host.journal(StoreDataLost)] == [True]
            assert [fence.node for fence in await host.journal(Fence)] == ["n1", "n2", "n3"]
            epochs = [started.epoch for started in await host.journal(ControllerStarted)]
            assert epochs == list(range(epochs[0], epochs[0] + n + 1))
            assert epochs[0] > 2, "1 was committed, and another one may have been given"
            await host.kill_controller()
        entries = await host.store.journal()
        first = entries[0].n
        assert first > 3 and [entry.n for entry in entries] == list(range(first, first + len(entries)))

    host().play(story)


def test_nodes_have_their_time_from_when_they_can_read_that_the_job_begins() -> None:
    """The store answers the commit that begins the job only after the join timeout."""

    async def story(host: VirtualHost) -> None:
        host.answers_after_s = 1.3 * JOIN_S
        await host.start_controller()
        async with asyncio.timeout(10 * JOIN_S):
            while not await host.journal(RendezvousOpened):
                await host.later(INTERVAL_S)
        host.answers_after_s = 0.02
        await host.later(1.3 * JOIN_S)
        assert len(await host.journal(DecisionsLate)) == 1
        await host.join(*host.nodes)
        await host.later(INTERVAL_S)
        assert [closed.nodes for closed in await host.journal(RendezvousClosed)] == [("n1", "n2")]

    host(rendezvous__join_timeout=JOIN_S).play(story)


def test_late_orders_of_a_controller_that_died_are_marked_by_the_next() -> None:
    """The store takes the commit that opens cycle 1 only after the join timeout, and its controller dies."""

    async def story(host: VirtualHost) -> None:
        await running(host)
        host.asks_after_s = 1.3 * JOIN_S
        n1 = {"incarnation": "n1.0", "node": "n1", "generation": 0, "replica": "main-0"}
        await host.store.post(WorkerFailed(**n1, seq=2, cycle=0, rank=0, exit_code=1))
        async with asyncio.timeout(10 * JOIN_S):
            while len(await host.journal(RendezvousOpened)) < 2:
                await host.later(0.02)
        assert not await host.journal(DecisionsLate)
        await host.kill_controller()
        host.asks_after_s = 0.0
        await host.start_controller()
        await host.later(0.9 * JOIN_S)
        assert len(await host.journal(DecisionsLate)) == 1
        for node in ("n1", "n2"):
            ready = {**n1, "incarnation": f"{node}.0", "node": node}
            await host.store.post(NodeReady(**ready, seq=3, cycle=1, port=1))
        await host.later(INTERVAL_S)
        assert [closed.nodes for closed in await host.journal(RendezvousClosed)] == 2 * [("n1", "n2")]

    host(rendezvous__join_timeout=JOIN_S, teardown__grace=0.1).play(story)


def test_each_order_is_in_the_journal() -> None:
    """Agents read no order whose decision is missing in the next controller's journal."""

    async def story(host: VirtualHost) -> None:
        await running(host)
        journal = await host.store.journal()
        assert [entry.n for entry in journal] == list(range(1, len(journal) + 1))
        ordered = [order for _, order in await host.store.orders("0-0") if isinstance(order, RendezvousClosed)]
        assert [order.cycle for order in ordered] == [0]

    host().play(story)


def test_what_agents_find_in_logs_is_in_no_journal() -> None:
    """Findings decide nothing. What the agent reports after them is taken in, also by the next controller."""

    async def story(host: VirtualHost) -> None:
        await running(host)
        n1 = {"incarnation": "n1.0", "node": "n1", "generation": 0, "replica": "main-0", "cycle": 0}
        await host.store.post(WorkerFailed(**n1, seq=2, rank=0, exit_code=1))
        await host.store.post(LogFindings(**n1, seq=3, whole=True, data=b"found"))
        await host.later(INTERVAL_S)
        await host.kill_controller()
        await host.start_controller()
        await host.store.post(NodeReady(**{**n1, "cycle": 1}, seq=4, port=1))
        await host.later(INTERVAL_S)
        records = [entry.record for entry in await host.store.journal()]
        assert not any(isinstance(record, LogFindings) for record in records)
        assert [record.seq for record in records if isinstance(record, NodeReady)] == [4]

    host().play(story)


def test_no_deadline_is_judged_before_the_facts_that_arrived_in_time_are_read() -> None:
    """The store answers late, and the last call passes meanwhile: a node that was ready in time keeps its ranks."""

    async def story(host: VirtualHost) -> None:
        await running(host)
        n1 = {"incarnation": "n1.0", "node": "n1", "generation": 0, "replica": "main-0"}
        await host.store.post(WorkerFailed(**n1, seq=2, cycle=0, rank=0, exit_code=1))
        await host.later(0.5)
        await host.store.post(NodeReady(**n1, seq=3, cycle=1, port=1))
        await host.later(0.5)
        host.answers_after_s = 6.0
        n2 = {**n1, "incarnation": "n2.0", "node": "n2"}
        await host.store.post(NodeReady(**n2, seq=2, cycle=1, port=1))
        await host.later(20.0)
        closed = (await host.journal(RendezvousClosed))[-1]
        assert (closed.cycle, closed.nodes) == (1, ("n1", "n2"))

    host(teardown__grace=0.5, rendezvous__last_call=4.0).play(story)


def test_a_fact_counts_from_its_arrival_in_the_store() -> None:
    """It does not count from when the controller has read it: a backlog is judged as if it had been read in time."""

    async def story(host: VirtualHost) -> None:
        await running(host)
        host.answers_after_s = 0.8
        posted_at = host.clock.wall()
        node = {"incarnation": "n1.0", "node": "n1", "generation": 0}
        await host.store.post(Progress(**node, seq=2, replica="main-0", cycle=0, rank=0, step=1))
        await host.later(5.0)
        (entry,) = [entry for entry in await host.store.journal() if isinstance(entry.record, Progress)]
        assert entry.t == pytest.approx(posted_at, abs=0.1)

    host().play(story)


def test_a_new_controller_listens_for_a_full_timeout_before_it_declares_a_node_dead() -> None:
    """Heartbeats from the time without a controller may be missing, and a broken connection is no second sign yet."""

    async def story(host: VirtualHost) -> None:
        await running(host)
        await host.kill_controller()
        await host.fall_silent("n1")
        await host.start_controller()
        await host.later(0.5)
        host.break_connection("n1")
        await host.later(TIMEOUT_S - 1.0)
        assert await host.journal(NodeLost) == []
        host.beat("n1")
        await host.later(3 * TIMEOUT_S)
        assert await host.journal(NodeLost) == []

    host().play(story)


def test_a_node_that_died_with_the_controller_is_given_up_within_the_timeout() -> None:
    """The node joined long ago, and does not get the time for a first heartbeat again."""

    async def story(host: VirtualHost) -> None:
        await running(host)
        await host.kill_controller()
        await host.fall_silent("n1")
        await host.start_controller()
        await host.later(TIMEOUT_S + 1.0)
        assert [lost.node for lost in await host.journal(NodeLost)] == ["n1"]

    host().play(story)


def test_an_agent_that_joins_again_has_no_time_for_a_first_heartbeat() -> None:
    """The agent has sent heartbeats under its former incarnation, and dies before one under the new incarnation."""

    async def story(host: VirtualHost) -> None:
        await running(host)
        await host.fall_silent("n1")
        await host.join_again("n1")
        await host.later(TIMEOUT_S + 2 * INTERVAL_S)
        assert [(lost.incarnation, lost.cause) for lost in await host.journal(NodeLost)] == [
            ("n1.0-1", "heartbeat_timeout")
        ]

    host().play(story)


def test_a_broken_connection_alone_is_no_death() -> None:
    """The node's heartbeats arrive, and its kernel does not say that its processes are gone."""

    async def story(host: VirtualHost) -> None:
        await running(host)
        await host.later(2 * TIMEOUT_S)  # after every guard
        host.break_connection("n1")
        await host.later(2 * TIMEOUT_S)
        assert await host.journal(NodeLost) == []
        host.kernels_refuse = True
        host.break_connection("n1")
        await host.later(INTERVAL_S)
        assert [lost.node for lost in await host.journal(NodeLost)] == ["n1"]

    host().play(story)


def test_ranks_of_a_node_that_is_proven_dead_wait_until_its_workers_are() -> None:
    """A supervisor that is killed closes its sockets before the kernel kills its workers."""

    async def story(host: VirtualHost) -> None:
        await running(host)
        await host.later(TIMEOUT_S)
        host.kernels_refuse = True
        host.break_connection("n1")
        await host.later(INTERVAL_S)
        [lost] = await host.journal(NodeLost)
        assert lost.ago_s == pytest.approx(PROBED_S + PROBE_SETTLE_S)

    host().play(story)


def test_a_refusal_proves_no_death_of_a_node_without_a_fence() -> None:
    """The kernel refuses port 0 whether the node's processes live or not."""

    async def story(host: VirtualHost) -> None:
        await host.start_controller()
        await host.join(*host.nodes, fence_port=0)
        host.kernels_refuse = True
        await host.later(INTERVAL_S)
        host.break_connection("n1")
        await host.later(2 * TIMEOUT_S)
        assert await host.journal(NodeLost) == []

    host().play(story)


def test_a_node_of_the_generation_before_is_not_watched() -> None:
    """The next generation finds the node's join in the same store, and may not have the node any more: its silence is
    no loss."""

    async def story(host: VirtualHost) -> None:
        await running(host)
        await host.requeue("n1", "n2", "n4", fresh_store=False)
        await host.start_controller()
        await host.join("n1", "n2", "n4")
        await host.later(3 * TIMEOUT_S)
        assert host.has_controller
        assert await host.journal(NodeLost) == []

    host().play(story)


@pytest.mark.parametrize("fresh_store", [False, True])
def test_budget_of_the_generation_before_counts_for_each_controller_of_the_next(fresh_store: bool) -> None:
    """It counts even if the store is younger than the job, and another controller has begun its journal."""

    async def fail(host: VirtualHost) -> None:
        n1 = {"incarnation": f"n1.{host.generation}", "node": "n1", "generation": host.generation}
        await host.store.post(WorkerFailed(**n1, seq=2, replica="main-0", cycle=0, rank=0, exit_code=1))
        await host.later(INTERVAL_S)

    async def story(host: VirtualHost) -> None:
        await running(host)
        await fail(host)
        left = (await host.journal(RestartDecided))[-1].restarts_left
        await host.requeue(*host.nodes, fresh_store=fresh_store)
        await host.start_controller()
        await host.join(*host.nodes)
        await host.later(INTERVAL_S)
        await host.kill_controller()
        await host.start_controller()
        await fail(host)
        assert (await host.journal(RestartDecided))[-1].restarts_left == left - 1

    host().play(story)
