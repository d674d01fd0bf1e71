"""Whether a worker ended because it had lost the connection to a peer: by its exception, or by its last lines.

Such an end is a consequence of another worker's or node's. The controller must know that at once, so the agent looks
for a few well-known sentences; `attribution/rules` has many more, for those who read the logs later.
"""

from __future__ import annotations

import re

# How much of what a worker printed last is looked at.
TAIL_BYTES = 4 << 10

_PEER_LOST = re.compile(
    r"""\b(?:ConnectionResetError|BrokenPipeError|ConnectionAbortedError)\b
      | Connection\ (?:was\ )?(?:reset|closed|aborted|likely\ closed)\ by\ (?:remote\ |the\ )?(?:peer|host|process)
      | \bBroken\ pipe\b | \bConnection\ was\ likely\ closed | \bconnection\ lost\b.{0,40}\bpeer
      | gloo/transport/\w+/(?:pair|unbound_buffer|buffer)\.cc:\d+\]
        .{0,80}(?:[Rr]ead\ error|[Ww]rite\ error|closed|writev|timeout|[Tt]imed\ out)
      | \bncclRemoteError\b | remote\ process\ exit(?:ed|ing)
      | NCCL\ WARN\ .{0,120}(?:closed|reset)\ by\ (?:remote\ )?peer
      | (?:recvValue|sendBytes|recvBytes|recvVector|waitForInput).{0,20}(?:failed|error)
      | \b[Ff]ailed\ to\ recv\b | \bDistNetworkError:\ (?:Connection|Broken|[Ff]ailed\ to\ (?:recv|send))
      | DistStoreError:.{0,80}[Tt]im(?:ed\ out|eout) | Timed\ out\ waiting\ \d+ms\ for\ (?:recv|send)
      | [Ww]atchdog\ caught\ collective\ operation\ timeout | Caught\ collective\ operation\ timeout
      | Detected\ timeout\ in\ monitoredBarrier | failed\ to\ pass\ monitoredBarrier
      | successfully\ reached\ monitoredBarrier,\ but\ received\ errors
      | \bUCX\ +(?:ERROR|WARN|DIAG).{0,200}(?:reset\ by\ remote\ peer|Endpoint\ timeout|Endpoint\ is\ not\ connected)
      | MPI(?:\ communication|:)\ peer\ process\ has\ unexpectedly\ disconnected
    """,
    re.VERBOSE,
)
_RAISED = re.compile(r"^(?:\[rank\d+\]:\s*)?(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b.*", re.MULTILINE)


def says_peer_lost(error: str) -> bool:
    """Whether an exception, as `type: message`, is about a lost connection to a peer."""
    return _PEER_LOST.search(error) is not None


def ended_by_peer(printed: str) -> bool:
    """Whether the last lines of a worker report that. Where they hold exceptions the last one ended it."""
    raised = _RAISED.findall(printed)
    return says_peer_lost(raised[-1] if raised else printed)
