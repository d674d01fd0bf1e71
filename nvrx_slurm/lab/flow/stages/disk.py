"""The job folder's disk, which can be full."""

from __future__ import annotations

from nvrx_slurm.errors import FaultFailed
from nvrx_slurm.lab.faults.disk import SmallDisk
from nvrx_slurm.lab.flow.stages.base import Hit, Scene
from nvrx_slurm.lab.flow.stages.strikes import Strike
from nvrx_slurm.lab.flow.stages.targets import Arguments
from nvrx_slurm.util.clock import Clock


def disk_strikes(disk: SmallDisk, clock: Clock) -> dict[str, Strike]:
    """`fill_disk` and `free_disk`, proven by statvfs(3)."""

    def fill(arguments: Arguments, scene: Scene) -> Hit:
        at = clock.wall()
        disk.fill()
        return Hit(at=at, proof=f"statvfs says that {_free(disk, wanted=False)} bytes are free")

    def free(arguments: Arguments, scene: Scene) -> Hit:
        at = clock.wall()
        if not disk.ballast.exists():
            raise FaultFailed("the disk was not filled: there is nothing to free")
        disk.free()
        return Hit(at=at, proof=f"statvfs says that {_free(disk, wanted=True)} bytes are free")

    return {"fill_disk": fill, "free_disk": free}


def _free(disk: SmallDisk, *, wanted: bool) -> int:
    free_bytes = disk.free_bytes
    if bool(free_bytes) is not wanted:
        raise FaultFailed(f"statvfs says that {free_bytes} bytes are free on {disk.path}")
    return free_bytes
