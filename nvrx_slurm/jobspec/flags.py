"""The flags of the command line that set keys below `fault_tolerance.attribution`. Imports nothing."""

from __future__ import annotations

BLOCK = "fault_tolerance"
ATTRIBUTION = f"{BLOCK}.attribution"

FLAGS = {
    "attrsvc_url": "--ft-attrsvc-url",
    "manage_attrsvc": "--ft-manage-attrsvc",
    "enable_lib": "--ft-attribution-enable-lib",
    "enable_mcp": "--ft-attribution-enable-mcp",
    "http_urls": "--ft-attribution-http-url",
    "timeout": "--ft-attribution-timeout",
    "decision_timeout": "--ft-attribution-decision-timeout",
    "dry_run": "--ft-attribution-dry-run",
    "aggregation": "--ft-attribution-aggregation",
    "slack.channel": "--ft-slack-channel",
    "slack.token_file": "--ft-slack-token-file",
    "dataflow.url": "--ft-dataflow-url",
    "dataflow.index": "--ft-dataflow-index",
    "dataflow.token_file": "--ft-dataflow-token-file",
}
"""Key below `attribution` → the flag that sets it."""

DEPRECATED_FLAGS = {
    "attribution_endpoint": "--ft-attribution-endpoint",
    "attribution_backends": "--ft-attribution-backend",
    "attribution_loganalysis": "--ft-attribution-loganalysis",
}
"""Deprecated key below `fault_tolerance` → its flag (see `deprecated`)."""
