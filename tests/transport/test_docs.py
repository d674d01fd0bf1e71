"""The examples of docs/transport.md, run as they are."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.inprocess.servers import Valkey

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "transport.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
NAMED = {match[1]: block for block in BLOCKS if (match := re.match(r"# (\w+\.py)\n", block))}
UNNAMED = [block for block in BLOCKS if block not in NAMED.values()]
WITHIN_S = 60
PASSWORD = "of the store"
TOKEN = "the key of the job"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment that an agent gives its workers, with a real store that has a password."""
    valkey = Valkey(tmp_path)
    with contextlib.closing(redis.Redis(port=valkey.port)) as client:
        client.config_set("requirepass", PASSWORD)
    address = tmp_path / "store.json"
    address.write_text(json.dumps({"url": valkey.url, "job": "7", "password": PASSWORD, "token": TOKEN}))
    yield {"NVRX_STORE_FILE": str(address), "NVRX_JOB_ID": "7"}
    valkey.end()


def start(path: Path, **options: object) -> subprocess.Popen[str]:
    """Run the file as a program, with this tree's package."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}  # type: ignore[dict-item]
    return subprocess.Popen([sys.executable, str(path)], text=True, env=environment, **options)  # type: ignore[call-overload,no-any-return]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The named examples, as files."""
    for name, block in NAMED.items():
        (tmp_path / name).write_text(block)
    return tmp_path


def test_all_examples_are_known_here() -> None:
    """An example that is added to the page must be run by one of these tests."""
    assert list(NAMED) == ["producer.py", "consumer.py", "rollout.py", "policy.py"]
    assert len(UNNAMED) == 2


def test_the_first_example_runs(files: Path) -> None:
    """`python producer.py | python consumer.py`: the consumer gets all that was written, and both end."""
    with start(files / "producer.py", stdout=subprocess.PIPE) as producer:
        with start(files / "consumer.py", stdin=producer.stdout, stdout=subprocess.PIPE) as consumer:
            said, _ = consumer.communicate(timeout=WITHIN_S)
        assert (consumer.returncode, said) == (0, "0 0.0\n1 1.0\n2 2.0\n")
        assert producer.wait(WITHIN_S) == 0


def test_the_example_of_a_job_runs(files: Path, job: dict[str, str]) -> None:
    """The policy finds what the rollout publishes, although neither has the other's address."""
    with (
        start(files / "policy.py", env=job, stdout=subprocess.PIPE) as policy,
        start(files / "rollout.py", env=job) as rollout,
    ):
        said, _ = policy.communicate(timeout=WITHIN_S)
        assert (policy.returncode, said) == (0, "[0, 1, 2, 3, 4]\n")
        assert rollout.wait(WITHIN_S) == 0


@pytest.mark.parametrize("block", UNNAMED, ids=["ring", "batch"])
def test_an_example_runs(block: str, tmp_path: Path) -> None:
    """The example itself asserts its results."""
    (tmp_path / "example.py").write_text(block)
    with start(tmp_path / "example.py", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as example:
        _, errors = example.communicate(timeout=WITHIN_S)
    assert (example.returncode, errors) == (0, "")
