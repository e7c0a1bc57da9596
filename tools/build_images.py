"""Builds the images with docker buildx, and writes their names and tags for the Kubernetes overlays and the Helm chart.

    .venv/bin/python -m tools.build_images REGISTRY [--push] [--platforms linux/amd64,linux/arm64]

`make images REGISTRY=... [PUSH=1] [PLATFORMS=...]` calls it. A tag is the project's version and the commit, so that its content
never changes. Without --push the images stay in this machine's Docker, which holds one platform. The overlays read their images
from deploy/k8s/components/images, and the chart has values for them in deploy/helm/images.yaml; both are written after all builds
succeeded. With --push they also have the digests, so that a cluster runs exactly what was built here. Exits with status 1 and a
message if something is missing or fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OVERLAY_IMAGES = "deploy/k8s/components/images/kustomization.yaml"
CHART_IMAGES = "deploy/helm/images.yaml"
PARTS = ("router", "agent", "gateway", "lab")
ENGINE = "pointsman-engine"
# Images that Kubernetes deploys: all but the lab's, since emulated engines are for Compose only.
DEPLOYED = (*(f"pointsman-{part}" for part in PARTS if part != "lab"), ENGINE)


class BuildError(Exception):
    """An image could not be built; the message names it and the reason."""


@dataclass(frozen=True)
class Image:
    """An image to build: its name without a registry, its Dockerfile, and the Dockerfile's build arguments."""

    name: str
    dockerfile: str
    arguments: tuple[str, ...] = ()


def images() -> Iterator[Image]:
    """Yield all images."""
    for part in PARTS:
        yield Image(f"pointsman-{part}", "deploy/docker/Dockerfile", (f"PART={part}",))
    yield Image(ENGINE, "deploy/docker/engine.Dockerfile")


def tag_of(root: Path) -> str:
    """Return the version and commit of the checkout; the version alone if the commit is tagged with it. Raises BuildError."""
    version = str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])
    if _git(root, "status", "--porcelain", "--untracked-files=no", "--", f":!{OVERLAY_IMAGES}", f":!{CHART_IMAGES}"):
        raise BuildError("there are changes that are not committed, so a tag would not identify the image's content")
    if f"v{version}" in _git(root, "tag", "--points-at", "HEAD").split():
        return version
    return f"{version}-g{_git(root, 'rev-parse', '--short=12', 'HEAD')}"


def build(root: Path, registry: str, tag: str, platforms: str, *, push: bool) -> dict[str, str]:
    """Build every image for `platforms` (separated by commas; empty: this machine's); return name -> digest in the registry,
    empty without `push`. Raises BuildError."""
    if "," in platforms and not push:
        raise BuildError("an image of several platforms must be pushed to a registry: add --push (PUSH=1)")
    digests = {}
    with tempfile.TemporaryDirectory() as folder:
        for image in images():
            metadata = Path(folder, f"{image.name}.json")
            words = ["docker", "buildx", "build", "--file", image.dockerfile]
            words += ["--platform", platforms] if platforms else []
            words += [word for argument in image.arguments for word in ("--build-arg", argument)]
            words += ["--label", f"org.opencontainers.image.version={tag}", "--tag", f"{registry}/{image.name}:{tag}"]
            words += ["--metadata-file", str(metadata), "--push" if push else "--load", "."]
            try:
                subprocess.run(words, cwd=root, check=True)
            except FileNotFoundError:
                raise BuildError("docker is missing: Docker 23 or newer, or its buildx plugin, is needed") from None
            except subprocess.CalledProcessError as error:
                raise BuildError(f"{image.name}: docker ended with status {error.returncode}") from None
            digests[image.name] = str(json.loads(metadata.read_text())["containerimage.digest"]) if push else ""
    return digests


def write_overlay_images(root: Path, registry: str, tag: str, digests: dict[str, str]) -> None:
    """Write the DEPLOYED images into OVERLAY_IMAGES."""
    file = root / OVERLAY_IMAGES
    head = file.read_text().partition("images:\n")[0]
    lines = [
        f"  - {{name: {name}, newName: {registry}/{name}, newTag: {tag}"
        + (f', digest: "{digests[name]}"' if digests[name] else "")
        + "}\n"
        for name in sorted(DEPLOYED)
    ]
    file.write_text(f"{head}images:\n{''.join(lines)}")


def write_chart_images(root: Path, registry: str, tag: str, digests: dict[str, str]) -> None:
    """Write the DEPLOYED images into CHART_IMAGES, as values of the chart."""
    lines = [
        f'    {name.removeprefix("pointsman-")}: "{digests[name]}"\n' for name in sorted(DEPLOYED) if digests[name]
    ]
    head = f"# Written by `make images`.\nimages:\n  registry: {registry}\n  tag: {tag}\n"
    (root / CHART_IMAGES).parent.mkdir(parents=True, exist_ok=True)
    (root / CHART_IMAGES).write_text(head + (f"  digests:\n{''.join(lines)}" if lines else ""))


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Build, and print the settings for Compose; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("registry", help="prefix of the image names, such as registry.example.com/llm")
    parser.add_argument("--push", action="store_true", help="push the images, and write their digests")
    parser.add_argument("--platforms", default="", help="platforms, separated by commas; default: this machine's")
    given = parser.parse_args(arguments)
    registry = given.registry.rstrip("/")
    try:
        tag = tag_of(root)
        digests = build(root, registry, tag, given.platforms, push=given.push)
    except BuildError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    write_overlay_images(root, registry, tag, digests)
    write_chart_images(root, registry, tag, digests)
    print(f"{OVERLAY_IMAGES} and {CHART_IMAGES} are written. For Compose, set in .env:")
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
