"""What a report says, and in what order."""

import json

import pytest
from torch import nn

import micronorm as mn
from micronorm.check import CutsReport
from tests.check.parts import Net, images, summed


@pytest.fixture(scope="module")
def broken() -> CutsReport:
    return mn.check_cuts(Net(nn.BatchNorm2d(8)), images(), summed)


def test_a_report_reads_as_where_why_and_what_to_do(broken):
    text = str(broken)
    assert "THE STEP DEPENDS ON THE SPLIT" in text
    assert "middle (BatchNorm2d) normalizes by statistics of the samples in its batch" in text
    assert "evidence: its inputs agree, but its output does not; relative error: " in text
    assert "fix: Convert the model with mn.convert(model), replace this layer by mn.BCN() or mn.GN(), or" in text


def test_a_report_lists_every_difference_gradients_first_and_the_worst_of_them_first(broken):
    order = [(d.kind != "gradient", -d.error) for d in broken.differences]
    assert order == sorted(order)
    assert {"gradient", "buffer", "loss"} <= {d.kind for d in broken.differences}
    assert {d.cut for d in broken.differences} == {"halved", "one by one"}
    assert all(d.error > d.allowed for d in broken.differences)


def test_a_report_is_json(broken):
    data = json.loads(json.dumps(broken.to_dict(), allow_nan=False))
    assert data["ok"] is False
    assert data["cuts"] == {"whole": [6], "halved": [3, 3], "one by one": [1] * 6}
    assert data["findings"][0]["cause"] == "batch_statistics"
    assert len(data["differences"]) == len(broken.differences)


def test_estimates_are_compared_as_the_commit_would_write_them():
    class Fooled(mn.nn.BatchChannelNorm):
        """Gathers something else the more samples there are; its outputs know nothing of it."""

        def _estimates(self, data, *, elements):
            return super()._estimates(data._replace(mean=data.mean + len(data.mean)), elements=elements)

    report = mn.check_cuts(Net(Fooled(8, 2)), images(), summed)
    assert {d.kind for d in report.differences} == {"estimate"}
    assert report.findings[0].where == "middle"
