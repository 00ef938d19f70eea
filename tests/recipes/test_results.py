"""Which records count for a recipe, and what several of them come to."""

import json
import math

import pytest

from micronorm import recipes
from micronorm.recipes.results import gather, packaged, parse_packaged, read_runs
from tests.recipes.runs import write_run

GN = "cifar1/c10-micro-gn"

ENTRY = {
    "recipe": GN,
    "seed": 0,
    "figures": {"top1": 7.0},
    "epochs": 164,
    "step_batch": 128,
    "data": {"name": "cifar10", "train": 50_000, "test": 10_000},
    "dtype": "bfloat16",
    "gpu": "Some GPU",
    "versions": {"torch": "2.11"},
    "date": "2025-01-01",
    "command": "micronorm train",
    "digest": "0",
}


def found(folder, name=GN):
    results, damaged = read_runs(folder)
    assert damaged == []
    return gather(recipes.find(name), results)


def test_a_finished_run_of_the_recipe_counts(tmp_path):
    write_run(tmp_path / "a", GN, figures={"top1": 7.25, "loss": 0.3})
    findings = found(tmp_path)
    assert findings.mean() == {"top1": 7.25, "loss": 0.3}
    assert findings.deviation() is None
    assert findings.seeds == [0]
    (result,) = findings.counted
    assert (result.where, result.device, result.date[:4]) == (str(tmp_path / "a"), "Some CPU", "2025")
    assert findings.rejected == ()


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"settings": {"epochs": 2}}, "epochs 2 where the recipe has 164"),
        ({"settings": {"step_batch": 64}}, "step_batch 64 where the recipe has 128"),
        ({"settings": {"unit": 2}}, "unit 2 where the recipe has 1"),
        ({"settings": {"schedule": {"kind": "Constant"}}}, "schedule {'kind': 'Constant'} where the recipe has "),
        ({"data": {"name": "cifar100"}}, "data name cifar100 where the recipe has cifar10"),
        ({"data": {"train": 500}}, "data train 500 where the recipe has 50000"),
        ({"data": {"test": 100}}, "data test 100 where the recipe has 10000"),
        ({"variation": {"size": 16}}, "data size 16 where the recipe has 32"),
        ({"data": {"verified": False}}, "data that were not compared with the published files"),
        ({"finished": False}, "not finished"),
        (
            {"definition": {**recipes.find(GN).definition(), "optimizer": "SGD(lr=0.2)"}},
            "made before the recipe changed in optimizer",
        ),
    ],
)
def test_a_run_that_differs_from_the_recipe_never_counts(tmp_path, changes, reason):
    write_run(tmp_path / "a", GN, **changes)
    findings = found(tmp_path)
    assert findings.mean() is None
    assert findings.seeds == []
    ((_, why),) = findings.rejected
    assert why.startswith(reason)


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": {"dtype": "bfloat16"}},
        {"definition": None},
        {"variation": {"size": None, "lr": None}},
        {"variation": {"size": 32}},
        {"data": {"verified": True}},
    ],
)
def test_what_changes_no_result_is_no_difference(tmp_path, changes):
    write_run(tmp_path / "a", GN, **changes)
    assert found(tmp_path).seeds == [0]


def test_a_run_on_a_gpu_names_the_gpu(tmp_path):
    write_run(tmp_path / "a", GN, execution={"device": "cuda:0"})
    assert found(tmp_path).counted[0].device == "Some GPU"


def test_a_run_without_an_outcome_is_not_finished(tmp_path):
    (write_run(tmp_path / "a", GN) / "outcome.json").unlink()
    findings = found(tmp_path)
    assert [why for _, why in findings.rejected] == ["not finished"]


def test_several_seeds_give_their_mean_and_deviation(tmp_path):
    for seed, error in ((2, 7.0), (0, 6.0), (1, 8.0)):
        write_run(tmp_path / f"s{seed}", GN, seed=seed, figures={"top1": error, f"only{seed}": 1.0})
    findings = found(tmp_path)
    assert findings.seeds == [0, 1, 2]
    assert findings.mean() == {"top1": 7.0}
    assert findings.deviation() == {"top1": 1.0}


def test_of_two_runs_with_one_seed_the_later_counts(tmp_path):
    write_run(tmp_path / "a", GN, figures={"top1": 1.0}, date="2025-02-01")
    write_run(tmp_path / "b", GN, figures={"top1": 2.0}, date="2025-01-01")
    assert found(tmp_path).mean() == {"top1": 1.0}


def test_a_run_directory_counts_before_a_packaged_result_of_its_seed(tmp_path):
    entries = parse_packaged(json.dumps([{**ENTRY, "date": "2030-01-01"}, {**ENTRY, "seed": 1}]))
    write_run(tmp_path / "a", GN, figures={"top1": 9.0})
    findings = gather(recipes.find(GN), [*read_runs(tmp_path)[0], *entries])
    assert findings.mean() == {"top1": 8.0}
    assert [result.where for result in findings.counted] == [str(tmp_path / "a"), "recorded.json#1"]


def test_a_run_counts_in_every_table_that_has_the_same_experiment(tmp_path):
    write_run(tmp_path / "a", "abl/gn")
    for name in ("abl/gn", "cwn/gn", "ind_abl/gn", "imagenet_ws/rn50-gn", "imagenet/rn50-gn"):
        assert found(tmp_path, name).seeds == [0], name
    for name in ("abl/gn-ws", "imagenet_ws/rn101-gn", "cifar2/dn"):
        assert found(tmp_path, name).seeds == [], name


def test_digits_alone_names_its_default_row(tmp_path):
    write_run(tmp_path / "a", "digits")
    assert found(tmp_path, "digits/bcn-ws").seeds == [0]
    assert found(tmp_path, "digits/gn").seeds == []


def test_a_diverged_run_counts_and_shows(tmp_path):
    write_run(tmp_path / "a", GN, seed=0, figures={"top1": 90.0, "loss": math.nan})
    write_run(tmp_path / "b", GN, seed=1, figures={"top1": 8.0, "loss": 0.5})
    findings = found(tmp_path)
    mean, deviation = findings.mean(), findings.deviation()
    assert mean is not None
    assert deviation is not None
    assert mean["top1"] == 49.0
    assert math.isnan(mean["loss"])
    assert math.isnan(deviation["loss"])


def drop(name, within):
    return lambda facts: facts[within].pop(name)


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda facts: facts.pop("data"), "the fact 'data' must be dict"),
        (drop("epochs", "settings"), "the record lacks 'epochs'"),
        (drop("seed", "settings"), "the record lacks 'seed'"),
        (drop("name", "data"), "the record lacks 'name'"),
        (lambda facts: facts["settings"].update(seed=None), "not of the known form"),
        (lambda facts: facts.update(format=99), "format 99"),
    ],
)
def test_a_damaged_record_is_set_aside_with_the_reason(tmp_path, damage, reason):
    file = write_run(tmp_path / "a", GN) / "run.json"
    facts = json.loads(file.read_text("utf-8"))
    damage(facts)
    file.write_text(json.dumps(facts), "utf-8")
    write_run(tmp_path / "b" / "deeper", GN)
    results, damaged = read_runs(tmp_path)
    assert [result.where for result in results] == [str(tmp_path / "b" / "deeper")]
    ((path, why),) = damaged
    assert path == tmp_path / "a"
    assert reason in why


def test_a_folder_that_does_not_exist_holds_no_runs(tmp_path):
    assert read_runs(tmp_path / "none") == ([], [])


def test_the_packaged_results_are_of_recipes_that_exist_and_count():
    results = packaged()
    assert isinstance(results, list)
    for result in results:
        assert result in gather(recipes.find(result.recipe), results).counted, result.where


def test_a_packaged_result_says_where_it_came_from():
    (result,) = parse_packaged(json.dumps([ENTRY]))
    assert (result.device, result.date, result.where) == ("Some GPU", "2025-01-01", "recorded.json#0")
    assert result.settings["dtype"] == "bfloat16"
    assert gather(recipes.find(GN), [result]).seeds == [0]


def test_a_packaged_result_without_its_provenance_is_refused():
    entry = {key: value for key, value in ENTRY.items() if key not in ("digest", "versions")}
    with pytest.raises(ValueError, match=r"recorded\.json#0 lacks versions, digest"):
        parse_packaged(json.dumps([entry]))
    with pytest.raises(ValueError, match="must be a list of objects"):
        parse_packaged("{}")
