"""Functions that declare their call parameter in every possible way, each wrapped and called in a group of one:
`python -m tests.inprocess.annotated STORE_URL` prints what each received and returned, as JSON."""

import json
import sys
from typing import Any, Optional, Union

from nvrx_slurm import inprocess
from nvrx_slurm.inprocess import CallWrapper


def plain(call: CallWrapper) -> Any:
    return type(call).__name__


def optional(call: Optional[CallWrapper] = None) -> Any:  # noqa: UP045 - the older way to write it
    return type(call).__name__


def in_union(call: Union[int, CallWrapper, None] = None) -> Any:  # noqa: UP007 - the older way to write it
    return type(call).__name__


def with_bar(call: CallWrapper | None = None) -> Any:
    return type(call).__name__


def quoted(call: "CallWrapper") -> Any:
    return type(call).__name__


def quoted_optional(call: "inprocess.CallWrapper | None" = None) -> Any:
    return type(call).__name__


def by_keyword(first: int, *rest: int, call: CallWrapper, last: str = "z") -> Any:
    return [first, list(rest), type(call).__name__, last]


def between(first: int, call: CallWrapper, last: int) -> Any:
    return [first, type(call).__name__, last]


def without(first: int, last: int = 2) -> Any:
    """Asks for none."""
    return [first, last]


class Trainer:
    def method(self, call: CallWrapper) -> Any:
        return type(call).__name__


def main(url: str) -> None:
    wrapper = inprocess.Wrapper(store_factory=inprocess.RedisStore, store_kwargs={"url": url}, abort=None)
    asking = (plain, optional, in_union, with_bar, quoted, quoted_optional)
    results = {function.__name__: wrapper(function)() for function in asking}
    results["by_keyword"] = wrapper(by_keyword)(1, 2, 3, last="y")
    results["between"] = wrapper(between)(1, last=3)
    results["without"] = wrapper(without)(1)
    results["method"] = wrapper(Trainer().method)()
    results["named"] = [wrapper(without).__name__, wrapper(without).__doc__]
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
