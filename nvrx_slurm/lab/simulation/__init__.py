"""Agents and the controller in one process: virtual time, a simulated cluster, and one seed that decides everything.

Agent, controller, core, store client, codec and liveness protocol are the product's own: they get their clock, their
machine and their environment as arguments. Nothing here waits: a virtual minute takes as long as what is computed in
it. docs/simulation.md lists the modules.
"""
