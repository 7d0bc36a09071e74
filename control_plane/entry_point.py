"""Where the `nanoflow` command begins: only here can Ctrl-C at any moment, imports included, be caught."""

from __future__ import annotations

import signal

from control_plane.interrupts import ends_at_once


def main() -> None:
    """Run the command line; exit code 130 and no traceback after a Ctrl-C that no command dealt with itself."""
    try:
        with ends_at_once():
            from control_plane.main import main as run
        run()
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


if __name__ == "__main__":
    main()
