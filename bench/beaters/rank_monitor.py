"""Usage: rank_monitor.py RUNS: NVRx's heartbeat and section. The environment has RANK, FT_RANK_MONITOR_IPC_SOCKET."""

import os
import sys
from time import perf_counter

BEATS, SECTIONS = 1_000, 500


def main() -> None:
    import nvidia_resiliency_ext.fault_tolerance as nvrx

    config = nvrx.FaultToleranceConfig(rank_section_timeouts={"checkpoint": 600.0})
    server = nvrx.RankMonitorServer.run_in_subprocess(config, os.environ["FT_RANK_MONITOR_IPC_SOCKET"])
    client = nvrx.RankMonitorClient()
    client.init_workload_monitoring()
    for _ in range(int(sys.argv[1]) + 1):
        began = perf_counter()
        for _ in range(BEATS):
            client.send_heartbeat()
        print("beat", (perf_counter() - began) / BEATS * 1e6, flush=True)
    for _ in range(int(sys.argv[1]) + 1):
        began = perf_counter()
        for _ in range(SECTIONS):
            client.start_section("checkpoint")
            client.end_section("checkpoint")
        print("section", (perf_counter() - began) / SECTIONS * 1e6, flush=True)
    client.shutdown_workload_monitoring()
    server.terminate()
    server.join()


if __name__ == "__main__":
    main()
