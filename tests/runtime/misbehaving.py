"""A child for `runtime.child` that does what FOLDER/mode says: `python -m misbehaving PARENT FOLDER`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from portable_fsdp.runtime.signals import end_with_parent


def main(folder: Path, parent: int) -> int:
    end_with_parent(parent)
    (folder / "pid").write_text(str(os.getpid()))
    match (folder / "mode").read_text():
        case "speaks":
            print("first\n\nlast", file=sys.stderr)
            print("answer")
        case "fails":
            print("what went wrong", file=sys.stderr)
            return 3
        case "crashes":
            print("about to crash", file=sys.stderr)
            os.kill(os.getpid(), signal.SIGABRT)
        case "hangs":
            grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            (folder / "grandchild").write_text(str(grandchild.pid))
            time.sleep(600)
        case _:
            raise AssertionError
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[2]), int(sys.argv[1])))
