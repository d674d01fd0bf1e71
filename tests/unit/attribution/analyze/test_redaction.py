"""What is removed from log lines before they leave the site."""

from __future__ import annotations

import pytest

from nvrx_slurm.attribution.analyze.llm import redacted

LINES = [
    ("export HF_TOKEN=hf_abcdefghijklmnop", "export HF_TOKEN=[secret]"),
    ("api_key: 'x y z', retry 3", "api_key: [secret], retry 3"),
    ('{"password": "hunter2", "user": 1}', '{"password": [secret], "user": 1}'),
    ("Authorization: Bearer eyJhbGciOi.abc.def", "Authorization: [secret] [secret]"),
    ("sending Bearer abcdef123456", "sending Bearer [secret]"),
    ("push to https://me:pw@git.example.com/x", "push to https://[secret]@[host]/x"),
    ("mail to mara.k@example.org failed", "mail to [e-mail] failed"),
    ("open /home/mara/runs/7b.yaml", "open /home/[user]/runs/7b.yaml"),
    ("open /lustre/users/mara/7b.yaml", "open /lustre/users/[user]/7b.yaml"),
    ("connect to 10.4.0.31:29500", "connect to [address]:29500"),
    ("connect to fe80:0:0:0:1:2:3:4 failed", "connect to [address] failed"),
    ("gpu-a17: rank 3, gpu-a17-ib0, gpu-a1", "[node 1]: rank 3, gpu-a17-ib0, [node 2]"),
    ("login.cluster.internal refused", "[host] refused"),
    ("key AKIAIOSFODNN7EXAMPLE used", "key [secret] used"),
    ("id 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "id [secret]"),
]

UNTOUCHED = [
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
    'File "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1751, in _call_impl',
    "step 1200 loss 2.31 tokens/s 181234",
    "2026-11-21 18:00:00,123 INFO transformers.modeling_utils: loading",
]


@pytest.mark.parametrize(("line", "expected"), LINES)
def test_what_is_private_is_taken_out(line: str, expected: str) -> None:
    """Secrets, people and machines are replaced, the same machine always by the same name."""
    assert redacted([line], ["gpu-a17", "gpu-a1"]) == [expected]


@pytest.mark.parametrize("line", UNTOUCHED)
def test_what_describes_the_failure_stays(line: str) -> None:
    """Otherwise nothing could be judged."""
    assert redacted([line], ["gpu-a17"]) == [line]
