"""What receivers get about a failure: complete, and within every receiver's limits, for any content of the logs."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.attribution.notify.base import DecidedFailure
from nvrx_slurm.attribution.notify.format import code_block, document, escaped, fitting, mention_of, slack_message
from nvrx_slurm.journal.verdicts import (
    Attribution,
    Evidence,
    Failed,
    FailureKey,
    Inquiry,
    Scope,
    Verdict,
    VerdictRecord,
)

KEY = FailureKey(job="/shared/nvrx-jobs/1234", generation=1, replica="main-0", cycle=4, rank=3)
LINES = (
    Evidence(file="/x/rank-3.err", line=17, text="Xid 79: <GPU> has & fallen ```off``` the bus", rank=3),
    Evidence(file="/x/rank-0.err", line=99, text="NCCL watchdog timeout", rank=0),
)
FAILED = Failed(cause="rank 3 on n2 failed: exit code 1", node="n2", rank=3, exit_code=1, step=120, t=1_700_000_000.5)
SAID = Attribution(
    source="lib",
    verdict=Verdict.STOP,
    confidence=0.97,
    fault="xid_79",
    scope=Scope.NODE,
    ranks=(3,),
    nodes=("n2",),
    missing=(5, 6),
    primary=LINES[0],
    secondary=LINES[1:],
    explanation="A GPU is gone.",
    hint="Drain the node.",
    latency_s=0.4,
)
UNSURE = Attribution(source="http://other:8000", verdict=Verdict.TIMEOUT, problem="no answer within 60 s")
JUDGED = VerdictRecord(key=KEY, verdict=Verdict.STOP, acted=True, action="stop", nodes_blamed=("n2",))


def decided(**changes: Any) -> DecidedFailure:
    whole = {"inquiry": Inquiry(key=KEY, paths=(), failed=FAILED, nodes=("n1", "n2")), "judged": JUDGED}
    return DecidedFailure(key=KEY, **(whole | {"attributions": (UNSURE, SAID)} | changes))


def message(failure: DecidedFailure, mention: str | None = None) -> dict[str, Any]:
    return slack_message(failure, channel="#runs", mention=mention, name="llama")


def texts(shown: dict[str, Any]) -> list[str]:
    """Every text of the blocks, in order."""
    found = []
    for block in shown["blocks"]:
        parts = [block["text"]] if "text" in block else block.get("fields", block.get("elements", []))
        found += [part["text"] for part in parts]
    return found


def test_a_message_says_what_failed_what_was_said_and_what_is_done() -> None:
    """A message has the failure, the verdict and the action on one screen, in that order."""
    shown = message(decided(), mention="U024BE7LH")
    everything = "\n".join(texts(shown))
    order = [
        "STOP: llama (1234)",
        "<@U024BE7LH>",
        "rank 3 on n2 failed: exit code 1, at step 120",
        "the job ends, and is not started again (93); the verdict decided",
        "main-0, cycle 4, generation 1",
        "xid_79 (node, 97% sure)",
        "Blamed*\nn2",
        "ranks 5, 6",
        "no answer within 60 s",
        "A GPU is gone.",
        "rank-3.err:17: Xid 79: &lt;GPU&gt; has &amp; fallen ˋˋˋoffˋˋˋ the bus\nrank-0.err:99: NCCL",
        "Drain the node.",
        "nvrx-slurm explain 1234 --cycle 4 --folder /shared/nvrx-jobs",
    ]
    places = [everything.find(text) for text in order]
    assert -1 not in places, order[places.index(-1)]
    assert places == sorted(places)
    assert (shown["channel"], shown["text"][:12]) == ("#runs", "<@U024BE7LH>")


@pytest.mark.parametrize(
    ("judged", "words"),
    [
        (VerdictRecord(key=KEY, verdict=Verdict.STOP, why="dry run", action="restart_replica", dry_run=True),
         "the replica starts again; not acted on: dry run"),
        (VerdictRecord(key=KEY, verdict=Verdict.RESTART, why="lib: RESTART", action="restart_job"),
         "*Done* all replicas start again"),
        (VerdictRecord(key=KEY, verdict=Verdict.UNKNOWN, action="a_new_one"), "*Done* a_new_one"),
        (None, "nothing yet: no decision"),
    ],
    ids=["dry run", "restart", "unknown", "a service"],
)  # fmt: skip
def test_a_message_says_whether_the_verdict_decided(judged: VerdictRecord | None, words: str) -> None:
    """If a STOP was not acted on, the message says why; an action of a newer version is shown by its name."""
    assert any(words in text for text in texts(message(decided(judged=judged))))


def test_the_verdict_is_the_judges_and_its_grounds_are_those_who_agree() -> None:
    """The reasons are those of a source that agrees with the verdict, not of a surer source that was outvoted."""
    other = Attribution(source="mcp", verdict=Verdict.RESTART, confidence=0.99, fault="nccl_timeout")
    shown = decided(attributions=(other, SAID))
    assert shown.leading == SAID
    assert document(shown, name="llama", cluster="alpha", now=0.0)["fault"] == "xid_79"
    assert decided(attributions=(other, SAID), judged=None).verdict is Verdict.RESTART
    assert decided(attributions=(), judged=None).verdict is Verdict.UNKNOWN


def test_a_failure_has_one_identity_with_any_attributions() -> None:
    """A failure that is reported twice can be distinguished from one that happened twice."""
    assert decided().identity == decided(attributions=(), judged=None).identity
    assert re.fullmatch(r"[0-9a-f]{32}", decided().identity)


_text = st.text(alphabet=st.sampled_from("a&<>`*\n\t\x00\x1b\u202e🛑é "), max_size=6000)


@given(_text, _text, _text)
def test_no_log_line_breaks_slacks_bounds(line: str, explanation: str, name: str) -> None:
    """Block Kit: 150 characters in a header, 3,000 in a section, 2,000 in a field; no block is without text."""
    evidence = Evidence(file=f"/x/{name[:200]}", line=1, text=line)
    said = Attribution(
        source=name[:300], verdict=Verdict.STOP, fault=name, primary=evidence, secondary=(evidence,) * 40,
        explanation=explanation, hint=explanation, nodes=tuple("n" * 30 for _ in range(500)),
        missing=tuple(range(5000)),
    )  # fmt: skip
    failed = Failed(cause=explanation, node=name or "n", error=line)
    judged = VerdictRecord(key=KEY, verdict=Verdict.STOP, why=explanation, nodes_blamed=("n" * 30,) * 500)
    shown = decided(attributions=(said,) * 10, judged=judged, inquiry=Inquiry(key=KEY, paths=(), failed=failed))
    whole = slack_message(shown, channel="#runs", mention=None, name=name)
    assert len(whole["blocks"]) <= 50
    for block in whole["blocks"]:
        if block["type"] == "header":
            assert 1 <= len(block["text"]["text"]) <= 150
        if "fields" in block:
            assert 1 <= len(block["fields"]) <= 10
            assert all(1 <= len(field["text"]) <= 2000 for field in block["fields"])
        elif block["type"] == "section":
            assert 1 <= len(block["text"]["text"]) <= 3000
    assert sum(map(len, texts(whole))) < 11_000  # from about there on Slack says msg_blocks_too_long
    assert len(whole["text"]) < 4000


@given(st.text())
def test_escaped_text_holds_no_markup_of_slacks(text: str) -> None:
    """A mention in a log line notifies no member of the channel."""
    shown = escaped(text)
    assert not set(shown) & set("<>")
    assert "&" not in re.sub("&(amp|lt|gt);", "", shown)
    assert shown.isprintable() or set(shown) - set("\n") or shown.strip("\n") == ""


@given(st.text(alphabet="a&<>🛑", max_size=50), st.integers(1, 60))
def test_a_cut_is_never_inside_an_entity(text: str, most: int) -> None:
    """A text that is cut shows that it was cut."""
    cut = fitting(text, most)
    assert len(cut) <= max(most, 1)
    assert "&" not in re.sub("&(amp|lt|gt);", "", cut)
    assert cut == escaped(text) or cut.endswith("…")


@given(st.text(alphabet="`a\n", max_size=60))
def test_a_code_block_ends_where_it_should(text: str) -> None:
    """With any text of a log, only the block's own fences are in it."""
    block = code_block(text, 40)
    assert block.count("`") == 6
    assert block.startswith("```\n")
    assert block.endswith("\n```")
    assert len(block) <= 40


@pytest.mark.parametrize(
    ("whom", "shown"),
    [
        ("U024BE7LH", "<@U024BE7LH>"),
        ("@W024BE7LH", "<@W024BE7LH>"),
        ("@here", "<!here>"),
        ("channel", "<!channel>"),
        ("S0614TZR7", "<!subteam^S0614TZR7>"),
        ("jane <j@x>", "jane &lt;j@x&gt;"),
    ],
)
def test_a_mention_is_what_slack_takes_for_one(whom: str, shown: str) -> None:
    """A name that is no id is shown as text, and notifies no member."""
    assert mention_of(whom) == shown


def test_a_document_is_whole_and_plain() -> None:
    """Every field is present with its type, and the times are UTC."""
    whole = json.loads(json.dumps(document(decided(), name="llama", cluster="alpha", now=1.0)))
    assert whole["@timestamp"] == "2023-11-14T22:13:20.500Z"
    assert whole["job"] == {
        "id": "1234", "name": "llama", "folder": "/shared/nvrx-jobs/1234", "cluster": "alpha",
    }  # fmt: skip
    assert (whole["verdict"], whole["fault"], whole["scope"]) == ("STOP", "xid_79", "node")
    assert whole["blamed"] == {"nodes": ["n2"], "ranks": [3]}
    assert whole["decision"]["action"] == "stop"
    assert [each["source"] for each in whole["attributions"]] == ["http://other:8000", "lib"]
    nothing = decided(attributions=(), judged=None, inquiry=Inquiry(key=KEY, paths=()))
    bare = document(nothing, name="", cluster=None, now=1.0)
    assert bare.keys() == whole.keys()
    assert bare["@timestamp"] == "1970-01-01T00:00:01.000Z"
