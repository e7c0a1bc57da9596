"""Stand-in of vLLM's image for CUDA: the CPU build in .venv-engine, with the Python of the other stand-ins.

Docker gives a container GPUs by a hook, which is a program that does nothing here (docker_host.py).
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tarfile
from pathlib import Path

from tests.support.containers.docker_host import BUILD_S, ENVIRONMENT, DockerHost
from tests.support.engines.cpu_program import vllm_program
from tests.support.engines.servers import ENGINE_PYTHON
from tests.support.repository import REPOSITORY

# Where Debian's Python looks for what pip has installed.
SITE = "/usr/local/lib/python3.11/dist-packages"
# What engine.Dockerfile installs itself (another build of Mooncake), and what no test here loads: half of 3.8 GB.
UNUSED = ("mooncake", "nixl", ".nixl", "triton")
PIECE = 1 << 20


def packages() -> Path:
    """Return the folder of packages of .venv-engine. Raises FileNotFoundError if it has none for the images' Python."""
    folder = ENGINE_PYTHON.parents[1] / "lib" / Path(SITE).parent.name / "site-packages"
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is missing: make env-engine, with Python 3.11")
    return folder


def make_engine_image(host: DockerHost, archive: Path) -> None:
    """Give the engine the image from which deploy/docker/engine.Dockerfile starts. `archive`: the root of the other
    stand-ins (base_images.make_archive)."""
    dockerfile = (REPOSITORY / "deploy/docker/engine.Dockerfile").read_text()
    name = re.search(r"^FROM (\S+)$", dockerfile, re.MULTILINE)
    assert name, "engine.Dockerfile starts from no image"
    lock = (
        archive.name.encode()
        + (REPOSITORY / "requirements/engine.lock").read_bytes()
        + (packages() / "torch/version.py").read_bytes()
    )
    key = hashlib.sha256(lock).hexdigest()[:8]
    build = f"stand-in-engine:{key}"
    known = host.docker("images", "--format", "{{.Repository}}:{{.Tag}}", "stand-in-engine").split()
    if build not in known:
        if known:
            host.docker("rmi", "--force", *known)
        _import(host, archive, build)
    program = vllm_program("/usr/bin/python3")
    host.build(
        name[1],
        f"FROM {build}",
        "RUN useradd --uid 2000 --gid 0 --create-home vllm",
        f"COPY --chmod=755 <<'END' /usr/local/bin/vllm\n{program}END",
        'ENTRYPOINT ["vllm", "serve"]',
    )


def _import(host: DockerHost, archive: Path, name: str) -> None:
    """Make an image of the root in `archive` and the packages. In one layer: a second one would be written twice."""
    with tarfile.open(archive) as root:
        root.getmembers()
        # What follows are the blocks that mark the end.
        end = root.offset
    command = host.command("docker", "import", "--change", f"ENV PATH={ENVIRONMENT['PATH']}", "-", name)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=ENVIRONMENT) as importing:
        assert importing.stdin
        with archive.open("rb") as root_bytes:
            while piece := root_bytes.read(min(PIECE, end - root_bytes.tell())):
                importing.stdin.write(piece)
        importing.stdin.flush()
        # Not the folder itself, which the root has, too: Docker takes a path once.
        names = [path.name for path in packages().iterdir() if not path.name.startswith(UNUSED)]
        placed = f"--transform=flags=r;s|^|.{SITE}/|"
        command = ["tar", "--create", f"--directory={packages()}", "--owner=0", "--group=0", placed, *names]
        subprocess.run(command, stdout=importing.stdin, check=True, timeout=BUILD_S)
    assert importing.returncode == 0
