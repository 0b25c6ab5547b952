"""The command tvm-deconv from its first moment on: interrupts are understood before anything is imported."""

import sys


def main() -> None:
    """Run the command line; an interrupt while it is imported is "stopped" too."""
    try:
        from tvm_deconv.cli.main import main as run
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        raise SystemExit(130) from None
    run()
