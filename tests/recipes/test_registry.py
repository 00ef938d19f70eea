"""Names: what finds a recipe, and what a wrong name is told."""

import dataclasses

import pytest

from micronorm import recipes
from micronorm.nn import BN, GN
from micronorm.recipes.protocols import shared_samples


def test_digits_alone_means_its_row_with_bcn_and_ws():
    assert recipes.find("digits") is recipes.find("digits/bcn-ws")


def test_every_recipe_is_found_by_its_name():
    for table in recipes.tables().values():
        for recipe in table.rows:
            assert recipes.find(recipe.name) is recipe


@pytest.mark.parametrize(
    "name, message",
    [
        ("cifar1/c10-bcn-wss", "near it: cifar1/c10-bcn-ws"),
        ("cifar1", "'cifar1' is a table, not a recipe; its recipes are cifar1/c10-bn, "),
        ("cifra1/c10-bn", "no table 'cifra1'; near it: cifar1, cifar2"),
        ("/runs/digits", "'/runs/digits' is a path, not a recipe; write TABLE/ROW, or file.py:NAME"),
        ("zzz", "nor one like it; there are abl/…, "),
        ("cwn/zzzzzzzzzzzz", "nor one like it; there are cwn/gn, "),
    ],
)
def test_a_wrong_name_is_told_the_names_near_it(name, message):
    with pytest.raises(ValueError, match=r"no recipe|is a table|is a path|no table") as fault:
        recipes.find(name)
    assert message in str(fault.value)


@pytest.mark.parametrize(
    "name, message",
    [
        ("tab:cifar1", "names go without tab:, write 'cifar1'"),
        ("fig:imagenet", "'fig:imagenet' is a figure, not a table: micronorm reproduce fig:imagenet"),
        ("cifar3", "near it: cifar"),
        ("qqq", "no table 'qqq', nor one like it; there are abl, "),
    ],
)
def test_a_wrong_table_is_told_those_that_there_are(name, message):
    with pytest.raises(ValueError, match=r"names go without|not a table|no table") as fault:
        recipes.find_table(name)
    assert message in str(fault.value)


def test_changing_what_is_handed_out_changes_no_table():
    recipes.tables().clear()
    assert "cifar1" in recipes.tables()


def test_a_table_holds_rows_of_its_own_each_once():
    rows = recipes.find_table("digits").rows
    with pytest.raises(ValueError, match="table digits: rows must be its own and named once"):
        recipes.Table(name="digits", title="", rows=(*rows, rows[0]))
    with pytest.raises(ValueError, match="table other: rows must be its own"):
        recipes.Table(name="other", title="", rows=rows)
    with pytest.raises(ValueError, match="default 'gm'"):
        recipes.Table(name="digits", title="", rows=rows, default="gm")


@pytest.mark.parametrize("field", ["network", "data"])
def test_a_recipe_refuses_what_does_not_exist(field):
    with pytest.raises(ValueError, match=f"digits/gn: no {field} 'nonesuch'; there are digits, "):
        dataclasses.replace(recipes.find("digits/gn"), **{field: "nonesuch"})


def test_a_norm_decides_how_many_samples_share_a_forward():
    assert shared_samples(None, 64) == shared_samples(BN(), 64) == (64, 64)
    assert shared_samples(BN(micro_batch=2), 64) == (2, None)
    assert shared_samples(GN(), 64) == shared_samples(GN(), 64, frames=8) == (1, None)
    assert shared_samples(BN(micro_batch=16), 64, frames=8) == (2, None)
    with pytest.raises(ValueError, match="micro-batches of 4 images, but a clip has 8"):
        shared_samples(BN(micro_batch=4), 64, frames=8)


def test_the_same_experiment_in_two_tables_has_one_definition():
    assert recipes.find("abl/gn-ws").definition() == recipes.find("imagenet/rn50-gn-ws").definition()
    assert recipes.find("abl/gn-ws").definition() != recipes.find("abl/gn").definition()
    assert recipes.find("cifar1/c10-bn").definition() != recipes.find("cifar1/c100-bn").definition()
