"""bench/machine_code.py: which variants it calls the same."""

import shutil
import struct
from pathlib import Path

import pytest

from bench import machine_code, nvrtc

ROOT = Path(__file__).resolve().parent.parent
needs_nvrtc = pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.INSTALL)


@pytest.fixture
def edited(tmp_path):
    """A copy of the package, without links, and of the list of variants; of the whole checkout no more is needed."""
    shutil.copytree(ROOT / "moeblaze_cupy", tmp_path / "moeblaze_cupy")
    (tmp_path / "bench").mkdir()
    shutil.copy(ROOT / "bench" / "kernel_variants.py", tmp_path / "bench")
    return tmp_path


def compare_routers(folder, capsys) -> tuple[int, list[str]]:
    code = machine_code.main([str(folder), "--arch", "80", "--match", "router_sums.cu"])
    return code, capsys.readouterr().out.splitlines()


@needs_nvrtc
def test_comments_and_lines_change_nothing(edited, capsys):
    source = edited / "moeblaze_cupy" / "kernels_cu" / "router" / "router_sums.cu"
    source.write_text("// one line more\n" + source.read_text())
    code, lines = compare_routers(edited, capsys)
    assert code == 0
    assert lines == [
        "same       sm_80 router_sums.cu: router_sums.cu",
        "1 the same, 0 renamed, 0 different, 0 removed, 0 added",
    ]


@needs_nvrtc
def test_other_instructions_are_seen(edited, capsys):
    source = edited / "moeblaze_cupy" / "kernels_cu" / "router" / "router_sums.cu"
    source.write_text(source.read_text() + '\nextern "C" __global__ void more(int* place) { *place = 1; }\n')
    code, lines = compare_routers(edited, capsys)
    assert code == 1
    assert lines == [
        "DIFFERENT  sm_80 router_sums.cu: router_sums.cu",
        "0 the same, 0 renamed, 1 different, 0 removed, 0 added",
    ]


@needs_nvrtc
def test_one_changed_instruction_is_seen():
    """Among kernels of the same names and sizes."""
    sections = [
        sorted(machine_code.code_sections(nvrtc.compile_source(text.encode(), "a.cu", ["-arch=sm_90a"]).cubin))
        for text in (f'extern "C" __global__ void kernel(int* place) {{ *place {sign}= 3; }}' for sign in "++-")
    ]
    assert sections[0] == sections[1] != sections[2]
    assert [len(contents) for contents in sections[0]] == [len(contents) for contents in sections[2]]


def elf(**sections: bytes) -> bytes:
    """An ELF64 file with sections of these contents, whose names have a dot for each underscore."""
    names = b"".join(b"\0" + name.replace("_", ".").encode() for name in sections) + b"\0"
    contents = [names, *sections.values()]
    starts = [64 + sum(map(len, contents[:n])) for n in range(len(contents) + 1)]
    first = 0
    headers = struct.pack("<IIQQQQ", 0, 3, 0, 0, starts[0], len(names))
    for name, start, held in zip(sections, starts[1:], sections.values(), strict=False):
        headers += struct.pack("<IIQQQQ", first + 1, 1, 0, 0, start, len(held))
        first += 1 + len(name)
    head = b"\x7fELF\x02".ljust(40, b"\0") + struct.pack("<Q", starts[-1]) + bytes(10)
    return head + struct.pack("<HHH", 40, len(contents), 0) + b"".join(contents) + headers


def test_sections_of_instructions_and_constants_are_compared():
    """Not the addresses of the source's variables in .nv.constant4, which are filled in when the code is loaded."""
    file = elf(_text_kernel=b"code", _nv_constant4=b"addresses", _nv_constant0_kernel=b"constants", _nv_info=b"other")
    assert list(machine_code.code_sections(file)) == [b"code", b"constants"]


def test_renamed_variants_are_paired_by_their_code():
    before = {"kept": "1", "old name": "2", "changed": "3", "gone": "4"}
    after = {"kept": "1", "new name": "2", "changed": "5", "new": "6"}
    result = machine_code.compare(before, after)
    assert result == machine_code.Comparison(["kept"], ["changed"], [("old name", "new name")], ["gone"], ["new"])
    assert result.lines()[-1] == "1 the same, 1 renamed, 1 different, 1 removed, 1 added"


@pytest.mark.parametrize("data", [b"", b"\x7fELF\x01" + bytes(64)], ids=["empty", "32 bits"])
def test_files_of_another_kind_are_refused(data):
    with pytest.raises(ValueError, match="expected a 64-bit ELF file"):
        list(machine_code.code_sections(data))


@needs_nvrtc
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["no-such-commit"], "expected a commit or a folder, got 'no-such-commit'"),
        ([str(ROOT), "--match", "no such variant"], "got 'no such variant'"),
    ],
)
def test_what_is_not_there_is_named(arguments, expected):
    with pytest.raises(SystemExit, match=expected):
        machine_code.main([*arguments, "--arch", "80"])
