"""One history of payloads: producers that write, readers that ask, the faults, and a last phase without faults."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from nvrx_slurm.lab.simulation.threads import (
    HistoryResult,
    VirtualFuture,
    VirtualHistory,
    VirtualProcess,
    VirtualQueue,
    VirtualThread,
)
from nvrx_slurm.lab.simulation.transport.links import PayloadNetwork
from nvrx_slurm.lab.simulation.transport.promises import PayloadPromise, PayloadPromises
from nvrx_slurm.lab.simulation.transport.rings import RingKernel
from nvrx_slurm.lab.simulation.transport.shape import (
    PayloadAct,
    PayloadFault,
    PayloadShape,
    draw_payload_acts,
    draw_payload_shape,
)
from nvrx_slurm.transport.client import END_S, PayloadClient
from nvrx_slurm.transport.errors import RingFull, TransportError
from nvrx_slurm.transport.protocol import host_and_port
from nvrx_slurm.transport.ref import PayloadRef
from nvrx_slurm.transport.retrying import JITTER, LONGEST_S, QUARANTINE_S
from nvrx_slurm.transport.ring_file import RingShape
from nvrx_slurm.transport.server import PayloadServer, ServerLimits

TOKEN, OTHER_TOKEN = b"the job's token, 32 bytes of it.", b"another job's token, 32 bytes..."
HISTORY_S = 5_000.0
LAST_READS = 8
LAST_DEADLINE_S = 60.0
# How long a killed process takes to come back.
BACK_S = 0.3


class SimulatedProducer:
    """One host's producer, and the one that comes after it."""

    def __init__(self, history: PayloadHistory, number: int) -> None:
        self.history, self.number = history, number
        self.host = f"p{number}"
        self.life = 0
        self.ports: tuple[int, ...] = ()
        self.server: PayloadServer | None = None
        self.left = history.shape.payloads
        self.start()

    def start(self) -> None:
        self.life += 1
        self.process: VirtualProcess = self.history.kernel.process(f"producer {self.number}.{self.life}", self.host)
        self.process.start(self._main)

    def _main(self) -> int:
        history, shape = self.history, self.history.shape
        lease_ns = int(shape.lease_s * 1e9)
        ring = history.kernel.create(RingShape(shape.slots, shape.bytes, shape.overwrite, shape.checksum, lease_ns))
        limits = ServerLimits(read_s=max(1.0, shape.lease_s), eviction_s=20.0)
        # Once it has come back, at the ports of its first life: readers hold refs that name these.
        self.server = PayloadServer(ring, ports=self.ports or shape.ports, token=TOKEN, limits=limits)
        self.ports = tuple(host_and_port(port)[1] for port in self.server.ports)
        while self.left:
            self.left -= 1
            history.scheduler.sleep(history.chance.random() * shape.every_s)
            self.write()
        history.over.wait()
        self.server.close()
        ring.close()
        return 0

    def write(self) -> PayloadRef | None:
        """One payload, offered to its readers."""
        history, shape = self.history, self.history.shape
        assert self.server is not None
        data = history.payload()
        try:
            writing = self.server.ring.begin(len(data), timeout_s=1.0)
        except RingFull:
            history.promises.note(f"{self.process.name}: the ring is full")
            return None
        # In two halves, with a switch between them: a reader that looks too soon would see a torn payload.
        half = len(data) // 2
        writing.copy_in(0, data[:half])
        history.scheduler.maybe_switch()
        writing.copy_in(half, data[half:])
        ref = self.server.refer(writing.publish())
        history.promises.written(ref, data, self.process)
        if history.is_last_phase:
            return ref
        readers = history.chance.sample(history.readers, min(len(history.readers), 2 if shape.shared else 1))
        for reader in readers:
            reader.inbox.put(ref)
        return ref


class SimulatedReader:
    """One process that reads, and the one that comes after it."""

    def __init__(self, history: PayloadHistory, number: int) -> None:
        self.history, self.number = history, number
        self.host = "p0" if number < history.shape.local else f"r{number}"
        self.life = 0
        self.start()

    def start(self) -> None:
        self.life += 1
        history = self.history
        self.process: VirtualProcess = history.kernel.process(f"reader {self.number}.{self.life}", self.host)
        self.inbox: VirtualQueue[PayloadRef | None] = VirtualQueue(history.scheduler)
        self.current: dict[VirtualThread, list[PayloadRef]] = {}
        self.has_read_all = False
        self.client: PayloadClient | None = None
        if history.is_last_phase:
            self.inbox.put(None)
        self.process.on_death(self._died)
        self.process.start(self._main)

    def _died(self) -> None:
        for refs in self.current.values():
            for ref in refs:
                self.history.promises.asked_by_the_dead(ref)

    def _main(self) -> int:
        shape, names = self.history.shape, self.history.names
        self.client = PayloadClient(token=TOKEN, connections_per_port=1 + shape.threads // 2, concurrency=2)
        threads = [names.threading.Thread(target=self._read_all, name=f"thread {n}") for n in range(shape.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.has_read_all = True
        self.history.over.wait()
        self.client.close()
        return 0

    def _read_all(self) -> None:
        shape = self.history.shape
        while (ref := self.inbox.get()) is not None:
            refs = [ref]
            while shape.batches and not self.inbox.empty() and len(refs) < 4:
                if (more := self.inbox.get()) is None:
                    self.inbox.put(None)
                    break
                refs.append(more)
            self.read(refs, shape.deadline_s)
        self.inbox.put(None)  # for the next thread

    def read(self, refs: list[PayloadRef], deadline_s: float) -> bool:
        """Some refs, in one batch where there are several. Whether all came."""
        history, client = self.history, self.client
        assert client is not None
        thread, promises = history.scheduler.current, history.promises
        assert thread is not None
        kept = history.shape.kept
        self.current[thread] = refs
        began, stopped_s = history.scheduler.now_s, self.process.frozen_s + thread.stalled_s
        came = False
        late_s = END_S if len(refs) > 1 else 0.0
        try:
            if history.shape.views and self.is_local(refs[0]):
                seen = [self._view(ref, deadline_s) for ref in refs]
                return all(seen)
            if len(refs) == 1:
                data = client.read(refs[0], deadline=deadline_s, keep=kept)
                promises.read(self.process.name, refs[0], bytes(data))
                came = True
            else:
                fetched = client.fetch_all(refs, deadline=deadline_s, on_missing="skip", keep=kept)
                for ref, data in fetched.items():
                    promises.read(self.process.name, ref, bytes(data))
                for ref, error in fetched.missing.items():
                    promises.failed(self.process.name, ref, error)
                came = not fetched.missing
        except TransportError as error:
            promises.failed(self.process.name, refs[0], error)
        finally:
            if self.process.alive:
                del self.current[thread]
        stopped_s = self.process.frozen_s + thread.stalled_s - stopped_s
        promises.took(self.process, history.scheduler.now_s - began - late_s, stopped_s, deadline_s)
        return came

    def is_local(self, ref: PayloadRef) -> bool:
        return self.host == ref.node

    def _view(self, ref: PayloadRef, deadline_s: float) -> bool:
        """Look at it where it lies, for some time: for longer than the lease, now and then."""
        history, shape = self.history, self.history.shape
        try:
            with (
                history.kernel.attach(ref.ring) as ring,
                ring.view(ref, timeout_s=deadline_s, keep=shape.kept) as data,
            ):
                chance, half = history.chance, len(data) // 2
                seen = bytes(data[:half])
                history.scheduler.sleep(chance.choice((0.0, 0.01, shape.lease_s)) * chance.random() * 1.5)
                seen += bytes(data[half:])
        except TransportError as error:
            history.promises.failed(self.process.name, ref, error)
            return False
        history.promises.read(self.process.name, ref, seen)
        return True


class PayloadHistory(VirtualHistory[PayloadShape, PayloadAct]):
    """One history of payloads."""

    stuck, sound = PayloadPromise.DEADLINE, PayloadPromise.SOUND
    promises: PayloadPromises

    def __init__(self, seed: int, acts: tuple[PayloadAct, ...] | None = None) -> None:
        shape = draw_payload_shape(Random(f"{seed}/shape"))
        super().__init__(seed, shape, draw_payload_acts(Random(f"{seed}/adversary"), shape) if acts is None else acts)
        self.network = PayloadNetwork(self.scheduler, Random(f"{seed}/network"))
        self.kernel = RingKernel(self.scheduler, self.network, Random(f"{seed}/kernel"))
        self.names = self.kernel.substituted()
        self.promises = PayloadPromises(self)
        self.over = self.names.threading.Event()
        self.producers: list[SimulatedProducer] = []
        self.readers: list[SimulatedReader] = []
        self.is_last_phase = False
        self.may_repeat = bool(self.acts)
        self._payloads = 0
        self._is_done = False

    def payload(self) -> bytes:
        """Another one each time."""
        self._payloads += 1
        size = self.shape.bytes - (self._payloads % 3)
        return (self._payloads.to_bytes(4, "little") * (size // 4 + 1))[:size]

    # ---- faults

    def _perform(self, act: PayloadAct) -> None:
        if self.is_last_phase:
            return
        producer = self.producers[act.which % len(self.producers)]
        reader = self.readers[act.which % len(self.readers)]
        victim = reader if act.fault in (PayloadFault.KILL_READER, PayloadFault.STOP_READER) else producer
        later = partial(self.scheduler.call_later, act.lasts_s)

        def last(fault: str) -> None:
            self.network.faults[fault] += 1
            later(partial(self.network.faults.subtract, [fault]))

        self.promises.note(f"fault: {act.fault}, number {act.which}")
        match act.fault:
            case PayloadFault.KILL_READER | PayloadFault.KILL_PRODUCER:
                victim.process.kill()
                self.scheduler.call_later(BACK_S, partial(self._back, victim))
            case PayloadFault.STOP_READER | PayloadFault.STOP_PRODUCER:
                # The first one that ends a stop ends all. Readers share a producer's clock of leases, not its stop.
                victim.process.freeze()
                later(victim.process.thaw)
            case PayloadFault.POWER_OFF:
                last(f"{producer.host} is off")
                producer.process.kill()
                for other in self.readers:
                    if other.host == producer.host:
                        other.process.kill()

                def power_on() -> None:
                    self._back(producer)
                    for other in self.readers:
                        self._back(other)

                later(power_on)
            case PayloadFault.CUT_OFF:
                last(producer.host)
            case PayloadFault.PORT_DOWN if producer.ports:
                last(f"tcp://{producer.host}:{producer.ports[act.which % len(producer.ports)]}")
            case PayloadFault.RESETS | PayloadFault.CORRUPT:
                last(act.fault)
            case PayloadFault.OTHER_JOB:
                producer.process.kill()
                stranger = self.kernel.process(f"other job on {producer.host}", producer.host)
                ports = producer.ports

                def serve() -> int:
                    ring = self.kernel.create(RingShape(1, 64, True, True, 10**9))
                    PayloadServer(ring, ports=ports or 1, token=OTHER_TOKEN).write(b"none of yours")
                    self.over.wait()
                    return 0

                stranger.start(serve)

                def end() -> None:
                    stranger.kill()
                    self._back(producer)

                later(end)

    def _back(self, of: SimulatedProducer | SimulatedReader) -> None:
        if not of.process.alive:
            of.start()

    # ---- the last phase

    def _finish(self) -> int:
        """No more faults: all is read, or still there; every port is asked again once its quarantine is over."""
        scheduler, shape = self.scheduler, self.shape
        last_s = max((act.at_s + act.lasts_s for act in self.acts), default=0.0) + 2 * BACK_S
        scheduler.sleep(last_s)
        for _ in range(600):
            if all(not producer.left and producer.server for producer in self.producers):
                break
            scheduler.sleep(1.0)
        self.is_last_phase = True
        for reader in self.readers:
            reader.inbox.put(None)
        for _ in range(600):  # it may look at each payload for longer than the lease, one after the other
            if all(reader.has_read_all or not reader.process.alive for reader in self.readers):
                break
            scheduler.sleep(1.0)
        scheduler.sleep(shape.payloads * shape.deadline_s + shape.lease_s + 3.0)
        for producer in self.producers:
            # In its own process: there its attempts are known.
            self._do(producer.process, partial(self.promises.check_ring, producer.number))
        if self.promises.broken is None:
            # Every quarantine is over by then, however long it was.
            scheduler.sleep(LONGEST_S * (1 + JITTER) + 1.0)
            self._ask_all("after the longest quarantine")
        if self.promises.broken is None and shape.ports > 1:
            # One more fault, of one port: the first since a success, so that its quarantine is the shortest.
            down = {f"tcp://{each.host}:{each.ports[0]}" for each in self.producers}
            servers = {address: self.network.listeners.pop(address) for address in down}
            scheduler.sleep(40.0)  # idle connections to it are closed by then: they would hide that it is down
            until = scheduler.now_s + QUARANTINE_S * (1 - JITTER)
            self._ask_all("with one port down", all_ports=False)
            self.network.listeners.update(servers)
            asked = len(self.network.asked)
            self._ask_all("while one port is in quarantine", all_ports=False)
            for at_s, who, address in self.network.asked[asked:]:
                if address in down and at_s < until:
                    self.promises.broke(PayloadPromise.QUARANTINE, f"{who} asked {address} in its quarantine")
            scheduler.sleep(QUARANTINE_S * (1 + JITTER) + 1.0)
            self._ask_all("after the first quarantine")
        # The last acknowledgements are on their way.
        scheduler.sleep(max(shape.lease_s, 1.0) + 2.0)
        for producer in self.producers:
            self._do(producer.process, partial(self.promises.check_ring, producer.number))
        self._is_done = True
        self.over.set()
        return 0

    def _ask_all(self, when: str, *, all_ports: bool = True) -> None:
        """Each reader reads payloads of each producer; over the network it asks every port of it."""
        shape = self.shape
        for reader in self.readers:
            for producer in self.producers:
                asked = len(self.network.asked)
                for _ in range(LAST_READS):
                    if self.shape.kept:
                        self.scheduler.sleep(0.1)  # until the acknowledgement has come
                        self._do(producer.process, partial(self._empty, producer))
                    ref = self._do(producer.process, producer.write)
                    if not isinstance(ref, PayloadRef):
                        self._do(producer.process, partial(self._empty, producer))
                        ref = self._do(producer.process, producer.write)
                    if not isinstance(ref, PayloadRef):
                        self.promises.broke(PayloadPromise.FREED, f"{producer.process.name} has no slot {when}")
                        return
                    if not self._do(reader.process, partial(reader.read, [ref], LAST_DEADLINE_S)):
                        if shape.views and reader.is_local(ref):
                            continue  # it has looked at it for longer than the lease
                        self.promises.broke(PayloadPromise.PROGRESS, f"{reader.process.name} reads nothing {when}")
                        return
                self.scheduler.sleep(1.0)
                check = partial(self.promises.check_settled, producer.number, reader.process.name)
                self._do(producer.process, check)
                if all_ports and reader.host != producer.host:
                    # Connections are kept for a while: the first round of all finds none.
                    ports = {f"tcp://{producer.host}:{port}" for port in producer.ports}
                    seen = {address for _, who, address in self.network.asked[asked:] if who == reader.process.name}
                    if ports - seen:
                        sentence = f"{reader.process.name} has not asked {sorted(ports - seen)} {when}"
                        self.promises.broke(PayloadPromise.QUARANTINE, sentence)
                        return

    def _empty(self, producer: SimulatedProducer) -> None:
        """No reader asks for what is left in its ring: it is consumed as if it had been read."""
        assert producer.server is not None
        ring = producer.server.ring
        for index, slot in enumerate(ring.slot_states()):
            if ring.settle(index, slot.generation):
                self.promises.delivered[ring.name, index, slot.generation] += 1

    def _do(self, process: VirtualProcess, work: Callable[[], object]) -> object:
        """In a thread of that process; its result."""
        future: VirtualFuture[object] = self.names.future()
        VirtualThread(self.scheduler, process, lambda: future.set_result(work()), "last phase").start()
        return future.result()

    # ---- running it

    def begin(self) -> float:
        self.readers.extend(SimulatedReader(self, number) for number in range(self.shape.readers))
        self.producers.extend(SimulatedProducer(self, number) for number in range(self.shape.producers))
        for act in self.acts:
            self.scheduler.call_later(act.at_s, partial(self._perform, act))
        self.kernel.process("world", "world").start(self._finish)
        return HISTORY_S

    def is_over(self) -> bool:
        return self._is_done and not any(process.alive for process in self.kernel.processes.values())


def run_payloads(seed: int, acts: tuple[PayloadAct, ...] | None = None) -> HistoryResult:
    """One history. The same arguments give the same result, byte for byte."""
    return PayloadHistory(seed, acts).run()
