"""The tables as text, and what they say of the targets."""

import torch

from micronorm.bench.cases import CASES
from micronorm.bench.measure import Settings
from micronorm.bench.peers import BN, BN_GN, FUSED, GN
from micronorm.bench.rows import compare
from micronorm.bench.table import as_text, heading, remarks, verdicts
from tests.bench.rows import CASE, row

STEP = FUSED[0]


def test_a_table_has_a_line_for_every_row_and_no_empty_column():
    rows = [row(BN, 2.0, backend="cudnn"), row(STEP, 1.0, backend="triton"), row(BN_GN, 4.0)]
    compare(rows)
    title, head, *lines = as_text(CASE, rows)
    assert title == "4x16x8x8, 4 groups: made by hand; BN's best: BN>ReLU graph nhwc (cudnn)"
    assert "÷ BN>GN" in head
    assert "× floor" not in head
    assert "÷ BN eval>GN" not in head
    assert [line.split()[0] for line in lines] == ["BN>ReLU", "BCN+ReLU", "BN>GN>ReLU"]
    assert lines[1].split()[-4:] == ["0.50", "0.50", "0.50", "0.25"]


def test_a_row_without_a_figure_says_why():
    rows = [row(BN, 2.0), row(GN, None, fault="RuntimeError: out of luck")]
    *_, line = as_text(CASE, rows)
    assert line.endswith("RuntimeError: out of luck")


def test_a_busy_machine_is_told_where_the_cpu_is_timed():
    assert remarks([row(BN, 1.0, busy_elsewhere=0.7)]) == ["preliminary: other processes kept 0.7 cores busy"]
    assert remarks([row(BN, 1.0, busy_elsewhere=0.05)]) == []
    assert remarks([row(BN, 1.0, busy_elsewhere=0.7, peak_bytes=1)]) == []  # a GPU's times, whose host is not idle


def test_the_heading_states_the_floor_and_what_the_cache_may_hold():
    cpu = heading(Settings(torch.device("cpu"), torch.float32, ("eager",), 7))
    assert "float32; median and quartiles of 7 rounds" in cpu[0]
    assert not any("Floor" in line for line in cpu)
    gpu = heading(Settings(torch.device("cuda"), torch.bfloat16, ("graph",), 7, bandwidth=4.25e12))
    assert any("5 passes over memory at 4.25 TB/s" in line for line in gpu)
    assert any("rotate over 120 MB" in line and "the cache may hold" in line for line in gpu)


def test_verdicts_count_what_meets_its_target_and_name_the_worst():
    large, small = CASES["large"][0], CASES["small"][0]
    rows = []
    for case, ours in ((large, 0.4), (small, 1.2)):
        at = [
            row(BN, 1.0, case=case),
            row(STEP, ours, case=case, floor_ms=0.25),
            row(STEP, 2 * ours, case=case, layout="nchw", floor_ms=0.25),
            row(BN, 1.0, case=case, route="eager"),
            row(STEP, 1.4, case=case, route="eager"),
        ]
        compare(at)
        rows += at
    assert verdicts(rows) == [
        "large, step, graph, ÷ BN nhwc ≤ 0.5: 1 of 2; the most is 0.80, at 2x256x200x336 nchw",
        "large, step, graph, × floor ≤ 2: 1 of 2; the most is 3.20, at 2x256x200x336 nchw",
        "small, step, graph, ÷ BN nhwc ≤ 1: 0 of 2; the most is 2.40, at 1x64x200x336 nchw",
        "small, step, eager, ÷ BN nhwc ≤ 1.5: 1 of 1; the most is 1.40, at 1x64x200x336 nhwc",
    ]


def test_cases_without_targets_have_no_verdict():
    assert verdicts([row(BN, 1.0, case=CASES["cpu"][0]), row(STEP, 1.0, case=CASES["cpu"][0])]) == []
