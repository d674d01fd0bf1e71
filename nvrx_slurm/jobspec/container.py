"""`container` of job.yaml: the image that workers run in, and what of the host they see there."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from msgspec import field

from nvrx_slurm.jobspec.reading import After, Block, Misfit
from nvrx_slurm.jobspec.values import AS_LIST, TEXT_OR_LIST, Environment, Line, NonEmpty

ContainerRuntime = Literal["auto", "apptainer", "charliecloud", "podman", "pyxis"]
ImageKind = Literal["folder", "sif", "squashfs", "url", "name"]

# What runs which kind of image; `auto` takes the first of them that the node has, and never pyxis.
TAKEN_BY: dict[ImageKind, tuple[ContainerRuntime, ...]] = {
    "folder": ("apptainer", "charliecloud", "podman"),
    "sif": ("apptainer",),
    "squashfs": ("charliecloud", "apptainer", "pyxis"),
    "url": ("apptainer", "pyxis"),
    "name": ("podman", "charliecloud", "pyxis"),
}

NO_AGENT_IN_PODMAN = (
    "podman runs no agents: it leaves its container to a daemon (conmon), which srun neither signals nor ends"
)

_SUFFIXES: dict[str, ImageKind] = {".sif": "sif", ".sqfs": "squashfs", ".sqsh": "squashfs", ".squashfs": "squashfs"}


def image_kind(image: str) -> ImageKind:
    """By its text alone: the submit host may not have what the nodes have."""
    if "://" in image:
        return "url"
    for suffix, kind in _SUFFIXES.items():
        if image.endswith(suffix):
            return kind
    return "folder" if image.startswith(("/", "./", "../", "~/")) else "name"


def is_file(image: str) -> bool:
    """Whether the image is a folder or a file of the nodes."""
    return image_kind(image) in ("folder", "sif", "squashfs")


def parts_of_mount(mount: str) -> tuple[str, str, str]:
    """Source, target and options of `/host[:/inside[:ro|rw]]`. Raises ValueError."""
    source, *rest = mount.split(":")
    target, options = [*rest, *("", "")[len(rest) :]][:2]
    if len(rest) > 2 or options not in ("", "ro", "rw") or not source or (rest and not target):
        raise ValueError("must be like /data, /data:/inside or /data:/inside:ro")
    if not source.startswith(("/", "./", "../", "~/")):
        raise ValueError(f"must begin with a path of the host (/…, ./…, ~/…), not {source!r}")
    if target and not target.startswith("/"):
        raise ValueError(f"must have an absolute path inside, not {target!r}")
    return source, target, options


def _mount(text: str) -> str:
    parts_of_mount(text)
    return text


class ContainerSpec(Block, frozen=True, kw_only=True):
    """Workers run in a container; the agents too with `agents: inside`. `container: image` is the short form.
    [What is set up, and what each runtime needs](containers.md)."""

    image: Annotated[
        NonEmpty,
        "A folder or a file (`/…`, `./…`, `~/…`, `….sif`, `….sqfs`; relative to the folder of job.yaml), a URL of "
        "apptainer or pyxis (`docker://…`), or a name that podman or charliecloud knows.",
    ]
    runtime: Annotated[
        ContainerRuntime,
        "`auto`: the first of apptainer, charliecloud and podman that the node has and that takes this image.",
    ] = "auto"
    agents: Annotated[
        Literal["outside", "inside"] | None,
        "`inside`: the agents run in the container too, by the image's `python3`, which needs nvrx-slurm in the "
        "job's version. Not set: `inside` with pyxis, else `outside`.",
    ] = None
    mounts: Annotated[
        Annotated[
            tuple[Annotated[Line, After(_mount)], ...],
            AS_LIST,
            TEXT_OR_LIST,
        ],
        "Folders and files of the nodes to mount, each `/host`, `/host:/inside` or `/host:/inside:ro`. The job's "
        "folder and `workdir` are always there.",
    ] = ()
    workdir: Annotated[Line | None, "Where workers start, inside. Not set: in the job's `workdir`."] = None
    env: Annotated[Environment, "Environment of the workers inside, on top of the job's."] = field(
        default_factory=dict
    )

    @property
    def agents_inside(self) -> bool:
        return self.agents == "inside" or self.runtime == "pyxis"

    @property
    def takes(self) -> tuple[ContainerRuntime, ...]:
        """What `auto` looks for on the node, in this order."""
        return tuple(each for each in TAKEN_BY[image_kind(self.image)] if each != "podman" or not self.agents_inside)

    @classmethod
    def long_form(cls, value: object) -> object:
        return {"image": value} if isinstance(value, str) else value

    def settled(self, said: Mapping[str, Any]) -> Self:
        takers = TAKEN_BY[image_kind(self.image)]
        if self.runtime != "auto" and self.runtime not in takers:
            raise Misfit(f"takes no image like {self.image!r}; {' or '.join(takers)} would", "runtime")
        if self.runtime == "pyxis" and self.agents == "outside":
            raise Misfit("pyxis is a part of the srun that starts the agents: they run inside", "agents")
        if self.agents == "inside" and self.runtime == "podman":
            raise Misfit(f"{NO_AGENT_IN_PODMAN}; take another runtime, or `agents: outside`", "agents")
        if self.workdir is not None and not self.workdir.startswith("/"):
            raise Misfit(f"must be an absolute path inside, not {self.workdir!r}", "workdir")
        return self
