import json

import pytest

from micronorm import records
from micronorm.records import Run, read
from tests.records.rows import FACTS


def test_a_newer_format_is_refused_rather_than_misread(run):
    (run.path / records.FACTS).write_text(json.dumps({**FACTS, "format": 2}))
    with pytest.raises(ValueError, match="format 2; this micronorm reads format 1 only"):
        Run.open(run.path)


@pytest.mark.parametrize("name", FACTS)
def test_a_missing_fact_is_named(tmp_path, name):
    facts = {key: value for key, value in FACTS.items() if key != name}
    with pytest.raises(ValueError, match=f"the fact '{name}' must be .*, got nothing"):
        Run.create(tmp_path / "run", facts)
    assert not (tmp_path / "run").exists()


def test_facts_are_added_and_those_the_format_needs_cannot_be_spoiled(run):
    run.add_facts(resumptions=[{"date": "2025-01-02", "ranks": 2}])
    again = Run.open(run.path)
    again.add_facts(resumptions=[*again.facts["resumptions"], {"date": "2025-01-03", "ranks": 1}])
    assert [each["ranks"] for each in read(run.path).facts["resumptions"]] == [2, 1]
    with pytest.raises(ValueError, match="the fact 'command' must be str, got NoneType"):
        run.add_facts(command=None)
    assert read(run.path).facts["command"] == FACTS["command"]
