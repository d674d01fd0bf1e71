"""Why a job failed, and whether a restart can help.

__main__        the attribution process, which the controller starts: lines of JSON in and out
broker          asks every source about each failure, and returns their answers to the controller
rules/          what a line of a log means: the built-in rules and the user's
scan/           reads logs, and finds the lines that a rule recognises
analyze/        from these lines, and what else is known, to one attribution
sources/        the sources that the broker asks: the built-in rules, a service, an MCP server
service/        the HTTP service that answers such questions for many jobs
notify/         reports of decisions: to Slack, an index, the ledger
blames          what a failure says against nodes, and which nodes are suspect by it
ledger          the blames against one cluster's nodes, shared by a user's jobs
local_service   a service on this machine: its token, and the user that it runs as
mcp_server      the tools of attribution for an assistant
docs            writes docs/rules.md
"""
