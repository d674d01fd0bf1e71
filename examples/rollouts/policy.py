"""The policy: fetches trajectories from whichever node has them, learns from them, and tells the rollouts its
weights.

What died with its rollout is skipped. It ends once it has read enough, and tells the rollouts so.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict, deque
from typing import NamedTuple

import numpy as np
from trajectories import FEATURES, Trajectory, is_as_played, learn

from nvrx_slurm.transport import Directory, PayloadClient, PayloadServer, Published, SharedRing, TransportError
from nvrx_slurm.workload import beat

LOOK_AHEAD = 256
FETCH_S = 10.0
WAIT_S = 5.0


class Life(NamedTuple):
    """A rollout, from its start to its end; the one that takes its place is another life."""

    replica: str
    generation: int
    cycle: int


class Backlog:
    """What is published and not yet asked for, without what nobody can serve any more."""

    def __init__(self) -> None:
        self._waiting: deque[Published] = deque()
        self._newest: dict[str, Published] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, found: list[Published]) -> None:
        self._waiting += found
        for published in found:
            known = self._newest.setdefault(published.replica, published)
            if known.is_outlived_by(published):
                self._newest[published.replica] = published

    def take(self, most: int) -> tuple[list[Published], list[Published]]:
        """The oldest ones, and those before them whose rollout was replaced meanwhile."""
        batch, outlived = list[Published](), list[Published]()
        while self._waiting and len(batch) < most:
            published = self._waiting.popleft()
            is_outlived = published.is_outlived_by(self._newest[published.replica])
            (outlived if is_outlived else batch).append(published)
        return batch, outlived


class Accounts:
    """What was read of each life, and what was skipped: together, all that it has published."""

    def __init__(self) -> None:
        self.read: defaultdict[Life, list[int]] = defaultdict(list)
        self.skipped: Counter[Life] = Counter()

    def took(self, life: Life, trajectory: Trajectory) -> None:
        """Ends the policy if it is not what it must be: the next one of that life, with its own content."""
        came = (f"rollout-{trajectory['life'][0]}", *trajectory["life"][1:])
        if came != life or not is_as_played(trajectory):
            sys.exit(f"this is not what {life} has made: {came}, number {trajectory['number']}")
        if self.read[life] and trajectory["number"] <= self.read[life][-1]:
            sys.exit(f"number {trajectory['number']} of {life} came after number {self.read[life][-1]}")
        self.read[life].append(trajectory["number"])

    def skip(self, published: Published, why: object) -> None:
        print(f"skipped one of {published.replica}, cycle {published.cycle}: {why}", flush=True)
        self.skipped[life_of(published)] += 1

    def check(self) -> None:
        """Ends the policy if anything is missing that it has not skipped."""
        for life, numbers in self.read.items():
            if numbers[-1] + 1 > len(numbers) + self.skipped[life]:
                sys.exit(f"of {numbers[-1] + 1} trajectories of {life} only {len(numbers)} came")

    @property
    def of_replacements(self) -> int:
        """How many were read from rollouts that took the place of others."""
        return sum(len(numbers) for life, numbers in self.read.items() if life[1:] != (0, 0))

    @property
    def total(self) -> int:
        return sum(map(len, self.read.values()))


class Policy:
    """Weights, and where the rollouts find them."""

    def __init__(self, server: PayloadServer, directory: Directory) -> None:
        self._server, self._directory = server, directory
        self.weights = np.zeros(FEATURES, dtype=np.float32)
        self.reward = 0.0

    def learn(self, trajectory: Trajectory) -> None:
        self.weights = learn(self.weights, trajectory)
        self.reward = float(trajectory["rewards"].mean())

    def tell(self, topic: str) -> None:
        """Of older weights only the newest few are kept: nobody waits for them."""
        self._directory.publish(self._server.write(self.weights), topic)


def life_of(published: Published) -> Life:
    return Life(published.replica, published.generation, published.cycle)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learns from what rollouts play, until it has read enough.")
    parser.add_argument("--payloads", type=int, default=600, help="read so many")
    parser.add_argument("--of-replacements", type=int, default=0, help="among them so many of replaced rollouts")
    parser.add_argument("--skipped", type=int, default=0, help="and go on until so many were skipped")
    parser.add_argument("--batch", type=int, default=6, help="fetch so many at a time")
    parser.add_argument("--step-time", type=float, default=0.05, metavar="SECONDS", help="let a batch take so long")
    parser.add_argument("--transports", default="shm,tcp", help="how to fetch: tcp reads over the network even here")
    return parser.parse_args()


def step(
    backlog: Backlog, accounts: Accounts, policy: Policy, client: PayloadClient, options: argparse.Namespace
) -> None:
    """Fetch a batch, whatever of it can be had, and learn from it."""
    batch, outlived = backlog.take(options.batch)
    for published in outlived:
        accounts.skip(published, "its rollout was replaced")
    fetched = client.fetch_all([published.ref for published in batch], deadline=FETCH_S, on_missing="skip")
    for published in batch:
        why: TransportError | None = fetched.missing.get(published.ref)
        if why is not None:
            accounts.skip(published, why)
            continue
        accounts.took(life_of(published), fetched[published.ref])
        policy.learn(fetched[published.ref])


def main() -> None:
    options = parse()
    backlog, accounts, number = Backlog(), Accounts(), 0
    with (
        Directory() as directory,
        SharedRing.create(slots=4, slot_bytes=1 << 12) as ring,
        PayloadServer(ring) as server,
        PayloadClient(transports=options.transports.split(",")) as client,
    ):
        policy, following = Policy(server, directory), directory.follow()
        while (
            accounts.total < options.payloads
            or accounts.of_replacements < options.of_replacements
            or accounts.skipped.total() < options.skipped
        ):
            backlog.add(following.next(LOOK_AHEAD, timeout_s=0.0 if len(backlog) else WAIT_S))
            step(backlog, accounts, policy, client, options)
            policy.tell("weights")
            time.sleep(options.step_time)
            number += 1
            beat(step=number)
        policy.tell("end")
    accounts.check()
    for life in sorted({*accounts.read, *accounts.skipped}):
        print(f"{life.replica} cycle {life.cycle}: read {len(accounts.read[life])}, skipped {accounts.skipped[life]}")
    print(
        f"read {accounts.total}, {accounts.of_replacements} of them of replacements; mean reward {policy.reward:.4f}"
    )


if __name__ == "__main__":
    main()
