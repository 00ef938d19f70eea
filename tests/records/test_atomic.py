import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from micronorm import records
from micronorm.records import remove_partials, write_atomically


def test_an_atomic_write_replaces_what_was_there(tmp_path):
    file = tmp_path / "file"
    write_atomically(file, b"old")
    assert file.read_bytes() == b"old"
    write_atomically(file, b"now")
    assert file.read_bytes() == b"now"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_during_an_atomic_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, error):
    file = tmp_path / "file"
    file.write_bytes(b"old")

    def fail(descriptor):
        raise error("in the middle")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(error, match="in the middle"):
        write_atomically(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_full_disk_is_reported_with_the_file_and_the_bytes_it_needs(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device \(1,234 bytes needed, [\d,]+ free\)") as caught:
        write_atomically(tmp_path / "file", b"x" * 1234)
    assert caught.value.filename == str(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_or_a_device_is_refused_and_stays(tmp_path):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to("/dev/null")
    for path in (pipe, link):
        with pytest.raises(OSError, match="is a pipe or a device, not a file") as caught:
            write_atomically(path, b"new")
        assert caught.value.filename == str(path)
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, pipe]


def test_a_written_file_has_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    write_atomically(tmp_path / "file", b"")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_the_content_is_on_the_disk_before_the_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(descriptor):
        calls.append("folder" if os.fstat(descriptor).st_ino == tmp_path.stat().st_ino else "content")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", lambda *paths: [calls.append("replace"), replace(*paths)])
    write_atomically(tmp_path / "file", b"new")
    assert calls == ["content", "replace", "folder"]


def test_a_writer_killed_in_the_middle_leaves_the_old_file_and_a_partial_that_is_recognised(tmp_path):
    code = textwrap.dedent(
        """
        import os, signal, sys
        from micronorm.records import write_atomically
        os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
        write_atomically(sys.argv[1], b"new")
        """
    )
    file = tmp_path / "file"
    file.write_bytes(b"old")
    env = {**os.environ, "PYTHONPATH": str(Path(records.__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code, str(file)], env=env, timeout=120, check=False)
    assert file.read_bytes() == b"old"
    (left,) = (path for path in tmp_path.iterdir() if path != file)
    assert left.read_bytes() == b"new"
    assert remove_partials(tmp_path) == [left]
    assert list(tmp_path.iterdir()) == [file]
