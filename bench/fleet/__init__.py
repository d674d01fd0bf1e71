"""Simulated nodes: to the store and the controller they are agents, in one process by the hundred."""
