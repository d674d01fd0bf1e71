"""One failure, all that was said of it, and what was decided."""

from __future__ import annotations

import hashlib
from pathlib import PurePath

from nvrx_slurm.journal.verdicts import Attribution, FailureKey, Inquiry, Verdict, VerdictRecord, Wire


class Decided(Wire, frozen=True, kw_only=True):
    """What receivers are told of. `judged` is None where nobody decides: a service that only answers."""

    key: FailureKey
    inquiry: Inquiry
    attributions: tuple[Attribution, ...] = ()
    judged: VerdictRecord | None = None

    @property
    def identity(self) -> str:
        """32 hex digits, the same for the same failure, whoever tells of it and however often."""
        return hashlib.sha256(str(self.key).encode(errors="surrogateescape")).hexdigest()[:32]

    @property
    def job_id(self) -> str:
        return PurePath(self.key.job).name

    @property
    def leading(self) -> Attribution | None:
        """The surest of the answers that say what was judged; without one, the surest of all."""
        verdict = self.judged.verdict if self.judged else None
        agreeing = [each for each in self.attributions if each.verdict == verdict] or self.attributions
        return max(agreeing, key=lambda each: each.confidence, default=None)

    @property
    def verdict(self) -> Verdict:
        if self.judged is not None:
            return self.judged.verdict
        return self.leading.verdict if self.leading else Verdict.UNKNOWN
