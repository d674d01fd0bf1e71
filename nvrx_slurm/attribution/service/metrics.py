"""What Prometheus may know of the service; names and meanings are in docs/attrsvc.md."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from nvrx_slurm.attribution.service.wire import State

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Counters of one service, in a registry of their own: two services in one process do not mix."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        labels = ("method", "route", "status")
        self.requests = Counter("nvrx_attrsvc_requests", "Requests.", labels, registry=registry)
        self.analyses = Counter(
            "nvrx_attrsvc_analyses", "Analyses, by verdict, or `failed`, or `lost`.", ("outcome",), registry=registry
        )
        self.seconds = Histogram(
            "nvrx_attrsvc_analysis_seconds", "How long an analysis took.", buckets=_SECONDS, registry=registry
        )
        self.unsaved = Counter(
            "nvrx_attrsvc_unsaved", "Records that could not be written to the state folder.", registry=registry
        )
        self._inquiries = Gauge("nvrx_attrsvc_inquiries", "Inquiries, by state.", ("state",), registry=registry)

    def watch(self, counts: Mapping[State, int]) -> None:
        """Have the number of inquiries by state read from here at each request."""
        for state in counts:
            self._inquiries.labels(state).set_function(partial(counts.__getitem__, state))

    def text(self) -> bytes:
        return generate_latest(self._registry)
