"""`rustloader.cache(path=...)`: how a file is created, and which files are not used."""

import errno
import logging
import os
import signal

import pytest
from cached_rows import FileSystem, Rows, cached, is_correct
from isolation import in_child
from support import rustloader

pytestmark = pytest.mark.ours

if rustloader is not None:
    from rustloader.caching import files


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "samples.cache")


@pytest.fixture
def filled(path):
    assert is_correct(cached(path))
    return path


# Creation


@pytest.fixture(params=["unnamed", "named", "renamed"])
def birth(request, monkeypatch):
    """The ways in which a file is created on different file systems."""
    if request.param != "unnamed":
        monkeypatch.setattr(files, "os", FileSystem(has_links=request.param == "named"))


@pytest.mark.usefixtures("birth")
def test_a_new_file_is_only_for_its_user(path, tmp_path):
    previous = os.umask(0o002)
    try:
        assert is_correct(cached(path)) and is_correct(cached(path))
    finally:
        os.umask(previous)
    assert os.stat(path).st_mode & 0o777 == 0o600 and os.listdir(tmp_path) == ["samples.cache"]


@pytest.mark.usefixtures("birth")
def test_a_file_without_room_leaves_nothing_behind(path, tmp_path, monkeypatch):
    def fails(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fails)
    with pytest.raises(OSError, match=r"No space left on device: '.*samples.cache'"):
        cached(path)
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("birth")
def test_the_first_of_two_programs_that_create_a_file_wins(path, tmp_path, monkeypatch):
    winners, name = [], files._give_name

    def beaten(*args):
        monkeypatch.setattr(files, "_give_name", name)
        winners.append(cached(path, memory="1MiB"))
        return name(*args)

    monkeypatch.setattr(files, "_give_name", beaten)
    loser = cached(path, memory="8MiB")
    assert is_correct(loser) and loser.usage().limit == 8 << 20 and winners[0].usage().lifetime_misses == 200
    assert os.listdir(tmp_path) == ["samples.cache"]


def _dies(path):
    files._give_name = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    cached(path)


def test_a_program_that_is_killed_while_it_creates_a_file_leaves_nothing(path, tmp_path):
    assert in_child(_dies, path)["status"] == signal.SIGKILL and os.listdir(tmp_path) == []
    assert is_correct(cached(path))


# Files that are not caches

OTHERS = {
    "text": b"precious " * 2000,
    "zeros": bytes(1 << 20),
    "zeros and data": bytes(9000) + b"pixels" * 1000,
    "short zeros": bytes(50),
    "nothing": b"",
    "a part of a header": b"RLCACHE1" + bytes(3000),
    "a header without a limit": b"RLCACHE1" + bytes(30_000),
}


@pytest.mark.parametrize("content", OTHERS.values(), ids=OTHERS)
def test_a_file_that_is_not_a_whole_cache_is_left_alone(path, content):
    with open(path, "wb") as file:
        file.write(content)
    with pytest.raises(ValueError, match=r"is not a cache of rustloader.*; give another path, or remove the file"):
        cached(path)
    with open(path, "rb") as file:
        assert file.read() == content


def test_a_sparse_file_stays_sparse(path):
    with open(path, "wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ValueError, match="is not a cache of rustloader"):
        cached(path)
    assert (os.stat(path).st_size, os.stat(path).st_blocks) == (1 << 30, 0)


def test_what_is_not_a_file_is_refused(path, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="is not a regular file"):
        cached(str(tmp_path / "fifo"))
    for folder in (str(tmp_path), f"{tmp_path}/"):
        with pytest.raises(IsADirectoryError):
            cached(folder)
    with pytest.raises(FileNotFoundError, match="none/file"):
        cached(str(tmp_path / "none" / "file"))


# Files to which other users may have written

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")


class Spy:
    """A sample whose pickle creates a file when it is loaded."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (self.file, "w")


def refused(path, text):
    with pytest.raises(PermissionError, match=text):
        cached(path)


@needs_root
def test_the_file_of_another_user_is_refused_before_a_sample_is_read(path, tmp_path):
    spied = [Spy(str(tmp_path / "loaded"))] * 3
    rustloader.cache(spied, "1MiB", path=path)[0]
    (tmp_path / "loaded").unlink(missing_ok=True)
    os.chown(path, 65534, 65534)
    with pytest.raises(PermissionError, match=r"belongs to user 65534, and reading the samples .* give another path"):
        rustloader.cache(spied, "1MiB", path=path)
    assert not (tmp_path / "loaded").exists()


def _as_another_user(path):
    os.seteuid(65534)
    try:
        return {"correct": is_correct(cached(path)), "usage": cached(path).usage().misses}
    finally:
        os.seteuid(0)


@needs_root
def test_a_user_has_own_files_and_may_use_those_of_root(path, tmp_path):
    os.chmod(tmp_path, 0o777)
    for folder in list(tmp_path.parents)[:3]:
        os.chmod(folder, 0o755)
    assert in_child(_as_another_user, path)["correct"] and os.stat(path).st_uid == 65534
    os.chown(path, 0, 0)
    os.chmod(path, 0o606)
    refused(path, "other users may write to this file")


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_refused(filled, mode):
    os.chmod(filled, mode)
    refused(filled, rf"other users may write to this file \(mode {mode:o}\), .* run `chmod go-w` if only you")
    os.chmod(filled, 0o644)
    assert is_correct(cached(filled))


def test_a_symbolic_link_is_followed_only_where_others_cannot_replace_it(filled, tmp_path):
    for place in ("own", "shared"):
        (tmp_path / place).mkdir()
        os.symlink("../samples.cache", tmp_path / place / "link")
    os.symlink("own/link", tmp_path / "second")
    os.chmod(tmp_path / "shared", 0o1777)
    assert is_correct(cached(str(tmp_path / "second"))) and is_correct(cached(str(tmp_path / "own" / "link")))
    refused(str(tmp_path / "shared" / "link"), r"link is in a folder to which other users may write: .*samples")
    # A file that is not a link can be in such a folder.
    assert is_correct(cached(str(tmp_path / "shared" / "file")))


def test_a_link_to_nothing_creates_its_target(path, tmp_path):
    os.symlink("target", path)
    assert is_correct(cached(path)) and os.path.islink(path) and (tmp_path / "target").stat().st_size == 16 << 20
    os.symlink("loop", tmp_path / "loop")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        cached(str(tmp_path / "loop"))


def test_a_name_in_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_correct(cached("samples.cache", Rows(3))) and os.listdir() == ["samples.cache"]


def test_a_file_that_is_locked_is_waited_for(filled, caplog):
    import fcntl
    import threading

    with open(filled) as file, caplog.at_level(logging.INFO, "rustloader"):
        fcntl.flock(file, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: cached(filled))
        thread.start()
        while "waiting for another program" not in caplog.text:
            assert thread.is_alive()
            thread.join(0.01)
        fcntl.flock(file, fcntl.LOCK_UN)
        thread.join()
