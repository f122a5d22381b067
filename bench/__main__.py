"""Every bench, one after the other, each with its table: `python -m bench [NAME ...] [--json]`."""

import argparse
import subprocess
import sys

BENCHES = ("copy", "lookup", "host", "disk", "verify", "scale", "model", "reuse", "overhead")


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"any of {', '.join(BENCHES)}; all unless told"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object for each")
    arguments = parser.parse_args()
    failed = []
    for name in arguments.names or BENCHES:
        print(f"== bench.{name}", flush=True)
        options = ["--json"] if arguments.json else []
        command = [sys.executable, "-m", f"bench.{name}", *options]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
