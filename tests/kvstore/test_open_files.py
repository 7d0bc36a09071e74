"""Files stay open while they are of use: a bounded number, none closed under its reader, none that is gone for long."""

from __future__ import annotations

import os
import threading

import pytest

from kvstore.open_files import OpenFiles


@pytest.fixture
def paths(tmp_path):
    found = [tmp_path / f"file-{number}" for number in range(6)]
    for path in found:
        path.write_text(path.name)
    return found


@pytest.fixture
def files():
    files = OpenFiles(3)
    yield files
    files.close()


def held(folder) -> list[str]:
    """Names of the folder's files that this process has open; deleted ones too."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue
    return sorted(os.path.basename(link) for link in links if link.startswith(f"{folder}/"))


def text(file) -> str:
    """Through the page cache: a direct read wants aligned memory."""
    with open(f"/proc/self/fd/{file.descriptor}", "rb") as copy:
        return copy.read().decode()


def read(files, path) -> str:
    file = files.take(path)
    try:
        return text(file)
    finally:
        files.give_back(file)


def test_the_least_recently_used_is_closed_first(files, paths, tmp_path):
    for number in (0, 1, 2, 0, 3, 4):
        assert read(files, paths[number]) == f"file-{number}"
        assert len(files) <= 3
    assert held(tmp_path) == ["file-0", "file-3", "file-4"]


def test_a_file_is_not_closed_under_its_readers(files, paths, tmp_path):
    one, other = files.take(paths[0]), files.take(paths[0])
    assert one is other
    for path in paths[1:]:
        read(files, path)
    files.forget(paths[0])
    files.give_back(one)
    assert text(other) == "file-0"
    files.give_back(other)
    assert "file-0" not in held(tmp_path)


def test_a_deleted_or_replaced_file_is_let_go(files, paths, tmp_path):
    for path in paths[:3]:
        read(files, path)
    paths[0].unlink()
    paths[5].rename(paths[1])
    files.forget_changed()
    assert held(tmp_path) == ["file-2"]
    assert read(files, paths[1]) == "file-5"
    with pytest.raises(FileNotFoundError):
        files.take(paths[0])


def test_of_one_path_only_another_file_is_let_go(files, paths, tmp_path):
    read(files, paths[0])
    found = paths[0].stat()
    files.forget_other(paths[0], (found.st_dev, found.st_ino))
    assert held(tmp_path) == ["file-0"]
    files.forget_other(paths[0], (found.st_dev, found.st_ino + 1))
    files.forget_other(paths[1], (found.st_dev, found.st_ino))
    assert held(tmp_path) == []


def test_many_threads_leave_as_many_open_as_there_may_be(files, paths, tmp_path):
    wrong = []

    def work(start: int) -> None:
        for number in range(300):
            path = paths[(start + number * number) % len(paths)]
            if read(files, path) != path.name:
                wrong.append(path)
            if number % 50 == start:
                files.forget(path)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert len(held(tmp_path)) == len(files) <= 3
    files.close()
    assert held(tmp_path) == []
