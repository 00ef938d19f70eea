import pytest

from micronorm.records import Run
from tests.records.rows import FACTS


@pytest.fixture
def run(tmp_path) -> Run:
    return Run.create(tmp_path / "run", FACTS)
