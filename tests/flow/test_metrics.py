"""Metrics, as a real Prometheus accepts them: the exposition, the alert rules, and the dashboard's queries."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ci import programs
from nvrx_slurm.report.prometheus import __file__ as shipped
from tests.jobs import HOSTILE, write_eventful
from tests.unit.report.recorder import JOB, with_one_recovery, write

SHIPPED = Path(shipped).parent
DEADLINE_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """Where Prometheus' programs are missing, the tests are skipped; in CI they fail."""
    if lacking := programs.missing(programs.PROMETHEUS):
        refuse = pytest.fail if os.environ.get("CI") else pytest.skip
        refuse(f"{', '.join(lacking)}: not on PATH; `python -m ci.programs prometheus` installs them")


def until(found: Callable[[], Any], what: str) -> Any:
    """Wait until `found` returns something true, and return that."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            if answer := found():
                return answer
        except OSError:
            pass
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def get(url: str, accept: str = "*/*") -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=10) as answer:
        return answer.read().decode()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that has ended, with every kind of failure, and a job that may still run."""
    base = tmp_path_factory.mktemp("jobs")
    write_eventful(base)
    write(base, with_one_recovery(), job="4711")
    return base


@pytest.fixture(scope="module")
def served(jobs: Path) -> Iterator[str]:
    """Runs `metrics --listen`; gives its address."""
    argv = [
        sys.executable,
        "-m",
        "nvrx_slurm",
        "metrics",
        JOB,
        "4711",
        "--listen",
        "127.0.0.1:0",
        "--folder",
        str(jobs),
    ]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        yield server.stderr.readline().split()[-1]
        server.send_signal(signal.SIGTERM)
        assert server.wait(DEADLINE_S) == 0


@pytest.fixture(scope="module")
def prometheus(served: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Runs a Prometheus that scrapes `served`, with the shipped rules; gives the address of its API."""
    folder = tmp_path_factory.mktemp("prometheus")
    shutil.copy(SHIPPED / "rules.yaml", folder)
    target = urllib.parse.urlsplit(served).netloc
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "nvrx", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    argv = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([*argv, "--web.listen-address=127.0.0.1:0"], stderr=log, stdout=log)
    try:
        address = until(lambda: listening_at(server.pid), (folder / "log").read_text())
        api = f"http://127.0.0.1:{address}/api/v1"
        until(lambda: asked(api, "nvrx_job_info"), "nothing was scraped")
        yield api
    finally:
        server.terminate()
        server.wait(DEADLINE_S)


def listening_at(pid: int) -> int | None:
    """The port that the process listens at."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(str(link.readlink()))
        except OSError:
            continue
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
            return int(words[1].rpartition(":")[2], 16)
    return None


def asked(api: str, query: str) -> list[dict[str, Any]]:
    answer = json.loads(get(f"{api}/query?{urllib.parse.urlencode({'query': query})}"))
    assert answer["status"] == "success", answer
    return answer["data"]["result"]


def test_promtool_accepts_metrics_and_rules(served: str) -> None:
    """`promtool check metrics` and `promtool check rules` report nothing, and OpenMetrics ends with `# EOF`."""
    done = subprocess.run(["promtool", "check", "metrics"], input=get(served), text=True, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = subprocess.run(["promtool", "check", "rules", str(SHIPPED / "rules.yaml")], text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 rules found" in done.stdout
    assert get(served, "application/openmetrics-text; version=1.0.0").endswith("# EOF\n")


def test_labels_are_few_and_have_no_text_of_the_user(served: str) -> None:
    """Labels have known names, and no label has a job's output, a node or a path."""
    text = get(served)
    assert HOSTILE[:10] not in text and "train.py" not in text and '"n2"' not in text
    labels = {label for line in text.splitlines() if "{" in line for label in names_in(line)}
    known = {"job_id", "name", "cluster", "state", "part", "kind", "role", "cause", "phase", "verdict", "acted", "le"}
    assert labels <= known
    assert sum(not line.startswith("#") for line in text.splitlines()) < 2 * 250


def names_in(line: str) -> list[str]:
    return [pair.partition("=")[0] for pair in line[line.index("{") + 1 : line.rindex("}")].split(",") if "=" in pair]


def test_prometheus_has_the_values(prometheus: str) -> None:
    """Prometheus has a job's state, its goodput, and its recoveries by cause and phase."""
    [state] = asked(prometheus, f'nvrx_job_state{{job_id="{JOB}"}} == 1')
    assert state["metric"]["state"] == "completed"
    [goodput] = asked(prometheus, f'nvrx_job_goodput_ratio{{job_id="{JOB}"}}')
    assert 0.4 < float(goodput["value"][1]) < 0.9
    causes = asked(prometheus, f'nvrx_recoveries_total{{job_id="{JOB}"}} > 0')
    assert {each["metric"]["cause"] for each in causes} == {"node_lost", "worker_error", "worker_hung"}
    phases = asked(prometheus, f'nvrx_recovery_seconds_count{{job_id="{JOB}"}} == 3')
    assert {each["metric"]["phase"] for each in phases} >= {"torn_down", "spawned", "startup"}


def test_prometheus_takes_the_rules(prometheus: str) -> None:
    """Each of the three rules is evaluated without an error."""

    def healthy() -> list[str]:
        groups = json.loads(get(f"{prometheus}/rules"))["data"]["groups"]
        return [rule["name"] for group in groups for rule in group["rules"] if rule["health"] == "ok"]

    until(lambda: len(healthy()) == 3, "a rule has an error")


def test_the_rules_fire(tmp_path: Path) -> None:
    """`promtool test rules`: each rule fires when it should, and not before."""
    shutil.copy(SHIPPED / "rules.yaml", tmp_path)
    series = [
        {"series": 'nvrx_job_goodput_ratio{job_id="1"}', "values": "0.5+0x60"},
        {"series": 'nvrx_job_state{job_id="1",state="running"}', "values": "1+0x60"},
        {"series": 'nvrx_job_goodput_ratio{job_id="2"}', "values": "0.95+0x60"},
        {"series": 'nvrx_job_state{job_id="2",state="running"}', "values": "1+0x60"},
        {"series": 'nvrx_restarts_left{job_id="1"}', "values": "3+0x20 1+0x40"},
        {"series": 'nvrx_rank_quiet_max_seconds{job_id="2"}', "values": "0+60x60"},
    ]

    def fired(name: str, at: str, *jobs: str) -> dict[str, Any]:
        severity = "critical" if name == "NvrxNoProgress" else "warning"
        return {
            "eval_time": at,
            "alertname": name,
            "exp_alerts": [{"exp_labels": {"severity": severity, "job_id": job}} for job in jobs],
        }

    tests = [
        fired("NvrxGoodputLow", "29m"),
        fired("NvrxGoodputLow", "31m", "1"),
        fired("NvrxRestartBudgetLow", "20m"),
        fired("NvrxRestartBudgetLow", "22m", "1"),
        fired("NvrxNoProgress", "15m"),
        fired("NvrxNoProgress", "20m", "2"),
    ]
    rules = (tmp_path / "rules.yaml").read_text()
    bare = "\n".join(
        line for line in rules.splitlines() if not line.strip().startswith(("annotations", "summary", "desc"))
    )
    (tmp_path / "rules.yaml").write_text(bare)  # else the test would have to repeat each annotation
    whole = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "alert_rule_test": tests}],
    }
    (tmp_path / "test.yaml").write_text(json.dumps(whole))
    done = subprocess.run(["promtool", "test", "rules", "test.yaml"], cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_queries_metrics_that_exist(prometheus: str) -> None:
    """Prometheus accepts every query of the dashboard, and each metric in a query was scraped or is of a live job."""
    dashboard = json.loads((SHIPPED / "dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) >= 12
    scraped = set(json.loads(get(f"{prometheus}/label/__name__/values"))["data"])
    live = {"nvrx_heartbeat_age_max_seconds", "nvrx_rank_quiet_max_seconds"}  # only of a running job
    for query in queries:
        asked(prometheus, query.replace("$job", ".*").replace("$__rate_interval", "1m"))
        named = {
            word
            for word in "".join(c if c.isalnum() or c == "_" else " " for c in query).split()
            if word.startswith("nvrx_")
        }
        assert named <= scraped | live, query


def test_the_textfile_is_whole(jobs: Path, tmp_path: Path) -> None:
    """The file for node_exporter has the metrics, and nothing else is left in the folder. Another suffix than .prom
    is refused."""
    path = tmp_path / "nvrx.prom"
    argv = [sys.executable, "-m", "nvrx_slurm", "metrics", JOB, "--textfile", str(path), "--folder", str(jobs)]
    subprocess.run(argv, check=True)
    assert "nvrx_job_goodput_ratio" in path.read_text()
    assert [each.name for each in tmp_path.iterdir()] == ["nvrx.prom"]
    argv[-3] = str(tmp_path / "nvrx.txt")
    done = subprocess.run(argv, text=True, capture_output=True)
    assert done.returncode == 2 and ".prom" in done.stderr
