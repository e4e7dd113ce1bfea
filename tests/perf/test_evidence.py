"""What rows of the evidence become: counted by hand from the models' shapes."""

import csv
import os
from pathlib import Path

import pytest

from cetane.errors import CetaneError
from cetane.perf.ane_book import layers_by_shard
from cetane.perf.coreml_llm import cuts_of, formats
from cetane.perf.cost import Work
from cetane.perf.evidence import load_evidence, read, shipped
from cetane.perf.measurement import Measurement, Unusable
from cetane.perf.shapes import load_decoders

PHI_LAYER = 3072 * 128 * (2 * 24 + 2 * 8) + 3 * 3072 * 8192  # q, o, k, v; gate, up, down
BOOK = (
    "id,model,hw,topology,T,state_len,mode,compute_units_runtime,quant_label,"
    "layers_ms_per_tok,head_ms_per_tok,ms_per_shard,ms_per_call,ms_per_tok,source,notes\n"
)
CHUNKS = (
    "id,model,layout,dispatches,ctx,quant,device,compute,T,kind,c1_ms,c2_ms,c3_ms,c4_ms,"
    "ms_per_step,tok_s,status,note,source\n"
)
DEVICE = "id,model,chip,what,kind,ms,works,source\n"
DEVICE_ROW = '1,mine,m4-max,decode,step,5,"[{}]",a kit\n'
PHONE = '"iPhone 17 Pro (A19 Pro), iOS 26"'


def found(file: str, number: str, kind: str = "step") -> Measurement:
    used, _ = load_evidence()
    (one,) = (m for m in used if (m.file, m.id, m.kind) == (file, number, kind))
    return one


def written(tmp_path: Path, text: str) -> tuple[tuple[Measurement, ...], list[str]]:
    file = tmp_path / "rows.csv"
    file.write_text(text)
    used, skipped = read([file])
    return used, [one.why for one in skipped]


def test_every_row_that_ships_has_a_source() -> None:
    assert [path.stem for path in shipped()] == ["ane_book", "coreml_llm"]
    for path in shipped():
        with path.open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert rows and all(row["source"].strip() for row in rows)
        assert len({row["id"] for row in rows}) == len(rows)


def test_every_skipped_row_has_a_reason() -> None:
    used, skipped = load_evidence()
    assert len([m for m in used if m.kind == "step"]) == 58
    assert all(one.why for one in skipped)
    assert not {(m.file, m.id) for m in used} & {(s.file, s.id) for s in skipped}


@pytest.mark.parametrize(
    ("layout", "wanted"),
    [("16+8+6+2", [16, 8, 6, 2]), ("10x3+2", [3] * 10 + [2]), ("32x1", [1] * 32),
     ("20+4+6+2 RangeDim", [20, 4, 6, 2])],
)  # fmt: skip
def test_shards(layout: str, wanted: list[int]) -> None:
    assert layers_by_shard(layout, 32) == wanted


def test_a_step_of_phi() -> None:
    """Four shards of an MLState each, four head slices at once, S = 2048."""
    one = found("ane_book", "P026")
    *layers, head, host = one.works
    assert [w.weights for w in layers] == [{8: n * PHI_LAYER} for n in (16, 8, 6, 2)]
    assert pytest.approx(100.7e6, rel=1e-3) == PHI_LAYER  # 100.8 MB by its own row
    assert head.weights == {8: 200064 * 3072}
    assert [w.any_unit for w in layers] == [1] * 4 and head.any_unit == 0
    # K and V of 8 heads, fp16: blended in six passes, then read once
    layer = 2 * 2 * 2048 * 128 * 8 * (6 + 1)
    assert layers[3].memory == 2 * layer
    assert host.sorted == 0 and one.ms == 58.21


def test_a_step_of_zaya_sorts_its_logits() -> None:
    *_, head, host = found("ane_book", "P058").works
    assert head.weights == {8: 262272 * 2048} and host.sorted == 262272


def test_chunks_of_gemma() -> None:
    model = load_decoders()["gemma4-e2b"]
    bits = formats("INT4 kmeans per_grouped_channel g32")
    works = model.chunked(model.chunks[4], 2048, bits, "io")
    mebibytes = [w.weights[4] / 2 / 2**20 for w in works]
    assert mebibytes == pytest.approx([149, 128, 311, 503], rel=0.02)  # as published
    # chunk 1 owns 7 sliding caches of 512 slots and a full one, 512 wide: in and out, K and V
    own = 2 * 2 * 512 * (7 * 512 + 2048)
    shared = 2 * 2 * (512 * 256 + 2048 * 512)
    assert works[0].border == 2 * own
    assert works[2].border == works[3].border == shared
    assert works[1].border == 2 * 2 * 2 * 512 * (5 * 512 + 2 * 2048) + shared
    # readers: 8 sliding and 2 full layers, read once, and repeated for 8 query heads in two passes
    assert works[2].memory == 2 * 2 * (8 * 256 * 512 + 2 * 512 * 2048) * (1 + 2 * 8)
    stateful = model.chunked(model.chunks[4], 2048, bits, "stateful")
    assert stateful[0].border == 0
    assert works[0].memory - stateful[0].memory == 4 * 2 * 2 * 512 * 2048  # blended, not copied


def test_a_window_on_full_attention() -> None:
    model = load_decoders()["gemma4-e2b"]
    bits = formats("INT4 g32")
    windowed = model.chunked(model.chunks[4], 8192, bits, "io", full_slots=2048)
    assert windowed == model.chunked(model.chunks[4], 2048, bits, "io")


@pytest.mark.parametrize(
    ("layout", "wanted"),
    [
        ("3-chunk Topology II", (8, 25)),
        ("3-chunk (L0-7|L8-24|L25-34+head)", (8, 25)),
        ("2-chunk (L0-14|L15-34+head)", (15,)),
        ("verify 4-chunk K=3", (8, 15, 25)),
    ],
)
def test_cuts(layout: str, wanted: tuple[int, ...]) -> None:
    assert cuts_of(load_decoders()["gemma4-e2b"], layout) == wanted


@pytest.mark.parametrize(
    "layout",
    ["L0-7|L8-999999999999", "L0-99999999|L8-34", "L0-14|L8-34", "L0-7|L9-34", "L0-7|L8-24",
     f"L0-{'9' * 5000}|L1-34", f"{'9' * 5000}-chunk"],
)  # fmt: skip
def test_cuts_that_are_none(layout: str) -> None:
    with pytest.raises(Unusable):
        cuts_of(load_decoders()["gemma4-e2b"], layout)


def test_mixed_formats() -> None:
    assert formats("INT8 MLP + INT4 attn") == {"mlp": 8, "attention": 4, "head": 8}


def test_new_rows_of_both_kinds(tmp_path: Path) -> None:
    row = "1,Phi-4-mini,M4 Max 48GB,12+12+6+2,1,2048,greedy,all,INT8,,,,,60.0,book,\n"
    used, _ = written(tmp_path, BOOK + row)
    assert [(m.kind, m.ms, len(m.works)) for m in used] == [("step", 60.0, 6)]
    row = (
        f"1,gemma4-e2b,4-chunk,4,8192,INT4 g32,{PHONE},CPU_AND_NE,1,decode,20,,,,,15,measured,,x\n"
    )
    used, _ = written(tmp_path, CHUNKS + row)
    assert [(m.kind, round(m.ms, 2)) for m in used] == [("part", 20), ("step", 66.67)]
    assert used[1].works[-1] == Work(calls=0, host=1)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("1,nobody,M4 Max 48GB,32x1,1,2048,,all,INT8,,,,,60,b,\n", "shapes"),
        ("1,Phi-4-mini,a toaster,32x1,1,2048,,all,INT8,,,,,60,b,\n", "toaster"),
        ("1,Phi-4-mini,M4 Max 48GB,31x1,1,2048,,all,INT8,,,,,60,b,\n", "32 layers"),
        ("1,Phi-4-mini,M4 Max 48GB,many,1,2048,,all,INT8,,,,,60,b,\n", "not understood"),
        *(
            (f"1,Phi-4-mini,M4 Max 48GB,{layout},1,2048,,all,INT8,,,60,,60,b,\n", why)
            for layout, why in (
                ("999999999999x1", "32 layers"),
                (f"{'9' * 5000}x1", "too large"),
                ("0x9+32", "32 layers"),
                ("32+0", "32 layers"),
                ("single shard 33L", "32 layers"),
                ("single shard 999999999999L", "32 layers"),
            )
        ),
        *(
            (f"1,Phi-4-mini,M4 Max 48GB,32x1,1,{slots},,all,INT8,,,,,60,b,\n", "context")
            for slots in ("", "nan", "inf", "1e307", "-2048")
        ),
    ],
)
def test_rows_that_cannot_be_used(tmp_path: Path, row: str, why: str) -> None:
    used, reasons = written(tmp_path, BOOK + row)
    assert not used and len(reasons) == 1 and why in reasons[0]


@pytest.mark.parametrize("ms", ["nan", "inf", "1e308", "1e-320", "0", "-60", "6 to 7"])
def test_times_that_are_none(tmp_path: Path, ms: str) -> None:
    row = f"1,Phi-4-mini,M4 Max 48GB,12+12+6+2,1,2048,greedy,all,INT8,,,,,{ms},book,\n"
    assert written(tmp_path, BOOK + row) == ((), [])
    row = f"1,gemma4-e2b,4-chunk,4,8192,INT4 g32,{PHONE},CPU_AND_NE,{ms},decode,,,,,,{ms},"
    assert written(tmp_path, f"{CHUNKS}{row}measured,,x\n") == ((), [])


@pytest.mark.parametrize(
    ("text", "wrong"),
    [("a,b\n1,2\n", "neither the columns"), ("", "neither the columns"),
     (BOOK.replace("model,", ""), "it lacks the columns model"),
     (CHUNKS.replace("source", "").replace("quant,", ""), "it lacks the columns quant, source"),
     (DEVICE.replace("kind,", ""), "it lacks the columns kind"),
     (DEVICE + DEVICE_ROW.replace("m4-max", "m99"), "row 1: no chip 'm99'"),
     (DEVICE + DEVICE_ROW.replace("{}", '{""calls"": 0}'), "row 1: its work calls no program"),
     (DEVICE + DEVICE_ROW.replace("{}", ""), "row 1: its work calls no program"),
     (DEVICE + DEVICE_ROW.replace("{}", '{""memory"": 1e300}'), "row 1: .* not a positive number"),
     (CHUNKS + "1,2\n", "line 2 does not have 19 fields"),
     (CHUNKS + "1," + 131_073 * "x", "not a CSV file: field larger")],
)  # fmt: skip
def test_bad_files(tmp_path: Path, text: str, wrong: str) -> None:
    with pytest.raises(CetaneError, match=wrong):
        written(tmp_path, text)


def test_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    for path in (tmp_path / "none.csv", tmp_path / "pipe.csv"):
        with pytest.raises(CetaneError, match=f"cannot read {path}"):
            read([path])


def test_the_base_of_a_speculative_row(tmp_path: Path) -> None:
    """What plain decoding took stands in its remark; the speculative speed is of something else."""
    row = (
        f'1,gemma4-e2b,MTP,,2048,fp16,{PHONE},CPU_AND_NE,3,spec,,,,,,18.2,measured,"base 12.5",x\n'
    )
    used, _ = written(tmp_path, CHUNKS + row)
    (one,) = used
    assert (one.kind, one.ms, len(one.works)) == ("step", 80.0, 5)
    assert all(work.tokens == 1 for work in one.works)
    used, skipped = written(tmp_path, CHUNKS + row.replace("base 12.5", "accept .3"))
    assert not used and not skipped
    used, skipped = written(tmp_path, CHUNKS + row.replace("base 12.5", "base 0"))
    assert not used and not skipped
