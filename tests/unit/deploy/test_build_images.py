"""`make images` with a fake docker that records its arguments and returns digests: no image is built here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.repository import VERSION
from tools import build_images, check_deploy
from tools.deploy_checks import helm, service_environment

DOCKER = f"""#!{sys.executable}
import hashlib, json, pathlib, sys
here = pathlib.Path(__file__).parent
words = sys.argv[1:]
with (here / "told").open("a") as file:
    file.write(json.dumps(words) + "\\n")
name = words[words.index("--tag") + 1]
if (here / "broken").exists() and (here / "broken").read_text() in name:
    sys.exit(17)
digest = "sha256:" + hashlib.sha256(name.encode()).hexdigest()
pathlib.Path(words[words.index("--metadata-file") + 1]).write_text(json.dumps({{"containerimage.digest": digest}}))
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository, with a fake docker on PATH, in the folder `bin` beside it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "docker").write_text(DOCKER)
    (programs / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    root = tmp_path / "checkout"
    for name in ("pyproject.toml", build_images.OVERLAY_IMAGES):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(build_images.ROOT / name, root / name)
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "s"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    return root


def calls_of(checkout: Path) -> list[list[str]]:
    return [json.loads(line) for line in (checkout.parent / "bin/told").read_text().splitlines()]


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def pointsman_images(objects: list[helm.Object]) -> set[str]:
    return {
        container["image"]
        for manifest in objects
        if manifest["kind"] in ("Deployment", "StatefulSet")
        for container in manifest["spec"]["template"]["spec"]["containers"]
        if "pointsman" in container["image"]
    }


def test_all_images_are_built_for_all_platforms_and_the_overlays_take_them_by_digest(
    checkout: Path,
) -> None:
    platforms = "linux/amd64,linux/arm64"
    assert build_images.main(["reg.example.com:5000/llm/", "--push", "--platforms", platforms], checkout) == 0
    built = calls_of(checkout)
    tag = build_images.tag_of(checkout)
    assert tag.startswith(f"{VERSION}-g")
    names = [after(words, "--tag") for words in built]
    assert names == [f"reg.example.com:5000/llm/pointsman-{part}:{tag}" for part in (*build_images.PARTS, "engine")]
    assert {after(words, "--platform") for words in built} == {platforms}
    assert all("--push" in words and "--load" not in words for words in built)
    assert [after(words, "--build-arg") for words in built[:4]] == [f"PART={part}" for part in build_images.PARTS]
    assert all((build_images.ROOT / after(words, "--file")).is_file() for words in built)

    written = (checkout / build_images.OVERLAY_IMAGES).read_text()
    assert written.startswith("# The version of every image.")
    files = {"k8s/components/images/kustomization.yaml": written}
    found = pointsman_images(check_deploy.render(check_deploy.DEPLOY / "k8s/overlays/gpu", files=files))
    entries = yaml.safe_load(written)["images"]
    assert found == {f"{entry['newName']}:{tag}@{entry['digest']}" for entry in entries}
    assert len({entry["digest"] for entry in entries}) == 4
    values = yaml.safe_load((checkout / build_images.CHART_IMAGES).read_text())
    assert found == pointsman_images(helm.template(check_deploy.CHART, values))


def test_images_of_this_machine_have_no_digest(checkout: Path) -> None:
    assert build_images.main(["local"], checkout) == 0
    assert all("--load" in words for words in calls_of(checkout))
    assert not any(
        "digest" in image for image in yaml.safe_load((checkout / build_images.OVERLAY_IMAGES).read_text())["images"]
    )
    values = yaml.safe_load((checkout / build_images.CHART_IMAGES).read_text())
    assert values == {"images": {"registry": "local", "tag": build_images.tag_of(checkout)}}
    # The written files do not count as a change, which would alter the next tag, also once they are committed.
    subprocess.run(["git", "add", build_images.CHART_IMAGES], cwd=checkout, check=True)
    assert build_images.main(["local"], checkout) == 0


def test_a_commit_that_is_the_version_is_tagged_with_it_alone(checkout: Path) -> None:
    subprocess.run(["git", "tag", f"v{VERSION}"], cwd=checkout, check=True)
    assert build_images.tag_of(checkout) == VERSION


def test_what_cannot_be_built_leaves_the_overlays_alone_and_says_why(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (checkout / build_images.OVERLAY_IMAGES).read_text()
    assert build_images.main(["reg", "--platforms", "linux/amd64,linux/arm64"], checkout) == 1
    assert "PUSH=1" in capsys.readouterr().err
    (checkout.parent / "bin/broken").write_text("pointsman-engine")
    assert build_images.main(["reg", "--push"], checkout) == 1
    assert "pointsman-engine: docker ended with status 17" in capsys.readouterr().err
    (checkout / "pyproject.toml").write_text((checkout / "pyproject.toml").read_text() + "\n")
    assert build_images.main(["reg", "--push"], checkout) == 1
    assert "not committed" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nowhere")
    assert build_images.main(["reg", "--push"], checkout) == 1
    assert (checkout / build_images.OVERLAY_IMAGES).read_text() == before


def test_make_passes_its_variables_on() -> None:
    words = ["make", "-n", "images", "REGISTRY=reg", "PUSH=1", "PLATFORMS=linux/amd64,linux/arm64"]
    said = subprocess.run(words, cwd=build_images.ROOT, capture_output=True, text=True, check=True).stdout
    assert '-m tools.build_images "reg" --push --platforms "linux/amd64,linux/arm64"' in said
    refused = subprocess.run(["make", "images"], cwd=build_images.ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "REGISTRY" in refused.stderr + refused.stdout


@pytest.mark.parametrize("image", ["reg:5000/x/pointsman-router:0.1.0@sha256:0", "pointsman-router:0.1.0"])
def test_checks_know_an_image_by_its_last_name(image: str) -> None:
    assert service_environment.subcommand_of(image) == "router"
