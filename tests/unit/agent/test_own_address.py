"""The address at which the agents of other nodes reach an agent."""

from __future__ import annotations

import pytest

from nvrx_slurm.agent.__main__ import own_address


@pytest.mark.parametrize(("batch_host", "store"), [("127.0.0.1", "192.0.2.1"), ("127.0.0.2", "127.0.0.3")])
def test_it_is_on_the_network_of_the_store(batch_host: str, store: str) -> None:
    """The address is on the network of the store, except in a job on one host, whose agents use loopback."""
    assert own_address(batch_host, store) == "127.0.0.1"


def test_a_store_that_has_only_ipv6_leaves_the_network_of_the_batch_host() -> None:
    """If a site's own store has only an IPv6 address, the batch host's network counts: jobs run over IPv4."""
    assert own_address("127.0.0.2", "::1") == "127.0.0.1"


def test_a_store_that_each_node_reaches_by_a_proxy_of_its_own_leaves_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """If each node reaches the store through a proxy on loopback, the batch host's network counts: by loopback the
    other nodes would reach themselves."""
    routes = {"localhost": "127.0.0.1", "10.0.0.1": "10.0.0.7"}
    monkeypatch.setattr("nvrx_slurm.liveness.connection.address_towards", routes.__getitem__)
    assert own_address("10.0.0.1", "localhost") == "10.0.0.7"
