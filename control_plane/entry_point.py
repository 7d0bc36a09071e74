"""Where the `nanoflow` command begins: only here can Ctrl-C during the imports of everything else be caught."""

from __future__ import annotations

from control_plane.interrupts import ends_at_once


def main() -> None:
    """Run the command line."""
    with ends_at_once():
        from control_plane.main import main as run
    run()


if __name__ == "__main__":
    main()
