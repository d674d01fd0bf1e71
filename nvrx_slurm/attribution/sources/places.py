"""Where a service is, and what opens it. Read anew at each request: it may have moved, or its token changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nvrx_slurm.attribution.sources.base import Unanswered
from nvrx_slurm.errors import MalformedRecord, SourceError, UnsafePath
from nvrx_slurm.jobspec import env
from nvrx_slurm.journal.verdicts import Wire
from nvrx_slurm.util.decoding import decode_json
from nvrx_slurm.util.files import JobFiles

MANAGED_NAME = "attrsvc.json"


class Place(Wire, frozen=True, kw_only=True):
    """A service's URL, without a slash at its end, and its bearer token."""

    url: str
    token: str | None = None

    def __repr__(self) -> str:
        return f"Place({self.url!r})"  # a token never comes into a log


Locate = Callable[[], Place]
"""Says where the service is now. Raises Unanswered, SourceError, and ConfigError for a token file."""


def fixed_place(url: str, token_file: str | None) -> Locate:
    """A service at a URL; its token from the file, or else from NVRX_SLURM_ATTRSVC_TOKEN, or else, at a loopback
    address, from this user's own service there."""

    def locate() -> Place:
        from nvrx_slurm.attribution.http_client import token_of
        from nvrx_slurm.attribution.local_service import find_token

        token = token_of(token_file, env.attrsvc_token(), key="fault_tolerance.attribution.token_file")
        return Place(url=url.rstrip("/"), token=token or find_token(url))

    return locate


def managed_place(folder: Path) -> Locate:
    """The service that the job's own batch host runs: it may be started again, on another port."""
    job, path = JobFiles(folder), folder / MANAGED_NAME

    def locate() -> Place:
        try:
            place = decode_json(Place, job.read(MANAGED_NAME), MANAGED_NAME)
        except FileNotFoundError:
            raise Unanswered(f"the job's own service has not started yet: there is no {path}") from None
        except (OSError, UnsafePath, MalformedRecord) as error:
            raise SourceError(f"{path} does not say where the job's own service is: {error}") from None
        return Place(url=place.url.rstrip("/"), token=place.token)

    return locate
