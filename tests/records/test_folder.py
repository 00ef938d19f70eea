import pytest

from micronorm.records import Run, find_runs
from tests.records.rows import FACTS


def test_runs_are_found_at_any_depth_in_order(tmp_path):
    for name in ("b", "a/10", "a/2", "a/1"):
        Run.create(tmp_path / name, FACTS)
    (tmp_path / "empty").mkdir()
    assert find_runs(tmp_path) == [tmp_path / name for name in ("a/1", "a/2", "a/10", "b")]
    assert find_runs(tmp_path / "b") == [tmp_path / "b"]
    assert find_runs(tmp_path / "empty") == []
    with pytest.raises(FileNotFoundError, match="no folder"):
        find_runs(tmp_path / "nowhere")
