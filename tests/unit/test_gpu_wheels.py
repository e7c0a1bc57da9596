"""The wheels for a GPU machine: chosen as pip would choose them, cut into parts, and joined where they arrive."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tools import gpu_wheels, offline_install
from tools.gpu_wheels import OTHERS, POINTSMAN, VLLM, Wheel

PART = 1_000


def made(folder: Path, name: str, group: str, filling: bytes) -> Wheel:
    """Write a wheel whose package has one module, `filling` long."""
    folder.mkdir(exist_ok=True)
    package, version = name.split("-")[:2]
    info = f"{package}-{version}.dist-info"
    with zipfile.ZipFile(folder / name, "w") as wheel:
        wheel.writestr(f"{package}.py", b"FILLING = " + repr(filling).encode())
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", f"{package}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    file = folder / name
    return Wheel(name, f"{package}=={version}", file.stat().st_size, offline_install.sha256_of(file), group)


@pytest.fixture
def wheels(tmp_path: Path) -> list[Wheel]:
    """Three wheels: one within a part, one of several parts, one that ends with the last part."""
    folder = tmp_path / "made"
    return [
        made(folder, "small-1.0-py3-none-any.whl", POINTSMAN, b"s"),
        made(folder, "large-2.0-py3-none-any.whl", VLLM, b"l" * 3 * PART),
        made(folder, "router-3.0-py3-none-any.whl", OTHERS, b"r"),
    ]


@pytest.fixture
def parts(tmp_path: Path, wheels: list[Wheel]) -> Path:
    about: dict[str, object] = {"python": "{}.{}".format(*sys.version_info)}
    gpu_wheels.split(wheels, tmp_path / "made", tmp_path / "parts", about, PART)
    return tmp_path / "parts"


def join(parts: Path, *groups: str) -> dict[str, str]:
    return offline_install.join(parts, json.loads((parts / "manifest.json").read_text()), groups)


def test_the_parts_have_one_size_and_the_joined_files_are_the_same(parts: Path, wheels: list[Wheel]) -> None:
    sizes = [file.stat().st_size for file in sorted(parts.glob("part-*"))]
    assert set(sizes[:-1]) == {PART}
    assert 0 < sizes[-1] <= PART
    assert join(parts, POINTSMAN, VLLM, OTHERS) == {}
    for wheel in wheels:
        joined = parts / "wheels" / wheel.name
        assert joined.read_bytes() == (parts.parent / "made" / wheel.name).read_bytes()
    assert sorted(file.name for file in (parts / "wheels").iterdir()) == sorted(wheel.name for wheel in wheels)


def test_a_missing_part_is_named_and_what_needs_it_comes_later(parts: Path, wheels: list[Wheel]) -> None:
    third = parts / "part-0002"
    kept = third.read_bytes()
    third.unlink()
    assert join(parts, POINTSMAN, VLLM, OTHERS) == {"part-0002": "missing"}
    assert {file.name for file in (parts / "wheels").iterdir()} == {wheels[0].name, wheels[2].name}
    third.write_bytes(kept)
    # What is joined is not made anew: its parts may be gone.
    (parts / "part-0000").rename(parts / "put away")
    assert join(parts, POINTSMAN, OTHERS) == {}
    (parts / "put away").rename(parts / "part-0000")
    assert join(parts, POINTSMAN, VLLM, OTHERS) == {}


@pytest.mark.parametrize("damage", [b"", b"x" * PART])
def test_a_damaged_part_is_named(parts: Path, damage: bytes) -> None:
    (parts / "part-0001").write_bytes(damage)
    assert join(parts, POINTSMAN, VLLM, OTHERS)["part-0001"] == "damaged"


def test_a_damaged_wheel_is_made_again(parts: Path, wheels: list[Wheel]) -> None:
    join(parts, POINTSMAN)
    joined = parts / "wheels" / wheels[0].name
    whole = joined.read_bytes()
    joined.write_bytes(whole[:-1] + b"?")
    assert join(parts, POINTSMAN) == {}
    assert joined.read_bytes() == whole


def test_one_group_needs_its_own_parts_alone(parts: Path) -> None:
    for file in parts.glob("part-*"):
        if file.name != "part-0000":
            file.unlink()
    assert join(parts, POINTSMAN) == {}
    assert "part-0001" in join(parts, VLLM)


def test_the_script_says_what_is_missing_and_installs_without_an_index(tmp_path: Path, wheels: list[Wheel]) -> None:
    # pip is one of the wheels; the environment's own takes its place.
    pip = tmp_path / "made" / "pip-9-py3-none-any.whl"
    with zipfile.ZipFile(pip, "w") as wheel:
        wheel.writestr(
            "pip/__main__.py",
            "import sys\nfrom pathlib import Path\nPath(sys.prefix, 'asked').write_text(' '.join(sys.argv[1:]))\n",
        )
    entry = Wheel(pip.name, "pip==9", pip.stat().st_size, offline_install.sha256_of(pip), POINTSMAN)
    parts = tmp_path / "parts"
    gpu_wheels.split([entry, *wheels], tmp_path / "made", parts, {"python": "{}.{}".format(*sys.version_info)}, PART)
    last = sorted(parts.glob("part-*"))[-1]
    kept = last.read_bytes()
    last.unlink()
    command = [sys.executable, str(parts / "install.py"), "--venv", str(tmp_path / "env")]
    refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (refused.returncode, refused.stderr) == (1, f"{last.name}: missing\n")
    assert not (tmp_path / "env").exists()
    last.write_bytes(kept)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "env" / "asked").read_text().split()
    assert {"--no-index", "--no-deps"} <= set(asked)
    # Other routers have environments of their own.
    assert [Path(word).name for word in asked if word.endswith(".whl")] == [entry.name, wheels[0].name, wheels[1].name]


def test_another_python_is_refused(parts: Path) -> None:
    manifest = parts / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"python": "2.7"}))
    command = [sys.executable, str(parts / "install.py"), "--venv", str(parts / "env")]
    refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert refused.returncode == 1
    assert "the wheels are for Python 2.7" in refused.stderr


def locked(name: str, *wheels: str) -> dict[str, Any]:
    """A package of a pylock.toml."""
    entries = [{"url": f"https://files.example/{wheel}", "size": 5, "hashes": {"sha256": wheel}} for wheel in wheels]
    return {"name": name, "version": "1.0", "wheels": entries}


def test_the_wheel_is_the_one_that_pip_would_choose() -> None:
    tags = gpu_wheels.tags_of("3.12")
    many = locked(
        "p",
        "p-1.0-py3-none-any.whl",
        "p-1.0-cp311-cp311-manylinux_2_17_x86_64.whl",
        "p-1.0-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        "p-1.0-cp312-cp312-manylinux_2_28_aarch64.whl",
    )
    assert gpu_wheels.best_wheel(many, tags, VLLM).name.startswith("p-1.0-cp312-cp312-manylinux_2_17_x86_64")
    stable = locked("p", "p-1.0-cp38-abi3-manylinux_2_31_x86_64.whl", "p-1.0-cp313-cp313-manylinux_2_17_x86_64.whl")
    assert gpu_wheels.best_wheel(stable, tags, VLLM).name.startswith("p-1.0-cp38-abi3")
    with pytest.raises(SystemExit, match=r"p 1\.0 has no wheel"):
        gpu_wheels.best_wheel(locked("p", "p-1.0-cp313-cp313-manylinux_2_17_x86_64.whl"), tags, VLLM)


def test_the_plan_leaves_out_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = [locked("torch", "torch-1.0-py3-none-any.whl"), locked("vllm", "vllm-1.0-py3-none-any.whl")]
    light = [locked("pip", "pip-1.0-py3-none-any.whl")]
    routers = [locked("torch", "torch-1.0-py3-none-any.whl")]

    def resolve(requirements: Any, python: str, *flags: str, constraints: Any = ()) -> list[dict[str, Any]]:
        if "--no-deps" in flags:
            return routers
        return light if constraints else [*everything, *light]

    monkeypatch.setattr(gpu_wheels, "resolve", resolve)
    wheels = gpu_wheels.plan("3.12", 13, "1.0", "1.0", ["Torch==1.0+cu130", "vllm @ file:///somewhere", "other==2"])
    assert [(wheel.package, wheel.group) for wheel in wheels] == [
        ("pip==1.0", POINTSMAN),
        ("vllm==1.0", VLLM),
        ("torch==1.0", OTHERS),
    ]
    assert "3 wheels, 1 parts" in gpu_wheels.table(wheels)


@pytest.mark.parametrize(
    ("packages", "cuda", "refused"),
    [
        (["nvidia-cublas"], 13, False),
        (["nvidia-cublas-cu12"], 12, False),
        (["nvidia-cublas-cu12"], 13, True),
        (["nvidia-cublas"], 12, True),
    ],
)
def test_the_index_must_have_this_cuda(packages: list[str], cuda: int, refused: bool) -> None:
    if refused:
        with pytest.raises(SystemExit, match="the index has this vLLM for CUDA"):
            gpu_wheels.check_cuda(packages, cuda)
    else:
        gpu_wheels.check_cuda(packages, cuda)


def test_wheels_are_fetched_some_at_a_time() -> None:
    def wheel(package: str, megabytes: int) -> Wheel:
        return Wheel(f"{package}.whl", package, megabytes * 10**6, "", VLLM)

    wheels = [wheel("a==1", 90), wheel("b==1", 90), wheel("c==1", 90), wheel("c==2", 1), wheel("d==1", 900)]
    assert [[it.package for it in batch] for batch in gpu_wheels.batches(wheels)] == [
        ["a==1", "b==1"],
        ["c==1"],
        ["c==2"],
        ["d==1"],
    ]
    assert list(gpu_wheels.batches([])) == []


def test_what_is_there_is_not_fetched_again(
    tmp_path: Path, wheels: list[Wheel], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: asked.append(command))
    (tmp_path / "made" / wheels[1].name).write_bytes(b"half")
    with pytest.raises(SystemExit, match=r"large==2\.0: pip has fetched another file"):
        gpu_wheels.fetch(wheels, tmp_path / "made", "3.12")
    assert [command[-1] for command in asked] == ["large==2.0"]
