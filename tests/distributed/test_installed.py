"""What a person has who installs the package from an index: a wheel, and an empty folder."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import torch
from helpers.ranks import ROOT
from helpers.tiny import lines, status

LEFT_OUT = (".git", ".venv", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis")
# Refuses whoever looks for a host, or connects to one, that is not this machine.
ALONE = """\
import sys

def hook(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        host = arguments[0] if event == "socket.getaddrinfo" else arguments[1]
        host = host[0] if isinstance(host, tuple) else host
        if host not in (None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0", "::"):
            if not str(host).startswith("/"):
                raise RuntimeError(f"there is no network: {event} {host}")

sys.addaudithook(hook)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the wheel and the source distribution of this tree, built without a network."""
    folder = tmp_path_factory.mktemp("built")
    tree = folder / "tree"
    left_out = shutil.ignore_patterns(*LEFT_OUT, "runs", "site", "build", "dist")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=left_out)
    code = (
        "from setuptools import build_meta\n"
        f"build_meta.build_sdist({str(folder)!r})\n"
        f"build_meta.build_wheel({str(folder)!r})\n"
    )
    env = {"PATH": "/nonexistent", "CC": "/nonexistent/cc"}  # there is no compiler to be found
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


def wheel(built):
    (found,) = built.glob("*.whl")
    return found


def files_of(folder):
    """The files below a folder of the project, links followed, as they are in the package."""
    walked = os.walk(folder, followlinks=True)
    found = {Path(here, name) for here, _, names in walked for name in names}
    return {path.relative_to(ROOT).as_posix() for path in found if "__pycache__" not in path.parts}


def test_the_package_itself_is_pure_python_and_has_all_its_files(built):
    assert re.fullmatch(r"llmtrain-[\d.]+-py3-none-any\.whl", wheel(built).name)
    with zipfile.ZipFile(wheel(built)) as opened:
        names = set(opened.namelist())
        ours = files_of(ROOT / "llmtrain")
        assert "llmtrain/recipes/configs/finetune/chat_lora.yaml" in ours
        assert ours - names == set()
        assert {name for name in names if ".dist-info/" not in name} - ours == set()
        for folder in ("configs", "accelerate_configs"):
            for name in files_of(ROOT / folder):
                assert opened.read(f"llmtrain/recipes/{name}") == (ROOT / name).read_bytes()


def test_the_page_of_an_index_has_no_link_into_the_repository(built):
    with zipfile.ZipFile(wheel(built)) as opened:
        (name,) = (one for one in opened.namelist() if one.endswith(".dist-info/METADATA"))
        metadata = message_from_string(opened.read(name).decode())
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = metadata.get_payload()
    assert "pip install llmtrain" in page
    assert [link for link in re.findall(r"\]\(([^)]+)\)", page) if "://" not in link] == []
    assert "src=" not in page
    assert "{run=" not in page
    assert "quickstart (`docs/start/quickstart.md`)" in page
    systems = [one for one in metadata.get_all("Classifier") if one.startswith("Operating System")]
    assert systems == ["Operating System :: POSIX :: Linux"]


def test_the_source_distribution_has_what_tests_and_pages_need(built):
    (found,) = built.glob("*.tar.gz")
    with tarfile.open(found) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    for folder in ("tests", "docs", "configs", "accelerate_configs", "scripts", "llmtrain"):
        assert files_of(ROOT / folder) - names == set()
    needed = {"constraints.txt", "CHANGELOG.md", "Makefile", "README.md", "LICENSE", "setup.py"}
    assert needed <= names


@pytest.fixture(scope="module")
def installed(built):
    """The python of a new environment that has the wheel, and the libraries of this one."""
    folder = built / "environment"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    install = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", str(wheel(built))]
    subprocess.run([python, *install], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    libraries = {str(Path(one.__file__).parents[1]) for one in (torch, pytest)}
    (packages / "libraries.pth").write_text("\n".join(libraries) + "\n")
    (packages / "sitecustomize.py").write_text(ALONE)
    return python


def test_from_an_empty_folder_and_without_a_network_it_trains(installed, tmp_path):
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    (folder := tmp_path / "empty").mkdir()

    def run(*words):
        return subprocess.run(
            [installed, *words], cwd=folder, env=env, capture_output=True, text=True
        )

    asked = run("-c", "import socket; socket.create_connection(('192.0.2.1', 80))")
    assert "there is no network: socket.getaddrinfo 192.0.2.1" in asked.stderr
    where = run("-c", "import llmtrain; print(llmtrain.__file__)").stdout
    assert where.startswith(str(installed.parents[1]))
    for name in ("quickstart", "cpu"):
        assert run("-m", "llmtrain", "init", "--recipe", name).stdout == f"{name}.yaml\n"
    launched = ("launch", "--config_file", "cpu.yaml", "-m", "llmtrain", "train")
    shorter = ("training.steps=2", "evaluation.max_documents=4", "data.workers=0")
    ended = run("-m", "accelerate.commands.accelerate_cli", *launched, "quickstart.yaml", *shorter)
    assert ended.returncode == 0, ended.stderr
    run_dir = folder / "runs" / "quickstart"
    assert (status(run_dir)["state"], status(run_dir)["world_size"]) == ("finished", 2)
    assert [line["step"] for line in lines(run_dir, "train")] == [1, 2]
    assert (run_dir / "report.html").is_file()
    assert sorted(path.name for path in folder.iterdir()) == ["cpu.yaml", "quickstart.yaml", "runs"]
