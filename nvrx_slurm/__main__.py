"""The start of `nvrx-slurm`, and of `python -m nvrx_slurm`: Ctrl-C prints no traceback, however early it comes."""

# `signal` imports enum, which takes milliseconds in which Ctrl-C would print a traceback
import _signal  # type: ignore[import-not-found]


def main() -> None:
    """Load the command line and run it. Until it can end in good order, Ctrl-C ends the process without a word."""
    if (
        _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
    ):  # else it is ignored: `nohup`, `&` in a script
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    # A caller that ignores SIGCHLD hands that on, and then the kernel forgets how children have ended: a failed job
    # would be taken for one that exited with 0.
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    from nvrx_slurm.cli import main as run

    run()


if __name__ == "__main__":
    main()
