import subprocess
import sys


def lines_of(process_index: int) -> tuple[str, str]:
    code = (
        "import logging\nfrom portable_fsdp.runtime.log import configure\n"
        "logging.getLogger().addHandler(logging.StreamHandler())\n"  # as absl does
        "configure(3)\n"  # replaced by the next call
        f"configure({process_index})\n"
        "log = logging.getLogger('portable_fsdp')\n"
        "log.debug('detail')\nlog.info('step: 1')\nlog.getChild('train').warning('50 % slower')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout, done.stderr


def test_process_0_says_everything_once_and_plainly() -> None:
    assert lines_of(0) == ("", "step: 1\n50 % slower\n")


def test_other_processes_only_warn_and_say_who_they_are() -> None:
    assert lines_of(2) == ("", "[process 2] 50 % slower\n")
