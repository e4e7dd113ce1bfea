"""A store gives what was put into it, and nothing that a stranger has put in its place."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest

from cetane.errors import CetaneError
from cetane.files import claimed, records, target_of
from cetane.store import cache_store
from cetane.store.settings import check_store, settings, shared_url, using
from cetane.store.store import Store

KEY, OTHER = "a" * 64, "b" * 64
CONTENT = {"one.txt": b"cetane", "folder/two.bin": bytes(range(256)) * 9000, "empty": b""}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    folder = tmp_path / "made"
    for name, content in CONTENT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(params=["folder", "private", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "memory":
        yield Store("memory://a-store")
        fsspec.filesystem("memory").rm("/a-store", recursive=True)
    elif request.param == "file":
        yield Store(f"file://{tmp_path}/store")
    else:
        yield Store(tmp_path / "store", private=request.param == "private")


@pytest.fixture
def local(tmp_path: Path, made: Path) -> Store:
    """A store with one result, in a folder that tests damage."""
    store = Store(tmp_path / "store")
    assert publish(store, made)
    return store


def publish(store: Store, folder: Path, key: str = KEY, **options: Any) -> bool:
    return store.publish(key, folder, records(folder, folder), **options)


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def list_of(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "store").glob("results/*/*.json")
    return path


def object_of(tmp_path: Path, name: str) -> Path:
    digest = hashlib.sha256(CONTENT[name]).hexdigest()
    return tmp_path / "store" / "objects" / digest[:2] / digest


def test_what_was_published_is_fetched(store: Store, made: Path, tmp_path: Path) -> None:
    assert not store.fetch(KEY, tmp_path / "out") and not (tmp_path / "out").exists()
    assert publish(store, made) and publish(store, made)
    assert store.fetch(KEY, tmp_path / "out") and content(tmp_path / "out") == CONTENT
    assert content(made) == CONTENT
    assert not store.fetch(OTHER, tmp_path / "other")
    assert os.stat(tmp_path / "out").st_mode == os.stat(tmp_path / "made").st_mode


def flipped(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[0] ^= 1
    path.unlink()  # the files of a private store share their content
    path.write_bytes(damaged)


def cut(path: Path) -> None:
    damaged = path.read_bytes()[:-1]
    path.unlink()
    path.write_bytes(damaged)


def linked(path: Path) -> None:
    aside = path.with_name("aside")
    path.rename(aside)
    path.symlink_to(aside)


@pytest.mark.parametrize("damage", [flipped, cut, linked, Path.unlink])
@pytest.mark.parametrize("name", ["one.txt", "folder/two.bin"])
@pytest.mark.parametrize("private", [False, True])
def test_a_damaged_object_is_refused_and_made_again(
    damage: Callable[[Path], None], name: str, private: bool, tmp_path: Path, made: Path
) -> None:
    store = Store(tmp_path / "store", private)
    publish(store, made)
    damage(object_of(tmp_path, name))
    assert not store.fetch(KEY, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert publish(store, made)
    assert store.fetch(KEY, tmp_path / "again") and content(tmp_path / "again") == CONTENT


def with_path(path: str) -> Callable[[dict[str, Any]], Any]:
    return lambda listed: listed | {"files": {path: listed["files"]["one.txt"]}}


def with_record(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda listed: listed | {"files": {"one.txt": listed["files"]["one.txt"] | values}}


@pytest.mark.parametrize(
    "change",
    [
        with_path("../outside"), with_path("/etc/passwd"), with_path("a/../../b"),
        with_path("a//b"), with_path(""), with_path("a\\b"), with_path("a\nb"), with_path("./a"),
        with_path("\ud800"), with_path("x" * 256),
        with_record(bytes=-1), with_record(bytes=1 << 60), with_record(bytes=1 << 40),
        with_record(sha256="../../../etc/passwd"), with_record(sha256="x" * 64),
        lambda listed: listed | {"files": listed["files"] | {"empty/x": listed["files"]["empty"]}},
        lambda listed: listed | {"key": OTHER}, lambda listed: listed | {"schema_version": 2},
        lambda listed: listed | {"more": 1}, lambda listed: [], lambda listed: {"files": {}},
    ],
)  # fmt: skip
def test_a_list_that_is_wrong_is_refused(
    change: Callable[[Any], Any], local: Store, tmp_path: Path, made: Path
) -> None:
    path = list_of(tmp_path)
    path.write_text(json.dumps(change(json.loads(path.read_bytes()))))
    assert not local.fetch(KEY, tmp_path / "out")
    assert publish(local, made) and local.fetch(KEY, tmp_path / "out")
    assert content(tmp_path / "out") == CONTENT


@pytest.mark.parametrize("text", [b"", b"{", b"\xff" * 99, b"[" * 10**6, b'{"a": ' * 99])
def test_a_list_that_is_no_json(text: bytes, local: Store, tmp_path: Path) -> None:
    list_of(tmp_path).write_bytes(text)
    assert not local.fetch(KEY, tmp_path / "out")


def test_a_list_that_is_too_large_is_not_read(local: Store, tmp_path: Path) -> None:
    with list_of(tmp_path).open("r+b") as file:
        file.truncate(1 << 40)  # takes no space
    assert not local.fetch(KEY, tmp_path / "out")


def test_two_publishers_do_no_harm(tmp_path: Path, made: Path) -> None:
    store = Store(tmp_path / "store")
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: publish(Store(tmp_path / "store"), made), range(40)))
    assert store.fetch(KEY, tmp_path / "out") and content(tmp_path / "out") == CONTENT
    assert not list((tmp_path / "store").rglob(".*"))


def test_two_results_of_one_key(local: Store, tmp_path: Path, made: Path) -> None:
    """The first one stays; an error says so, unless times were measured."""
    (made / "one.txt").unlink()
    (made / "one.txt").write_bytes(b"other")
    with pytest.raises(CetaneError, match=r"different results of a{16}: one\.txt"):
        publish(local, made)
    assert publish(local, made, measured=True)
    assert local.fetch(KEY, tmp_path / "out") and content(tmp_path / "out") == CONTENT


def test_a_store_that_is_only_read(
    made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "no")

    system = type(fsspec.filesystem("memory"))
    monkeypatch.setattr(system, "put_file", refuse)
    assert not publish(Store("memory://read-only"), made)


def test_urls_of_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("ftp://x/y", "zip::file://x", "simplecache::memory://x", "python://os"):
        with pytest.raises(CetaneError, match="no place that cetane reads"):
            check_store(url)
    check_store(str(tmp_path / "not-yet" / "deeper"))
    (tmp_path / "file").touch()
    with pytest.raises(CetaneError, match="file: no folder for a store"):
        check_store(str(tmp_path / "file"))
    with pytest.raises(CetaneError, match="cannot read http://127"):
        check_store("http://127.0.0.1:1/store")


def test_an_error_names_the_whole_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `s3://`, `gs://` and `hf://` only the path was named, as if it were a file here."""

    def fail(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", fail)
    with pytest.raises(CetaneError, match=r"cannot read memory://.*/a-store/results/"):
        check_store("memory://a-store")


def test_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CETANE_STORE", raising=False)
    assert shared_url() is None and settings().store.limit_bytes == 4 * 10**9
    Path("cetane.toml").write_text('[store]\nurl = "memory://x"\nlimit = "20MB"\n')
    assert shared_url() == "memory://x" and settings().store.limit_bytes == 20 * 10**6
    monkeypatch.setenv("CETANE_STORE", "memory://y")
    assert shared_url() == "memory://y"
    with using("memory://z"), using(None):
        assert shared_url() == "memory://z"
    Path("cetane.toml").write_text('[store]\nulr = "memory://x"\n')
    with pytest.raises(CetaneError, match=r"cetane\.toml: .*did you mean 'url'"):
        settings()
    Path("cetane.toml").write_text('[store]\nlimit = "much"\n')
    with pytest.raises(CetaneError, match="limit"):
        settings()


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "store"


def write(number: int) -> Callable[[Path], None]:
    return lambda folder: void((folder / "x").write_bytes(bytes([number]) * 1000))


def void(_: object) -> None: ...


def test_the_cache_forgets_what_was_used_longest_ago(cached: Path, tmp_path: Path) -> None:
    keys = [f"{number:064x}" for number in range(4)]
    for number, key in enumerate(keys):
        cache_store.keep(key, write(number))
        os.utime(cached / "results" / key[:2] / f"{key}.json", (1000 + number, 1000 + number))
    assert cache_store.fetch(keys[0], tmp_path / "first")  # used now
    cache_store.forget(2500)
    left = [key for key in keys if cache_store.fetch(key, tmp_path / f"out-{key}")]
    assert left == [keys[0], keys[3]]
    assert len(list(cached.glob("objects/*/*"))) == 2
    cache_store.forget(0, keep=keys[3])
    assert [key for key in keys if cache_store.fetch(key, tmp_path / f"end-{key}")] == [keys[3]]


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_special_file_among_the_results_is_skipped(
    kind: str, cached: Path, tmp_path: Path
) -> None:
    """To read it would never end, or fill the memory."""
    path = cached / "results" / OTHER[:2] / f"{OTHER}.json"
    path.parent.mkdir(parents=True)
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    (tmp_path / "work.py").write_text(
        "from cetane.store import cache_store\n"
        f"cache_store.keep({KEY!r}, lambda folder: (folder / 'x').touch())\n"
        f"print([result.key for _, result in cache_store.results_here()])\n"
    )
    limited = ["sh", "-c", 'ulimit -v 4000000; exec "$@"', "", sys.executable, "work.py"]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=20, cwd=tmp_path)
    assert done.stdout == f"['{KEY}']\n", done.stderr


def test_the_cache_forgets_what_a_killed_process_left(cached: Path, tmp_path: Path) -> None:
    cache_store.keep(KEY, write(1))
    fresh, old, folder = (
        cached / name for name in ("objects/aa/fresh", "objects/aa/old", ".kept.1-x.tmp")
    )
    fresh.parent.mkdir()
    folder.mkdir()
    for path in (fresh, old):
        path.write_bytes(b"x")
    for path in (old, folder):
        os.utime(path, (1000, 1000))
    cache_store.forget(10**9)
    assert fresh.exists() and not old.exists() and not folder.exists()
    assert cache_store.fetch(KEY, tmp_path / "out")


def test_the_next_writer_removes_what_a_killed_one_fetched(local: Store, tmp_path: Path) -> None:
    """It may have a bundle's gigabytes."""
    killed = """
import os, signal, sys
from pathlib import Path
from cetane.store.store import Store
with Store(sys.argv[1]).opened(sys.argv[2], Path(sys.argv[3])):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    target = tmp_path / "there" / "bundle.v2"
    started = [sys.executable, "-c", killed, local.url, KEY, str(target)]
    assert subprocess.run(started).returncode == -signal.SIGKILL
    (left,) = target.parent.iterdir()
    assert content(left / "made" / "result") == CONTENT
    assert target_of(left) == target  # by which `gc` knows it too
    with claimed(target, "building"):
        assert not left.exists()


def test_a_cache_on_another_disk(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files cannot be linked, so they are copied."""

    def link(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    cache_store.keep(KEY, lambda folder: void((folder / "x").write_bytes(bytes(3 << 20))))
    monkeypatch.setattr(os, "link", link)
    assert cache_store.fetch(KEY, tmp_path / "out")
    assert (tmp_path / "out" / "x").read_bytes() == bytes(3 << 20)


def test_figures_that_two_machines_measured_at_once(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums depend on the number of threads; a template that differs is still an error."""
    with using(str(tmp_path / "shared")):
        cache_store.keep(KEY, write(1), measured=True)
        monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "another"))
        cache_store.keep(KEY, write(2), measured=True)
        with pytest.raises(CetaneError, match="two workers made different results"):
            cache_store.keep(KEY, write(3))
        monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "a-third"))
        assert cache_store.fetch(KEY, tmp_path / "first")
    assert content(tmp_path / "first") == {"x": b"\1" * 1000}


def test_what_another_has_made_is_kept_here_too(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with using(str(tmp_path / "shared")):
        cache_store.keep(KEY, write(1))
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "another"))
    assert not cache_store.fetch(KEY, tmp_path / "alone")
    with using(str(tmp_path / "shared")):
        assert cache_store.fetch(KEY, tmp_path / "shared-one")
    assert cache_store.fetch(KEY, tmp_path / "here")
    assert content(tmp_path / "here") == {"x": b"\1" * 1000}
