"""How the switch of a private network reads a frame."""

from __future__ import annotations

import socket

from nvrx_slurm.lab.faults.network_switch import IPV4, Packet, ipv4, mac_of


def test_later_fragments_have_neither_ports_nor_flags() -> None:
    """Their payload is the middle of a datagram, and the last one may be shorter than a header."""
    hosts = bytes([198, 18, 0, 1]), bytes([198, 18, 0, 2])
    for protocol, payload in ((socket.IPPROTO_UDP, b"xy"), (socket.IPPROTO_TCP, b"\xff" * 20)):
        whole = ipv4(*hosts, protocol, payload)
        later = Packet(mac_of(2) + mac_of(1) + IPV4 + whole[:6] + b"\x00\xb9" + whole[8:])
        assert (later.ports, later.flags) == ((0, 0), 0)
