import getpass
import json
import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

import micronorm
from micronorm.engine import environment as room
from micronorm.engine.environment import environment, revision

XEON = """\
processor\t: 0
model name\t: Intel(R) Xeon(R) Processor
physical id\t: 0
core id\t\t: 0

processor\t: 1
model name\t: Intel(R) Xeon(R) Processor
physical id\t: 0
core id\t\t: 0

processor\t: 2
model name\t: Intel(R) Xeon(R) Processor
physical id\t: 1
core id\t\t: 0
"""
ARM = "processor\t: 0\nBogoMIPS\t: 48.00\nCPU part\t: 0xd0c\n"


def git(folder: Path, *arguments: str) -> str:
    settings = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *settings, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A repository with one commit, taken for the one micronorm runs from."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "code.py").write_text("1")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    monkeypatch.setattr(room, "_SOURCE", tmp_path / "src")
    return tmp_path


def test_versions_and_date_are_those_of_this_process():
    found = environment()
    assert found["micronorm"] == micronorm.__version__
    assert found["torch"] == torch.__version__
    assert found["platform"].startswith(f"{platform.system()} {platform.machine()}")
    assert found["python"] == sys.version.split()[0]
    assert found["cpu"]["torch_threads"] == torch.get_num_threads() == 1
    assert 1 <= found["cpu"]["threads"] <= (os.cpu_count() or 1)
    assert abs(datetime.fromisoformat(found["date"]) - datetime.now(UTC)) < timedelta(minutes=1)


def test_it_is_json_and_names_no_user_machine_or_folder():
    text = json.dumps(environment())
    for secret in (str(Path.home()), str(Path.cwd()), str(Path(micronorm.__file__).parents[2])):
        assert secret not in text
    words = {str(value) for value in [*json.loads(text).values(), *json.loads(text)["cpu"].values()]}
    assert getpass.getuser() not in words
    assert platform.node() not in words


@pytest.mark.parametrize(
    "text, model, cores", [(XEON, "Intel(R) Xeon(R) Processor", 2), (ARM, None, None), ("", None, None)]
)
def test_the_processor_is_read_where_the_system_tells(tmp_path, monkeypatch, text, model, cores):
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    monkeypatch.setattr(room, "_CPUINFO", file)
    found = environment()["cpu"]
    assert found["model"] == (model or platform.processor() or platform.machine())
    assert found["cores"] == cores


def test_a_system_without_the_files_of_linux_fails_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "_CPUINFO", tmp_path / "missing")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    found = environment()["cpu"]
    assert found["cores"] is None
    assert found["threads"] == os.cpu_count()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_cuda_is_not_initialized():
    assert environment()["gpu"] is None
    assert not torch.cuda.is_initialized()


@pytest.mark.gpu
def test_with_a_gpu_it_is_named():
    found = environment()["gpu"]
    assert found["name"] == torch.cuda.get_device_name(0)
    assert found["count"] == torch.cuda.device_count()
    assert found["cuda"] == torch.version.cuda
    assert found["memory"] > 2**30


@pytest.mark.parametrize(
    "text, driver",
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n", "535.183.01"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65  Release Build\nGCC version: 12.2.0\n",
            "580.65",
        ),
        ("", None),
    ],
)
def test_several_gpus_of_a_kind_are_named_once_with_their_driver(tmp_path, monkeypatch, text, driver):
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(room, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: type("P", (), {"total_memory": 2**37})())
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    found = environment()["gpu"]
    assert (found["name"], found["count"], found["memory"]) == ("NVIDIA H200", 2, 2**37)
    assert found["driver"] == driver


def test_the_revision_is_the_commit_and_says_when_the_source_differs(checkout):
    commit = git(checkout, "rev-parse", "HEAD")
    (checkout / "notes.txt").write_text("outside src: no result depends on it")
    assert revision() == commit
    (checkout / "src" / "code.py").write_text("2")
    assert revision() == f"{commit}-dirty"
    git(checkout, "checkout", "-q", "src")
    (checkout / "src" / "new.py").write_text("not committed, but imported")
    assert revision() == f"{commit}-dirty"


def test_the_variables_of_a_git_hook_do_not_mislead(checkout, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(tmp_path_factory.mktemp("other")))
    monkeypatch.setenv("GIT_INDEX_FILE", "elsewhere")
    found = revision()
    monkeypatch.delenv("GIT_DIR")
    monkeypatch.delenv("GIT_INDEX_FILE")
    assert found == git(checkout, "rev-parse", "HEAD")


def test_there_is_no_revision_without_a_checkout_a_commit_or_git(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert revision() is None
    monkeypatch.undo()
    shutil.move(checkout / ".git", checkout / "away")
    monkeypatch.setattr(room, "_SOURCE", checkout / "src")
    assert revision() is None
    git(checkout, "init", "-q")  # no commit yet
    assert revision() is None
    monkeypatch.setattr(room, "_SOURCE", checkout / "site-packages")
    assert revision() is None
