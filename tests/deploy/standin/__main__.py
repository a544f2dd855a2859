"""A stand-in for AWS on loopback: moto's server, completed where this app needs more than moto has.

Run as `python -m standin PORT RECORD` in tests/deploy. Writes what CloudFormation does, one JSON object a
line, to the file RECORD, and prints `ready` once it answers. SIGTERM ends it.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from moto.server import ThreadedMotoServer
from standin import api, cloudformation, custom


def main(port: int, record: Path) -> None:
    """Serves until a signal ends the process; there is nothing to save."""
    journal = cloudformation.Journal(record)
    custom.install(f"http://localhost:{port}")
    api.install()
    cloudformation.install(journal)
    ThreadedMotoServer("127.0.0.1", port, verbose=False).start()
    print("ready", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
