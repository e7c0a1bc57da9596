"""Builds the images with docker buildx and writes their tags, and what a registry calls them, into the Kubernetes overlays.

    .venv/bin/python -m tools.build_images REGISTRY [--push] [--platforms linux/amd64,linux/arm64]

`make images REGISTRY=... [PUSH=1] [PLATFORMS=...]` calls it. A tag is the project's version and the commit, so that it means one
thing for ever. Without --push the images stay in this machine's Docker, which holds one platform. The overlays take what
deploy/k8s/components/images says, which is written when all images are there: with --push their digests, too, so that a
cluster runs what was built here and nothing else. Exit status 1 with a sentence when something is missing or fails.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OVERLAY_IMAGES = "deploy/k8s/components/images/kustomization.yaml"
PARTS = ("router", "agent", "gateway", "lab")
ENGINE = "pointsman-engine"
# Emulated engines are for Compose.
DEPLOYED = (*(f"pointsman-{part}" for part in PARTS if part != "lab"), ENGINE)
MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


class BuildError(Exception):
    """An image could not be built; the text says which and why."""


@dataclass(frozen=True)
class Image:
    """An image to build: its name without a registry, its Dockerfile, and what that is told."""

    name: str
    dockerfile: str
    arguments: tuple[str, ...] = ()


def images() -> Iterator[Image]:
    """All of them."""
    for part in PARTS:
        yield Image(f"pointsman-{part}", "deploy/docker/Dockerfile", (f"PART={part}",))
    yield Image(ENGINE, "deploy/docker/engine.Dockerfile")


def tag_of(root: Path) -> str:
    """The version and the commit of the checkout; the version alone where the commit is tagged with it. Raises BuildError."""
    version = str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])
    if _git(root, "status", "--porcelain", "--untracked-files=no", "--", f":!{OVERLAY_IMAGES}"):
        raise BuildError("there are changes that are not committed: a tag would not say what is in the image")
    if f"v{version}" in _git(root, "tag", "--points-at", "HEAD").split():
        return version
    return f"{version}-g{_git(root, 'rev-parse', '--short=12', 'HEAD')}"


def build(root: Path, registry: str, tag: str, platforms: Sequence[str], *, push: bool) -> dict[str, str]:
    """Build every image; name -> digest in the registry, empty where it was not pushed. Raises BuildError."""
    if len(platforms) > 1 and not push:
        raise BuildError("several platforms need a registry to put them together in: add --push (PUSH=1)")
    digests = {}
    with tempfile.TemporaryDirectory() as folder:
        for image in images():
            told = Path(folder, f"{image.name}.json")
            words = ["docker", "buildx", "build", "--platform", ",".join(platforms), "--file", image.dockerfile]
            words += [word for argument in image.arguments for word in ("--build-arg", argument)]
            words += ["--label", f"org.opencontainers.image.version={tag}", "--tag", f"{registry}/{image.name}:{tag}"]
            words += ["--metadata-file", str(told), "--push" if push else "--load", "."]
            try:
                subprocess.run(words, cwd=root, check=True)
            except FileNotFoundError:
                raise BuildError("docker is missing: Docker 23 or newer, or its buildx plugin, is needed") from None
            except subprocess.CalledProcessError as error:
                raise BuildError(f"{image.name}: docker ended with status {error.returncode}") from None
            digests[image.name] = str(json.loads(told.read_text())["containerimage.digest"]) if push else ""
    return digests


def write_overlay_images(root: Path, registry: str, tag: str, digests: dict[str, str]) -> None:
    """Write the images that overlays deploy where they take them from."""
    file = root / OVERLAY_IMAGES
    head = file.read_text().partition("images:\n")[0]
    lines = [
        f"  - {{name: {name}, newName: {registry}/{name}, newTag: {tag}"
        + (f', digest: "{digests[name]}"' if digests[name] else "")
        + "}\n"
        for name in sorted(DEPLOYED)
    ]
    file.write_text(f"{head}images:\n{''.join(lines)}")


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Build, and say what to set; returns the exit status."""
    here = f"linux/{MACHINES.get(platform.machine(), platform.machine())}"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("registry", help="what comes before /pointsman-router, such as registry.example.com/llm")
    parser.add_argument("--push", action="store_true", help="push them, and write their digests")
    parser.add_argument("--platforms", default=here, help=f"with commas between them; {here}")
    given = parser.parse_args(arguments)
    registry = given.registry.rstrip("/")
    try:
        tag = tag_of(root)
        digests = build(root, registry, tag, given.platforms.split(","), push=given.push)
    except BuildError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    write_overlay_images(root, registry, tag, digests)
    print(f"{OVERLAY_IMAGES} has them. For Compose, in .env:")
    print(f"POINTSMAN_IMAGES={registry}/pointsman\nPOINTSMAN_TAG={tag}\nENGINE_IMAGE={registry}/{ENGINE}:{tag}")
    return 0


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise BuildError(f"git {words[0]} failed, and a tag names a commit: {error}") from None
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
