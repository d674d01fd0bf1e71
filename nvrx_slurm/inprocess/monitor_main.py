"""Where a monitor begins: `python -I -S` on this file, with what it is to know on standard input.

It finds modules where its rank finds them. Neither the environment nor `site` has an effect, so what the user's
set-up loads into every interpreter is not loaded here. Standard library only, until then.
"""

import os
import pickle
import sys


def main() -> None:
    """Watch a rank, until one of the two ends."""
    with open(os.dup(0), "rb") as start_file:  # noqa: PTH123  a descriptor
        for name, value in pickle.load(start_file).items():
            setattr(sys, name, value)
        from nvrx_slurm.inprocess.monitor_loop import serve

        serve(start_file)


if __name__ == "__main__":
    main()
