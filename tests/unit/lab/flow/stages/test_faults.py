"""Faults of the scripted attribution service, on a real process."""

from __future__ import annotations

from typing import Any

import pytest

from nvrx_slurm.errors import FaultFailed
from nvrx_slurm.lab.flow.stages.faults import ScriptedService
from nvrx_slurm.util.clock import SystemClock


def test_a_fault_of_the_service_happens_once() -> None:
    """The service is stopped, continued and killed; an action without an effect is an error."""
    service = ScriptedService("stop")
    injectors = service.injectors(SystemClock())
    scene: Any = None  # the injector does not use it

    def inject(act: str) -> str:
        return injectors[f"{act}_attribution_service"]({}, scene).proof

    try:
        with pytest.raises(FaultFailed, match="is not stopped"):
            inject("continue")
        assert "state T" in inject("stop")
        assert "out of state T" in inject("continue")
        assert "gone" in inject("kill")
        with pytest.raises(FaultFailed, match="has ended already"):
            inject("kill")
    finally:
        service.close()
