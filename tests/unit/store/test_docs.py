"""docs/store.md."""

from __future__ import annotations

from nvrx_slurm.store.keys import CATALOGUE, InprocessKeys, Keys


def test_every_key_in_use_is_in_the_catalogue() -> None:
    """The catalogue has a row for each key that the code can name."""
    keys = Keys("7")
    named = {value for value in vars(keys).values() if value != "nvrx:{7}:"}
    named |= {keys.rendezvous("main", 0, 1), keys.shutdown(0), keys.command_in("r"), keys.command_out("r")}
    stems = {name.removeprefix("nvrx:{7}:").partition(":")[0] for name in named}
    assert stems | {"inprocess", "payloads"} == {row.pattern.partition(":")[0] for row in CATALOGUE}


def test_every_key_of_a_group_is_in_the_catalogue() -> None:
    """It has a row for each key of an in-process group, with and without a job."""
    patterns = {row.pattern for row in CATALOGUE if row.pattern.startswith("inprocess:")}
    for job, prefix in (("7", "nvrx:{7}:inprocess:<group>:0:"), (None, "nvrx:{<group>}:inprocess:0:")):
        keys = InprocessKeys("<group>", 0, job=job)
        named = {keys.log, keys.gates, keys.beats, keys.gate("<gate>")}
        assert {name.removeprefix(prefix) for name in named} == {
            pattern.removeprefix("inprocess:<group>:<call>:") for pattern in patterns
        }
