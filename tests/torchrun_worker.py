"""What a torchrun user writes: an entry point under `@record`. It records its environment in a file. With a second
argument the last rank of each role fails the first time that it starts. Only that rank imports torch, which takes
seconds."""

import json
import os
import sys
from pathlib import Path


def fail() -> None:
    from torch.distributed import is_torchelastic_launched
    from torch.distributed.elastic.multiprocessing.errors import record

    assert is_torchelastic_launched()

    @record
    def main() -> None:
        raise ValueError("the data set is empty\nlook at the path")

    main()


def is_first(mark: Path) -> bool:
    """Whether this is the first start of the role: a torchrun that is started again counts its restarts from 0."""
    if mark.exists():
        return False
    mark.touch()
    return True


if __name__ == "__main__":
    folder, role, rank = Path(sys.argv[1]), os.environ["ROLE_NAME"], int(os.environ["RANK"])
    notes = {name: value for name, value in os.environ.items() if not name.startswith("NVRX_")}
    (folder / f"{role}-{rank}.json").write_text(json.dumps(notes))
    if len(sys.argv) > 2 and rank == int(os.environ["WORLD_SIZE"]) - 1 and is_first(folder / role):
        fail()
