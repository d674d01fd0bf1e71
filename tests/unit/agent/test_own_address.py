"""The address at which the agents of other nodes reach an agent."""

from __future__ import annotations

import pytest

from nvrx_slurm.agent.__main__ import own_address


@pytest.mark.parametrize(("batch_host", "store"), [("127.0.0.1", "192.0.2.1"), ("127.0.0.2", "127.0.0.3")])
def test_it_is_on_the_network_of_the_store(batch_host: str, store: str) -> None:
    """But for a job on one host: all of that reach each other by loopback."""
    assert own_address(batch_host, store) == "127.0.0.1"


def test_a_store_that_has_only_ipv6_leaves_the_network_of_the_batch_host() -> None:
    """A site's own store may have such an address; jobs run over IPv4."""
    assert own_address("127.0.0.2", "::1") == "127.0.0.1"


def test_a_store_that_each_node_reaches_by_a_proxy_of_its_own_leaves_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By loopback the other nodes would reach themselves."""
    routes = {"localhost": "127.0.0.1", "10.0.0.1": "10.0.0.7"}
    monkeypatch.setattr("nvrx_slurm.liveness.connection.address_towards", routes.__getitem__)
    assert own_address("10.0.0.1", "localhost") == "10.0.0.7"
