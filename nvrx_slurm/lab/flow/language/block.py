"""What every mapping of a flow file is."""

from __future__ import annotations

from pydantic import BaseModel

from nvrx_slurm.jobspec.block import Block


class FlowBlock(BaseModel):
    """A mapping in a flow file: frozen, and closed to keys it does not know, as those of job.yaml are."""

    model_config = Block.model_config
