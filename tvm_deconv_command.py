"""The command tvm-deconv from its first moment on: interrupts are understood before anything is imported."""

import signal
import sys
from types import FrameType

_INTERRUPTED = 130  # the exit code of a command that a KeyboardInterrupt has ended


def main() -> None:
    """Run the command line; an interrupt while it is imported is "stopped" too.

    SIGTERM and SIGHUP are interrupts, with exit codes of their own; where they are ignored, as by nohup, they stay so.
    """
    ended_by = int(signal.SIGINT)
    others = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]

    def interrupt(number: int, _: FrameType | None) -> None:
        nonlocal ended_by
        ended_by = number
        for other in others:  # timeout sends two, and the second would interrupt what is removed
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in others:
        signal.signal(number, interrupt)
    try:
        from tvm_deconv.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        raise SystemExit(128 + ended_by) from None
    except SystemExit as end:
        if end.code == _INTERRUPTED:
            end.code = 128 + ended_by
        raise
