#!/bin/sh
# network_agents.sh PYTHON SWITCH NODE=DESCRIPTOR…: starts one agent a node, each in its namespace, as srun would.
# The descriptors are namespaces that the process SWITCH holds.
python=$1
switch=$2
shift 2
for node in "$@"; do
    NVRX_NODE=${node%%=*} setpriv --pdeathsig KILL \
        nsenter --net="/proc/$switch/fd/${node#*=}" "$python" -P -m nvrx_slurm.agent &
    agents="$agents $!"
done
# shellcheck disable=SC2064,SC2086  # the list is whole by now, and is one of words
trap "kill -TERM $agents 2>/dev/null" TERM
# shellcheck disable=SC2064,SC2086
trap "kill -USR2 $agents 2>/dev/null" USR2
for agent in $agents; do
    while kill -0 "$agent" 2>/dev/null; do wait "$agent"; done
done
