"""Table hippocampus: a miniature of it trains, resumes to the same bytes, is evaluated and folded."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import micronorm as mn
from micronorm import recipes
from micronorm.engine.settings import Execution
from micronorm.recipes.networks import ResidualUNet3d, build_network
from micronorm.recipes.run import run_recipe
from tests.data.miniature import write_decathlon
from tests.tolerances import assert_close_to_max, tolerance

CPU = torch.device("cpu")
PATCH = (8, 16, 8)


@pytest.mark.parametrize("row", ["bcn-ws", pytest.param("bn", marks=pytest.mark.slow)])
def test_a_run_that_stops_ends_with_the_bytes_of_one_that_does_not(tmp_path, monkeypatch, row):
    pytest.importorskip("nibabel")
    monkeypatch.setattr("micronorm.tasks.volumes.PATCH", PATCH)
    write_decathlon(tmp_path / "data" / "hippocampus")
    recipe = recipes.find(f"hippocampus/{row}-fold0")
    recipe = replace(recipe, settings=replace(recipe.settings, steps=3, step_batch=2))

    def build() -> nn.Module:
        torch.manual_seed(0)
        return recipe.equip(ResidualUNet3d(widths=(4, 8, 8), blocks=(1, 1, 1), classes=3))

    def run(out, *, resume=False, **options):
        execution = Execution(device=CPU, micro_batch=1, **options)
        data = tmp_path / "data"
        return run_recipe(recipe, out=out, model=build(), data=data, execution=execution, resume=resume)

    whole = run(tmp_path / "whole")
    assert not run(tmp_path / "cut", steps=2).finished
    resumed = run(tmp_path / "cut", resume=True)
    assert resumed.digest == whole.digest
    assert whole.figures.keys() == {"dice", "dice_anterior", "dice_posterior"}
    nhwc = run(None, channels_last=True)
    assert nhwc.figures == pytest.approx(whole.figures, abs=1)  # a voxel or two of 64 may change sides
    model = mn.load(tmp_path / "cut", model=build())
    x = torch.randn(1, 1, *PATCH)
    assert_close_to_max(mn.fold(model)(x), model(x), tol=tolerance("folded", torch.float32))


def test_methods_have_equal_budgets_and_start_from_equal_weights():
    table = recipes.find_table("hippocampus")
    assert len(table.rows) == 15
    assert len({(row.settings.steps, row.settings.step_batch, repr(row.settings.optimizer)) for row in table.rows}) == 1
    assert {row.micro_batch for row in table.rows} == {1}
    bcn, instance = (recipes.find(f"hippocampus/{row}-fold1").build(seed=0) for row in ("bcn-ws", "in"))
    assert torch.equal(bcn.stem[0].weight, instance.stem[0].weight)


@pytest.mark.parametrize("recipe", recipes.find_table("hippocampus").rows[::3], ids=lambda recipe: recipe.row)
def test_every_norm_is_of_the_method_and_classifiers_and_transposed_convolutions_are_plain(recipe):
    with torch.device("meta"):
        network = recipe.equip(build_network(recipe.network, classes=recipe.classes))
    norms = [module for module in network.modules() if hasattr(module, "weight") and module.weight.ndim == 1]
    assert {type(norm) for norm in norms} == {type(recipe.norm(64, dims=3))}
    plain = {id(module) for module in network.classifiers}
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv3d) and id(m) not in plain]
    assert len(convolutions) == len(norms)
    assert {type(conv) for conv in convolutions} == {nn.Conv3d if recipe.weight is None else mn.nn.WSConv3d}
    assert {type(module) for module in (*network.classifiers, *network.enlarge)} == {nn.Conv3d, nn.ConvTranspose3d}
