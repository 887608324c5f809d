"""The launcher without a GPU: compiling, what is kept on disk, the attributes and sizes of launches."""

import concurrent.futures
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import processes
import pytest
from launches import SCALE, call

from jaxnorm import _launch, _lib
from jaxnorm import _launcher as launch
from jaxnorm._rows import launcher

needs_nvrtc = pytest.mark.skipif(
    sys.platform != "linux" or launcher.nvrtc()[0] is None, reason="NVRTC is not installed"
)


@pytest.fixture(autouse=True)
def configured(tmp_path, monkeypatch):
    """Each test has its own folder, and begins with nothing compiled."""
    monkeypatch.setenv("JAXNORM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("JAXNORM_CACHE_SIZE", raising=False)
    launcher.configure(launch)
    yield
    monkeypatch.undo()
    launcher.configure(launch)


def entries(tmp_path) -> list[pathlib.Path]:
    return sorted((tmp_path / "cache").glob("*.rows"))


def again(source=SCALE, architecture=90) -> launcher.Compiled:
    """Compiled as a new process would."""
    launcher.configure(launch)
    return launcher.compile(source, architecture)


# ---- NVRTC ----


def test_nvrtc_is_installed_with_the_tests():
    assert sys.platform != "linux" or launcher.nvrtc()[0] >= (13, 0)


@needs_nvrtc
@pytest.mark.parametrize("architecture", [80, 90, 100, 120])
def test_compile(architecture):
    compiled = launcher.compile(SCALE, architecture)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.registers.keys() == compiled.spill_bytes.keys() == {"jaxnorm_row_program"}
    assert 8 <= compiled.registers["jaxnorm_row_program"] <= 64
    assert compiled.spill_bytes["jaxnorm_row_program"] == 0
    assert compiled.seconds > 0
    assert not compiled.cached
    # In this process a program is compiled once.
    assert launcher.compile(SCALE, architecture) == compiled._replace(seconds=0.0, cached=True)


@needs_nvrtc
def test_architecture_of_a_family():
    """Code for sm_100 runs on any sm_10x: an architecture that NVRTC does not know is compiled for one that it does."""
    known = [launcher.compile(SCALE, architecture).cubin for architecture in range(103, 109)]
    assert launcher.compile(SCALE, 109).cubin in known
    assert launch.can_compile_for(90)
    assert not launch.can_compile_for(50)
    with pytest.raises(RuntimeError, match=r"NVRTC \d+\.\d+ has no code for sm_50; install one"):
        launcher.compile(SCALE, 50)


@needs_nvrtc
def test_spills_are_seen():
    source = """
extern "C" __global__ void __launch_bounds__(1024) jaxnorm_row_program(float* x) {
  float v[200];
  #pragma unroll
  for (int i = 0; i < 200; ++i) v[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 200; ++i) x[i * 1024 + threadIdx.x] = v[i] * v[(i * 7) % 200];
}
extern "C" __global__ void jaxnorm_row_program_finish(float* x) { x[threadIdx.x] = 0; }
"""
    compiled = launcher.compile(source, 90)
    assert compiled.registers["jaxnorm_row_program"] <= 64
    assert compiled.spill_bytes["jaxnorm_row_program"] >= 8 * (200 - 64)
    assert compiled.spill_bytes["jaxnorm_row_program_finish"] == 0


def test_parse_log():
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'row_program' for 'sm_90'
ptxas info    : Function properties for row_program
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 400 bytes cmem[0]
"""
    assert launcher.parse_log(log) == ({"row_program": 255}, {"row_program": 28})


@needs_nvrtc
def test_error_has_the_whole_log(tmp_path):
    source = SCALE.replace("* 2", "* undeclared") + "\nint twice;\nint twice;\n"
    for _ in range(2):
        with pytest.raises(RuntimeError, match="NVRTC could not compile") as raised:
            launcher.compile(source, 90)
        assert 'identifier "undeclared" is undefined' in str(raised.value)
        assert '"twice" has already been defined' in str(raised.value)
        assert "jaxnorm.cu(4)" in str(raised.value)
    assert entries(tmp_path) == []


@needs_nvrtc
def test_headers_of_the_machine_are_not_seen():
    with pytest.raises(RuntimeError, match=r"cuda_bf16\.h"):
        launcher.compile("#include <cuda_bf16.h>\n" + SCALE, 90)


def test_without_nvrtc(tmp_path):
    other = tmp_path / "libnvrtc.so.13"
    other.write_text("not a library")
    launch.configure(["libnvrtc.so.99", str(other)], "", 0)
    version, reason = launcher.nvrtc()
    assert version is None
    assert reason.startswith("NVRTC, which compiles kernels, was not found (no libnvrtc.so.99; ")
    assert str(other) in reason
    assert "pip install nvidia-cuda-nvrtc" in reason
    assert launcher.problem() == reason
    with pytest.raises(RuntimeError, match="NVRTC, which compiles kernels, was not found"):
        launcher.compile(SCALE, 90)
    assert not launch.can_compile_for(90)


def test_status_without_nvrtc():
    launch.configure(["libnvrtc.so.99"], "", 0)
    _lib.module.cache_clear()
    try:
        assert not _lib.module("cuda").available
        line = repr(_lib.status()).splitlines()[-1]
        assert line.startswith("  cuda  plain XLA formulas: NVRTC, which compiles kernels, was")
    finally:
        _lib.module.cache_clear()


def test_candidates(tmp_path, monkeypatch):
    """The wheel, then what the loader knows, then toolkits."""
    library = tmp_path / "lib64" / "libnvrtc.so.12"
    library.parent.mkdir()
    library.touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = launcher.nvrtc_candidates()
    at = found.index("libnvrtc.so.13")
    assert all("/nvidia/" in path for path in found[:at])
    assert found[at:] == ["libnvrtc.so.13", "libnvrtc.so.12", str(library)]


@needs_nvrtc
def test_threads_compile_a_program_once(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        compiled = list(pool.map(lambda _: launcher.compile(SCALE, 90), range(8)))
    assert sum(not c.cached for c in compiled) == 1
    assert len({c.cubin for c in compiled}) == len(entries(tmp_path)) == 1


# ---- the folder on disk ----


@needs_nvrtc
def test_kept_on_disk(tmp_path):
    first = launcher.compile(SCALE, 90)
    assert not first.cached
    second = again()
    assert second.cached
    assert second.seconds < first.seconds / 4
    assert second[:3] == first[:3]
    assert launcher.cache_off() == ""
    assert not again(SCALE + "\n").cached
    assert not again(SCALE, 100).cached
    assert len(entries(tmp_path)) == 3
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert all(e.stat().st_mode & 0o777 == 0o600 for e in entries(tmp_path))


def damaged(data: bytes) -> dict[str, bytes]:
    middle = len(data) // 2
    return {
        "empty": b"",
        "cut": data[:-1],
        "cut in a length": data[:30],
        "longer": data + b"x",
        "one bit": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "huge length": data[:23] + b"\xff" * 8 + data[31:],
        "something else": b"hello",
    }


@needs_nvrtc
@pytest.mark.parametrize("how", damaged(bytes(100)))
def test_damaged_entry_is_replaced(how, tmp_path):
    good = launcher.compile(SCALE, 90)
    (entry,) = entries(tmp_path)
    entry.write_bytes(damaged(entry.read_bytes())[how])
    compiled = again()
    assert not compiled.cached
    assert compiled[:3] == good[:3]
    assert again().cached


@needs_nvrtc
def test_foreign_entry_is_replaced(tmp_path):
    """A whole entry under another program's name, as after a collision of hashes."""
    launcher.compile(SCALE, 90)
    (entry,) = entries(tmp_path)
    again(SCALE + "\n")
    other = next(e for e in entries(tmp_path) if e != entry)
    entry.write_bytes(other.read_bytes())
    assert not again().cached
    assert again().cached


@needs_nvrtc
@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_what_is_no_file_is_no_entry(kind, tmp_path):
    good = launcher.compile(SCALE, 90)
    (entry,) = entries(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    entry.rename(elsewhere)
    {
        "folder": entry.mkdir,
        "link": lambda: entry.symlink_to(elsewhere),
        "pipe": lambda: os.mkfifo(entry),
    }[kind]()
    compiled = again()
    assert not compiled.cached
    assert compiled.cubin == good.cubin
    assert again().cached == (kind != "folder")


@needs_nvrtc
@pytest.mark.parametrize("what", ["folder", "entry"])
def test_what_others_can_write_is_not_used(what, tmp_path):
    launcher.compile(SCALE, 90)
    (entry,) = entries(tmp_path)
    (entry if what == "entry" else entry.parent).chmod(0o777)
    assert not again().cached
    assert ("others can write to it" in launcher.cache_off()) == (what == "folder")


@needs_nvrtc
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", ["folder", "entry"])
def test_what_others_own_is_not_used(what, tmp_path):
    launcher.compile(SCALE, 90)
    (entry,) = entries(tmp_path)
    os.chown(entry if what == "entry" else entry.parent, 12345, -1)
    assert not again().cached


@needs_nvrtc
@pytest.mark.parametrize("folder", ["/dev/null/cache", "/proc/cache", "off", "OFF", "read only"])
def test_without_a_folder_programs_stay_in_memory(folder, tmp_path, monkeypatch):
    if folder == "read only":
        if os.geteuid() == 0:
            pytest.skip("root can write anywhere")
        tmp_path.chmod(0o500)
        folder = str(tmp_path / "cache")
    monkeypatch.setenv("JAXNORM_CACHE_DIR", folder)
    assert not again().cached
    assert launcher.compile(SCALE, 90).cached
    assert not again().cached
    assert launcher.cache_off().startswith("switched off" if folder.lower() == "off" else folder)


@needs_nvrtc
def test_folder_that_cannot_be_written_is_read(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root can write anywhere")
    launcher.compile(SCALE, 90)
    (tmp_path / "cache").chmod(0o500)
    assert again().cached
    assert not again(SCALE + "\n").cached
    assert len(entries(tmp_path)) == 1


@needs_nvrtc
def test_least_recently_used_goes_first(tmp_path, monkeypatch):
    sources = [SCALE + "\n" * i for i in range(4)]
    for age, source in enumerate(sources[:3]):
        before = set(entries(tmp_path))
        again(source)
        (new,) = set(entries(tmp_path)) - before
        os.utime(new, (time.time() - 1000 + age,) * 2)
    size = max(e.stat().st_size for e in entries(tmp_path))
    assert again(sources[0]).cached  # which makes it the one used last
    monkeypatch.setenv("JAXNORM_CACHE_SIZE", str(int(3.5 * size)))
    assert not again(sources[3]).cached
    assert len(entries(tmp_path)) == 3
    assert [again(s).cached for s in (sources[0], sources[2], sources[3])] == [True] * 3
    assert not again(sources[1]).cached


@needs_nvrtc
def test_entry_above_the_limit_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXNORM_CACHE_SIZE", "1K")
    again()
    assert entries(tmp_path) == []
    monkeypatch.setenv("JAXNORM_CACHE_SIZE", "0")
    again()
    assert launcher.cache_off() == "switched off"


@needs_nvrtc
def test_abandoned_files_are_removed(tmp_path):
    again()
    old, new, other = (tmp_path / "cache" / name for name in ("old.tmp", "new.tmp", "mine.txt"))
    for file in (old, new, other):
        file.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    os.utime(other, (time.time() - 7200,) * 2)
    again(SCALE + "\n")
    assert [old.exists(), new.exists(), other.exists()] == [False, True, True]


def test_cache_settings(tmp_path, monkeypatch):
    def settings(size=None, **variables):
        for name in ("JAXNORM_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        if size is not None:
            monkeypatch.setenv("JAXNORM_CACHE_SIZE", size)
        return launcher.cache_folder()

    assert settings(HOME="/h") == ("/h/.cache/jaxnorm", 256 << 20, "")
    assert settings(HOME="/h", XDG_CACHE_HOME="/x")[0] == "/x/jaxnorm"
    assert settings(HOME="/h", XDG_CACHE_HOME="x")[0] == "/h/.cache/jaxnorm"
    assert settings(HOME="/h", XDG_CACHE_HOME="/x", JAXNORM_CACHE_DIR="/y")[0] == "/y"
    assert settings(HOME="/h", JAXNORM_CACHE_DIR="~/y")[0] == "/h/y"
    assert settings(HOME="/h", JAXNORM_CACHE_DIR="off") == ("", 0, "")
    for size, number in {"12": 12, "3k": 3 << 10, "5M": 5 << 20, " 2G": 2 << 30}.items():
        assert settings(size, HOME="/h")[1] == number
    assert settings("9" * 40, HOME="/h")[1] == 2**63 - 1
    for size in ("", "x", "-1", "1.5G", "1T"):
        folder, _, problem = settings(size, HOME="/h")
        assert folder == ""
        assert problem == f"JAXNORM_CACHE_SIZE must be bytes, or end in K, M or G, got {size!r}"


COMPILES = """
import sys, time
from jaxnorm._rows import launcher
source = open(sys.argv[1]).read()
for i in range(12):
    compiled = launcher.compile(source + "//" + "x" * (i % 4 * 10000), 90)
    assert compiled.cubin.startswith(b"\\x7fELF")
print("done")
"""


@needs_nvrtc
@pytest.mark.parametrize("size", ["256M", "60K"], ids=["enough", "three of four fit"])
def test_processes_share_a_folder(size, tmp_path):
    """Of which one is damaged all the time."""
    source = tmp_path / "source.cu"
    source.write_text(SCALE)
    environment = {**os.environ, "JAXNORM_CACHE_SIZE": size, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-P", "-c", COMPILES, str(source)]
    running = [
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    while any(p.poll() is None for p in running):
        for entry in entries(tmp_path)[:1]:
            entry.write_bytes(b"damaged")
        time.sleep(0.01)
    for process in running:
        out, err = process.communicate()
        assert process.returncode == 0, err[-2000:]
        assert out == "done\n"
    assert list((tmp_path / "cache").glob("*.tmp")) == []


# ---- attributes and sizes ----


def encoded(made, **changes):
    attributes = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in made.items()}
    return {**attributes, "version": int(attributes["version"]), **changes}


def plan(made, *buffer_dims, resident=1000, **changes):
    rows, chunks, groups, dims, launches = launch.plan_launches(
        encoded(made.attributes, **changes), [list(d) for d in buffer_dims], resident
    )
    finish = launches[1][1:3] if len(launches) > 1 else ((0, 0, 0), (0, 0, 0))
    return {
        "grid": launches[0][1],
        "threads": launches[0][2][0],
        "rows": rows,
        "chunks": chunks,
        "groups": groups,
        "dims": dims,
        "finish_grid": finish[0],
        "finish_threads": finish[1][1],
    }


def test_a_block_for_each_tile():
    p = plan(call(), (10, 64), (10, 64))
    assert p == {
        "grid": (3, 1, 1),
        "threads": 128,
        "rows": 10,
        "chunks": 3,
        "groups": 1,
        "dims": (10,),
        "finish_grid": (0, 0, 0),
        "finish_threads": 0,
    }
    assert plan(call(cluster=8), (10, 64), (10, 64))["grid"] == (24, 1, 1)


def test_sizes_come_from_any_buffer():
    sizes = ((0, 0, 1), (1, 2, 8), (-1, 5, 1))
    p = plan(call(sizes=sizes), (6, 64), (6, 64, 32))
    assert p["dims"] == (6, 4, 5)
    assert p["rows"] == 120
    assert p["grid"] == (30, 1, 1)
    assert plan(call(sizes=()), (64,), (64,))["grid"] == (1, 1, 1)


def test_groups():
    made = call(sizes=((0, 0, 1), (0, 1, 1)), group_dims=1, rows_per_tile=4)
    p = plan(made, (3, 10, 64), (3, 10, 64))
    assert (p["groups"], p["chunks"], p["grid"]) == (3, 3, (9, 1, 1))


@pytest.mark.parametrize(
    ("groups", "tiles", "blocks", "resident", "multiple", "chunks"),
    [
        (1, 1000, 264, 264, 1, 264),
        (1, 1000, 264, 132, 1, 132),  # the device holds fewer
        (1, 1000, 264, 1000, 1, 264),  # it holds more than were asked for
        (1, 5, 264, 264, 1, 5),  # no more chunks than tiles
        (32, 1000, 264, 264, 1, 8),
        (500, 10, 264, 264, 1, 1),  # more groups than blocks
        (1, 1000, 264, 264, 7, 252),  # a multiple: blocks have up to 4 tiles, as 259 would
        (1, 5, 264, 264, 7, 5),  # fewer than the multiple
        (1, 20, 264, 264, 7, 14),
        (1, 8192, 132, 33, 8, 32),
        (1, 8192, 132, 31, 8, 56),  # in two turns: of 24 in one turn, 7 of 31 places would be empty
        (1, 64, 132, 31, 8, 24),  # with so few tiles a second turn would take longer
        (2, 8192, 132, 31, 8, 56),
        (1, 8192, 132, 7, 8, 56),
        (1, 1000, 264, 0, 1, 1),
    ],
)
def test_persistent_blocks(groups, tiles, blocks, resident, multiple, chunks):
    made = call(sizes=((0, 0, 1), (0, 1, 1)), group_dims=1, blocks=blocks, chunk_multiple=multiple)
    p = plan(made, (groups, 4 * tiles - 1, 64), (1,), resident=resident)
    assert p["chunks"] == chunks
    assert p["grid"] == (groups * chunks, 1, 1)
    assert groups * chunks <= max(blocks, groups)  # which scratch has room for


@pytest.mark.parametrize(
    ("group_dims", "rows", "y"), [(0, 4, 32), (1, 1, 1), (1, 9, 4), (1, 16, 4), (1, 4000, 32)]
)
def test_finish(group_dims, rows, y):
    made = call(
        sizes=((0, 0, 1), (0, 1, 1)), group_dims=group_dims, blocks=500, finish=(7, 2),
        finish_arguments=(1, 2),
    )  # fmt: skip
    p = plan(made, (2, rows, 64), (1,), (1,))
    assert p["finish_grid"] == (7, 2 if group_dims else 1, 2)
    assert p["finish_threads"] == y


@pytest.mark.parametrize("shape", [(0, 5, 64), (5, 0, 64), (0, 0, 64)])
@pytest.mark.parametrize("blocks", [0, 264])
def test_no_rows(shape, blocks):
    """Sums are still written: they are 0."""
    made = call(
        sizes=((0, 0, 1), (0, 1, 1)), group_dims=1, blocks=blocks, finish=(7, 2),
        finish_arguments=(1,),
    )  # fmt: skip
    p = plan(made, shape, (1,))
    assert (p["grid"][0], p["rows"], p["chunks"], p["groups"]) == (0, 0, 0, shape[0])
    assert p["finish_grid"] == (7, max(shape[0], 1), 2)
    assert p["finish_threads"] == 1


def test_more_rows_than_32_bits():
    made = call(sizes=((0, 0, 1), (0, 1, 1)))
    p = plan(made, (70_000, 70_000, 1), (1,))
    assert p["rows"] == 4_900_000_000
    assert p["grid"] == (1_225_000_000, 1, 1)
    assert plan(call(), (2**31 - 1, 4096), (1,))["rows"] == 2**31 - 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(version=3), "this program has version 3 of the attributes, this jaxnorm knows 2"),
        (dict(source=""), "source must not be empty"),
        (dict(row_tiles=[1] * 3), "row_tiles must have 0 or 4 numbers, got 3"),
        (dict(row_tiles=[0, 0, 1, 0]), "rows_per_tile must be from 1 to"),
        (dict(row_tiles=[1, -1, 1, 0]), "blocks must be from 0 to"),
        (dict(row_tiles=[1, 0, 0, 0]), "chunk_multiple must be from 1 to"),
        (dict(row_tiles=[1, 0, 1, 2]), "group_dims must be from 0 to 1, got 2"),
        (dict(row_tiles=[]), "a grid by a rule needs row_tiles"),
        (
            dict(sizes=[0, 0]),
            "sizes must have 3 numbers for each of at most 8 row dimensions, got 2",
        ),
        (
            dict(sizes=[0, 0, 1] * 9),
            "sizes must have 3 numbers for each of at most 8 row dimensions",
        ),
        (dict(sizes=[-2, 0, 1]), "the buffer of a size must be from -1 to 63, got -2"),
        (dict(sizes=[0, -1, 1]), "the dimension of a size must be from 0 to"),
        (dict(sizes=[0, 0, 0]), "the divisor of a size must be from 1 to"),
        (dict(sizes=[2, 0, 1]), "buffer 2 is asked for, the call has 2"),
        (dict(sizes=[0, 2, 1]), "dimension 2 of buffer 0 is asked for, it has 2"),
        (dict(sizes=[0, 0, 3]), "a dimension of 10 is no multiple of 3"),
        (dict(sizes=[-1, 2**31, 1]), "a row dimension must be at most 2147483647, got 2147483648"),
        (dict(sizes=[-1, 2**31 - 1, 1] * 3), "the number of rows does not fit 64 bits"),
        (dict(sizes=[-1, 2**31 - 1, 1] * 2), "in tiles of 4 need more than 2147483647 blocks"),
    ],
)
def test_checks(changes, message):
    with pytest.raises(ValueError, match="^jaxnorm: row_program: ") as raised:
        plan(call(), (10, 64), (10, 64), **changes)
    assert message in str(raised.value)


LAUNCH = [0, 0, 6, 1, 1, 128, 1, 1, 0, 1, 0, 1, 1]  # of one argument of one word


@pytest.mark.parametrize(
    ("launches", "message"),
    [
        ([1, *LAUNCH[1:]], "the kernel of a launch must be from 0 to 0, got 1"),
        ([0, 3], "the rule of a grid must be from 0 to 2, got 3"),
        ([0, 0, 0], "the blocks along x must be from 1 to"),
        ([0, 0, 1, 65536], "the blocks along y must be from 1 to 65535, got 65536"),
        ([0, 0, 1, 1, 0], "the blocks along z must be from 1 to"),
        ([*LAUNCH[:5], 1025], "threads must be from 1 to 1024, got 1025"),
        ([*LAUNCH[:5], 512, 4, *LAUNCH[7:]], "threads must be from 1 to 1024, got 2048"),
        ([*LAUNCH[:8], -1], "shared_bytes must be from 0 to 1048576, got -1"),
        ([*LAUNCH[:9], 17, *LAUNCH[10:]], "cluster must be from 1 to 16, got 17"),
        ([*LAUNCH[:9], 4097], "cluster must be from 1 to 4096, got 4097"),
        ([*LAUNCH[:9], 4, *LAUNCH[10:]], "6 blocks are no multiple of clusters of 4"),
        ([*LAUNCH[:10], 4], "the flags of a launch must be from 0 to 3, got 4"),
        ([*LAUNCH[:11], 129], "the number of arguments must be from 0 to 128, got 129"),
        ([*LAUNCH[:12], 513], "the number of an argument's words must be from 1 to 512, got 513"),
        ([*LAUNCH[:12], 0], "the number of an argument's words must be from 1 to 512, got 0"),
        (LAUNCH, "launches ends where the kind of a word should be"),
        ([*LAUNCH, 7, 0, 0], "the kind of a word must be from 0 to 6, got 7"),
        ([*LAUNCH, 1, 64, 0], "the buffer or dimension of a word must be from 0 to 63, got 64"),
        ([*LAUNCH, 6, 1, 0], "the buffer or dimension of a word must be from 0 to 0, got 1"),
        ([*LAUNCH, 1, 2, 0], "buffer 2 is asked for, the call has 2"),
        ([*LAUNCH, 1, 0, -1], "the offset of a word must be from 0 to"),
        ([*LAUNCH, 1, 0, 1], "an offset of 1 bytes lies beyond buffer 0"),
        ([*LAUNCH, 0, 1, 0] * 257, "at most 256 launches"),
    ],
)
def test_checks_of_launches(launches, message):
    with pytest.raises(ValueError, match="^jaxnorm: row_program: ") as raised:
        plan(call(), (10, 64), (10, 64), launches=launches)
    assert message in str(raised.value)


def two_launches(**changes):
    """Of 640 bytes to 80."""
    structure = _launch.packed(
        ("u", 7), _launch.Pointer(0, 64), [("h", 5), ("b", True)], ("f", 1.5), _launch.TAG
    )
    launches = [
        _launch.Launch("first", (6, 1, 1), (128, 1, 1), (structure,), cluster=2),
        _launch.Launch(
            "second", (1, 2, 3), (32, 4, 1), ((_launch.pointer(1),), (_launch.number(-3),))
        ),
        _launch.Launch("first", (2, 1, 1), (128, 1, 1), (structure,), cooperative=True, early=True),
    ]
    return {**_launch.attributes("pair", "text", launches, (640, 80)), **changes}


def test_arguments_are_words_of_memory():
    made = encoded(two_launches())
    assert made["kernels"] == "first second"
    *_, launches = launch.plan_launches(made, [[10, 64], [80]], 1)
    structure = [7, 64, 5 | 1 << 16 | int(np.float32(1.5).view(np.int32)) << 32, 0]
    assert launches == [
        ("first", (6, 1, 1), (128, 1, 1), [structure]),
        ("second", (1, 2, 3), (32, 4, 1), [[1 << 32], [-3]]),
        ("first", (2, 1, 1), (128, 1, 1), [structure]),
    ]


@pytest.mark.parametrize(
    ("dims", "changes", "message"),
    [
        ([[10, 64]], {}, "buffer 1 is asked for, the call has 1"),
        ([[10, 64], [80], [1]], {}, "the call has 3 buffers, its plan is for 2"),
        ([[10, 63], [80]], {}, "buffer 0 has 630 bytes, its plan is for 640"),
        ([[10, 64], [81]], {}, "buffer 1 has 81 bytes, its plan is for 80"),
        ([], dict(buffer_bytes=[32, 80]), "an offset of 64 bytes lies beyond buffer 0"),
        ([], dict(buffer_bytes=[1] * 65), "buffer_bytes must name at most 64 buffers, got 65"),
    ],
)
def test_checks_of_buffers(dims, changes, message):
    with pytest.raises(ValueError, match="^jaxnorm: pair: ") as raised:
        launch.plan_launches(encoded(two_launches(), **changes), dims, 1)
    assert message in str(raised.value)


def test_structures_are_laid_out_as_in_c():
    words = _launch.packed(("b", True), [("h", 2), ("l", 3), ("b", False)], ("d", 0.0), ("i", -1))
    assert [w.value for w in words] == [1, 2, 3, 0, 0, 2**32 - 1]
    assert _launch.size_of(("b", True), ("u", 1), ("h", 1)) == 12
    assert _launch.size_of(("u", 1), [("u", 1), ("l", 1)]) == 24
    assert _launch.packed(_launch.Pointer(None)) == (_launch.number(0),)


def test_checks_of_groups():
    many = plan(call(group_dims=1, finish=(1, 1)), (65536, 64), (1,))
    assert many["finish_grid"] == (1, 65535, 1)  # a block has several groups
    wide = call(group_dims=2, sizes=((-1, 2**16, 1), (-1, 2**16, 1)))
    with pytest.raises(ValueError, match="at most 2147483647 groups of rows are possible"):
        plan(wide, (1,), (1,))


# ---- the target ----


@needs_nvrtc
def test_attributes_are_decoded_when_xla_compiles():
    """On the CPU, where the target can be registered but not launch."""
    result = processes.run("row_program_on_cpu")
    assert result["good"] == "executed: no stream"
    for name, message in {
        "version": "this program has version 7 of the attributes",
        "threads": "threads must be from 1 to 1024, got 4096",
        "source": "the attribute source must be a string",
        "sizes": "the attribute sizes must be an array of int64",
        "missing": "the attribute row_tiles must be an array of int64",
    }.items():
        assert result[name].startswith("refused: "), name
        assert message in result[name], name


def test_clusters_anywhere_in_the_grid():
    """A cooperative launch by tiles of rows, whose clusters may be larger than those of the GPU."""
    tiles = _launch.Launch(
        "all", (1, 1, 1), (64, 1, 1), (), cluster=33, cooperative=True, rule=_launch.TILES
    )
    rows = _launch.RowTiles(4, 8, 1, 0, ((0, 0, 1),))
    made = encoded(_launch.attributes("together", "text", [tiles], row_tiles=rows))
    assert launch.plan_launches(made, [[100, 64]], 8)[-1][0][1] == (8 * 33, 1, 1)
    assert launch.plan_launches(made, [[100, 64]], 4)[-1][0][1] == (4 * 33, 1, 1)
    with pytest.raises(ValueError, match="33 blocks must run at once, the GPU runs 0"):
        launch.plan_launches(made, [[100, 64]], 0)
    rows = _launch.RowTiles(1, 0, 1, 0, ((-1, 2**31 - 1, 1),) * 2)
    made = encoded(_launch.attributes("together", "text", [tiles], row_tiles=rows))
    with pytest.raises(ValueError, match="need more than 2147483647 blocks"):
        launch.plan_launches(made, [[100, 64]], 8)
