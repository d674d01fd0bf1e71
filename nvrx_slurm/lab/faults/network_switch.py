"""A network of its own: one namespace a host, and this process as the switch between them. Standard library only.

    unshare --user --map-root-user --net python -S network_switch.py CONTROL DOOR HOST…

Needs no root, only `ip`. Nothing has a name outside this process, so when it ends, and with it those who run in the
namespaces, nothing is left. Each host has one interface, whose other end is a raw socket here: what passes, and how
late, and what answers in its place, is decided frame by frame. So a lost frame is lost in silence, as on a cut cable.

CONTROL is a SOCK_SEQPACKET of JSON messages, each answered once it holds. The first goes out by itself:
`{"pid", "namespaces": {host: descriptor}}`, and with it a listener on 127.0.0.1:DOOR of each host (0: none).

    {"cut": [host…]}           from now on these hosts' frames are lost; replaces an earlier list; answered with it
    {"rules": [rule…]}         see `SwitchRule`; replaces earlier ones
    {"slow": {host: [seconds, loss]}}    frames from or to it come so late, and this share of them never; likewise
    {"reset": rule}            both ends of each TCP connection get a reset that looks like the other's; answered with
                               how many there were: whose both ends have been seen, and no reset or last word since
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

SUBNET = "198.18.0"  # for benchmarks of networks (RFC 2544): no host of the internet has it
CLONE_NEWNET = 0x40000000
SOL_PACKET, PACKET_IGNORE_OUTGOING = 263, 23
SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17
EVERY_PROTOCOL, ARP, IPV4 = 3, b"\x08\x06", b"\x08\x00"
LONGEST_FRAME_BYTES = 65536
TCP_FIN, TCP_SYN, TCP_RST, TCP_ACK = 0x01, 0x02, 0x04, 0x10
PORT_UNREACHABLE = (3, 3)

# One direction of a TCP connection: from which host, to which, and its ports in that order.
Flow = tuple[str, str, tuple[int, int]]

_libc = ctypes.CDLL(None, use_errno=True)


def mac_of(index: int) -> bytes:
    """A locally administered address."""
    return bytes([2, 0, 0, 0, 0, index])


@dataclass(frozen=True, slots=True)
class Packet:
    """A frame with IPv4 in it. Of a protocol without ports, and of a later fragment, these are 0."""

    frame: bytes

    @property
    def ip(self) -> bytes:
        return self.frame[14:]

    @property
    def protocol(self) -> int:
        return self.ip[9]

    @property
    def payload(self) -> bytes:
        return self.ip[4 * (self.ip[0] & 15) :]

    @property
    def has_header(self) -> bool:
        """Whether the payload begins with the protocol's header: that of a fragment behind the first does not."""
        return not int.from_bytes(self.ip[6:8], "big") & 0x1FFF

    @property
    def ports(self) -> tuple[int, int]:
        with_ports = self.protocol in (socket.IPPROTO_TCP, socket.IPPROTO_UDP) and self.has_header
        return struct.unpack("!HH", self.payload[:4]) if with_ports else (0, 0)

    @property
    def flags(self) -> int:
        """TCP's; without its header 0."""
        return self.payload[13] if self.protocol == socket.IPPROTO_TCP and self.has_header else 0

    @property
    def ack(self) -> int:
        """Up to which byte its sender has received, if its flags have TCP_ACK."""
        return int.from_bytes(self.payload[8:12], "big")


@dataclass(frozen=True, slots=True)
class SwitchRule:
    """Which packets: with one of `hosts` at an end, of the `protocol` (tcp, udp), with this `port` at an end, or with
    any but `other_than`; `opening`: only those that open a TCP connection *to* one of the hosts. What becomes of
    them: `drop`, or `refuse`: those on the way *to* one of the hosts are answered as a firewall would that rejects
    them (ICMP port unreachable)."""

    hosts: tuple[str, ...]
    protocol: str
    port: int | None = None
    other_than: int | None = None
    opening: bool = False
    then: str = "drop"

    def matches(self, packet: Packet, source: str, target: str) -> bool:
        if packet.protocol != getattr(socket, f"IPPROTO_{self.protocol.upper()}"):
            return False
        if self.opening and packet.flags & (TCP_SYN | TCP_ACK) != TCP_SYN:
            return False
        ends = {target} if self.opening or self.then == "refuse" else {source, target}
        by_port = self.port is None or self.port in packet.ports
        return by_port and self.other_than not in packet.ports and bool(ends & {*self.hosts})


def checksum(data: bytes) -> int:
    """The Internet's (RFC 1071)."""
    total: int = sum(struct.unpack(f"!{(len(data) + 1) // 2}H", data + b"\0" * (len(data) % 2)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ipv4(source: bytes, target: bytes, protocol: int, payload: bytes) -> bytes:
    header = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(payload), 0, 0, 64, protocol, 0, source, target)
    return header[:10] + struct.pack("!H", checksum(header)) + header[12:] + payload


def refusal(packet: Packet) -> bytes:
    """The frame by which the packet's target says that nothing listens there."""
    # The header and the first 8 bytes of what is refused: by these its sender finds the socket.
    body = struct.pack("!BBHI", *PORT_UNREACHABLE, 0, 0) + packet.ip[:28]
    body = body[:2] + struct.pack("!H", checksum(body)) + body[4:]
    answer = ipv4(packet.ip[16:20], packet.ip[12:16], socket.IPPROTO_ICMP, body)
    return packet.frame[6:12] + packet.frame[:6] + IPV4 + answer


def reset(packet: Packet) -> bytes:
    """The frame by which the packet's target breaks the connection, believed since its number is what is awaited."""
    here, there = packet.ports
    source, target = packet.ip[16:20], packet.ip[12:16]
    segment = struct.pack("!HHIIBBHHH", there, here, packet.ack, 0, 5 << 4, TCP_RST, 0, 0, 0)
    summed = checksum(source + target + struct.pack("!HH", socket.IPPROTO_TCP, len(segment)) + segment)
    segment = segment[:16] + struct.pack("!H", summed) + segment[18:]
    return packet.frame[6:12] + packet.frame[:6] + IPV4 + ipv4(source, target, socket.IPPROTO_TCP, segment)


class Switch:
    """Carries frames until the other end of `control` is closed."""

    def __init__(self, control: socket.socket, ports: dict[str, socket.socket]) -> None:
        self.control, self.ports = control, ports
        self.by_descriptor = {port.fileno(): host for host, port in ports.items()}
        self.by_mac = {mac_of(index): host for index, host in enumerate(ports, 1)}
        self.cut: set[str] = set()
        self.rules: list[SwitchRule] = []
        self.slow: dict[str, tuple[float, float]] = {}
        self.chance = random.Random(1)
        self.later: list[tuple[float, int, str, bytes]] = []
        self.carried = 0
        self.flows: dict[Flow, Packet] = {}  # the last segment of each direction

    def run(self) -> None:
        poller = select.poll()
        for descriptor in (self.control.fileno(), *self.by_descriptor):
            poller.register(descriptor, select.POLLIN)
        while True:
            # poll takes whole milliseconds: one more, or it would return too early and be called in vain.
            left_ms = max(0, int((self.later[0][0] - time.monotonic()) * 1000) + 1) if self.later else None
            for descriptor, _ in poller.poll(left_ms):
                if descriptor == self.control.fileno():
                    if not (data := self.control.recv(65536)):
                        return
                    answer: object = None
                    for name, value in json.loads(data).items():
                        answer = self.obey(name, value)
                    self.control.send(json.dumps(answer).encode())
                    continue
                with contextlib.suppress(BlockingIOError):  # no more frames of this host
                    while True:
                        frame = self.ports[self.by_descriptor[descriptor]].recv(LONGEST_FRAME_BYTES)
                        self._carry(self.by_descriptor[descriptor], frame)
            while self.later and self.later[0][0] <= time.monotonic():
                _, _, target, frame = heapq.heappop(self.later)
                self._send(target, frame)

    def obey(self, order: str, value: Any) -> object:
        """Carry one order out, and return its answer."""
        match order:
            case "cut":
                self.cut = set(value)
                return sorted(self.cut)
            case "rules":
                self.rules = [_rule(rule) for rule in value]
            case "slow":
                self.slow = value
                return value
            case "reset":
                rule = _rule(value)
                flows = [
                    flow
                    for flow, packet in self.flows.items()
                    if _backwards(flow) in self.flows and rule.matches(packet, *flow[:2])
                ]
                for flow in flows:
                    self._send(flow[0], reset(self.flows.pop(flow)))
                return len(flows) // 2
            case _:
                raise ValueError(f"the switch knows no order {order!r}")
        return None

    # ---- frames

    def _carry(self, source: str, frame: bytes) -> None:
        if frame[12:14] not in (ARP, IPV4):
            return
        # An address of no host is the broadcast of an ARP request: the frame goes to all.
        known = self.by_mac.get(frame[:6])
        for target in [known] if known else self.ports:
            if target == source:
                continue
            slow = [self.slow.get(host, (0.0, 0.0)) for host in (source, target)]
            if self._may_pass(source, target, frame, loss=max(loss for _, loss in slow)):
                self.carried += 1
                due = time.monotonic() + max(delay_s for delay_s, _ in slow)
                # The number keeps frames that are due at one time in the order in which they came.
                heapq.heappush(self.later, (due, self.carried, target, frame))

    def _may_pass(self, source: str, target: str, frame: bytes, loss: float) -> bool:
        if self.cut & {source, target} or self.chance.random() < loss:
            return False
        if frame[12:14] != IPV4:
            return True
        packet = Packet(frame)
        for rule in self.rules:
            if rule.matches(packet, source, target):
                if rule.then == "refuse":
                    self._send(source, refusal(packet))
                return False
        # Remember what a reset needs. What is still sent to an end that is gone makes no connection.
        flow = (source, target, packet.ports)
        if packet.flags & (TCP_RST | TCP_FIN):
            self.flows.pop(flow, None)
            self.flows.pop(_backwards(flow), None)
        elif packet.flags & TCP_ACK:
            self.flows[flow] = packet
        return True

    def _send(self, target: str, frame: bytes) -> None:
        try:
            self.ports[target].send(frame)
        except OSError as error:  # its queue is full: a frame is lost, as they are
            print(f"to {target}: {error}", file=sys.stderr)


def _backwards(flow: Flow) -> Flow:
    source, target, (here, there) = flow
    return target, source, (there, here)


def _rule(fields: dict[str, object]) -> SwitchRule:
    return SwitchRule(**{**fields, "hosts": tuple(fields["hosts"])})  # type: ignore[arg-type]


# ---- the namespaces


def _configure(*lines: str) -> None:
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)


def _become_host(index: int, door: int, back: socket.socket) -> None:
    """In a child: make a namespace with one interface, and hand it back, with a listener in it if one is wanted."""
    if _libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET)")
    mac = mac_of(index).hex(":")
    _configure(
        f"link add net0 address {mac} type veth peer name port{index} netns {os.getppid()}",
        f"address add {SUBNET}.{index}/24 dev net0",
        "link set lo up",
        "link set net0 up",
        "route add 10.255.255.255 dev net0",  # of which `default_route_address` asks
    )
    # The switch reads raw frames and must get them as they would be on a wire: whole, and with their checksums.
    value = ctypes.create_string_buffer(struct.pack("II", ETHTOOL_STXCSUM, 0))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sP", b"net0", ctypes.addressof(value))
        fcntl.ioctl(any_socket, SIOCETHTOOL, request + bytes(16))
    descriptors = [os.open("/proc/self/ns/net", os.O_RDONLY)]
    if door:
        descriptors.append(socket.create_server(("127.0.0.1", door), backlog=128).detach())
    socket.send_fds(back, [b"."], descriptors)


def make_host(index: int, door: int) -> tuple[int, list[int]]:
    """Descriptors of the namespace, and of the listener in it."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    child = os.fork()
    if child == 0:
        here.close()
        # The namespace lives on by the descriptor that is sent: no process needs to stay in it.
        _become_host(index, door, there)
        os._exit(0)
    # Or there would be no end of the stream, and the next call would wait for a child that has failed.
    there.close()
    _, received, _, _ = socket.recv_fds(here, 1, 2)
    os.waitpid(child, 0)
    if not received:
        raise SystemExit("no host: see above")
    return received[0], list(received[1:])


def open_port(index: int) -> socket.socket:
    """The switch's end of that host's cable."""
    _configure(f"link set port{index} up")
    # No protocol until it is bound: with one it would first take the frames of all interfaces (packet(7)).
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK)
    # Or what the switch sends to the host would come back here as a frame of that host.
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    port.bind((f"port{index}", EVERY_PROTOCOL))
    return port


def main() -> None:
    """Build the network, say so, and serve."""
    control, door, hosts = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3:]
    made = {host: make_host(index, door) for index, host in enumerate(hosts, 1)}
    ports = {host: open_port(index) for index, host in enumerate(hosts, 1)}
    ready = {"pid": os.getpid(), "namespaces": {host: namespace for host, (namespace, _) in made.items()}}
    listeners = [listener for _, opened in made.values() for listener in opened]
    socket.send_fds(control, [json.dumps(ready).encode()], listeners)
    # The receiver has them now. One that stayed open here would listen after the receiver has closed it.
    for listener in listeners:
        os.close(listener)
    Switch(control, ports).run()


if __name__ == "__main__":
    main()
