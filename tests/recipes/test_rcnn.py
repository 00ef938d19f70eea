"""Tables mask, fast, nuclei and coco128: the networks, how they are trained, and one run from start to export."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn, maskrcnn_resnet50_fpn
from torchvision.ops import FrozenBatchNorm2d

import micronorm as mn
from micronorm import recipes, records
from micronorm.convert.checkpoint import pack_state
from micronorm.engine.optimization import SGD
from micronorm.engine.settings import Execution, Settings
from micronorm.recipes import Recipe
from micronorm.recipes.networks import NETWORKS, build_network
from micronorm.recipes.rcnn import build_rcnn
from micronorm.recipes.results import RunResult, fault
from micronorm.recipes.run import Variation, run_recipe
from micronorm.tasks.detection import detect
from tests.data.miniature import COCO_CATEGORIES, write_coco, write_nuclei
from tests.tasks.detectors import OPTIONS
from tests.tolerances import assert_close_to_max, tolerance

ROWS = [row.name for table in ("mask", "fast", "nuclei", "coco128") for row in recipes.find_table(table).rows]
NORMED = [name for name in ROWS if "frozen" not in name and "plain" not in name]
QUICK = ("mask/rn50-bcn-ws", "fast/rn50-gn-ws", "nuclei/bn", "coco128/bcn-ws")
PLAIN = ["rpn.head.conv.0.0", "rpn.head.cls_logits", "rpn.head.bbox_pred"]
PLAIN_MASK = ["roi_heads.mask_predictor.mask_fcn_logits"]


@cache
def built(name: str) -> Any:
    """Without values: the laws below are about layers."""
    recipe = recipes.find(name)
    with torch.device("meta"):
        return recipe.equip(build_network(recipe.network, classes=recipe.classes))


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NORMED])
def test_norms_follow_every_convolution_but_those_of_rpn_and_predictors(name):
    recipe, network = recipes.find(name), built(name)
    assert recipe.norm is not None
    masks = recipe.task == "instances"
    kind = mn.nn.WSConv2d if recipe.weight else nn.Conv2d
    convolutions = {name: m for name, m in network.named_modules() if isinstance(m, nn.Conv2d)}
    plain = [name for name in convolutions if name in (*PLAIN, *PLAIN_MASK)]
    assert plain == [*PLAIN, *(PLAIN_MASK if masks else [])]
    assert {type(m) for name, m in convolutions.items() if name not in plain} == {kind}
    assert all(type(convolutions[name]) is nn.Conv2d for name in plain)
    norms = [m for m in network.modules() if isinstance(m, type(recipe.norm(64)))]
    assert len(norms) == len(convolutions) - len(plain)
    if not isinstance(recipe.norm, mn.BN):
        assert {m.num_groups for m in norms} == {32}
    assert recipe.classes == network.roi_heads.box_predictor.cls_score.out_features


def test_the_variant_without_norms_in_the_pyramid_has_them_everywhere_else():
    network = built("mask/rn50-bcn-ws-step-plain-fpn")
    plain = {name for name, m in network.named_modules() if type(m) is nn.Conv2d}
    pyramid = {name for name in plain if name.startswith("backbone.fpn.")}
    assert len(pyramid) == 8
    assert plain - pyramid == {*PLAIN, *PLAIN_MASK}
    assert all(getattr(network.get_submodule(name), "bias", None) is not None for name in pyramid)


def test_the_baseline_has_frozen_norms_in_the_backbone_and_none_elsewhere():
    network = built("mask/rn50-frozen-bn")
    norms = [name for name, m in network.named_modules() if isinstance(m, nn.BatchNorm2d | FrozenBatchNorm2d)]
    assert len(norms) == 53
    assert all(name.startswith("backbone.body.") for name in norms)


def test_the_region_head_of_a_norm_over_one_image_sees_all_its_regions():
    network = built("nuclei/bn")
    assert network.backbone.body.bn1.micro_batch == 1
    assert network.roi_heads.box_head[0][1].micro_batch == network.roi_heads.fg_bg_sampler.batch_size_per_image == 256
    network = built("mask/rn50-bcn-ws")
    assert (network.backbone.body.bn1.micro_batch, network.roi_heads.mask_head[0][1].micro_batch) == (1, 512)


@pytest.mark.parametrize(
    "name, batch, lr, steps, drops",
    [
        ("fast/rn50-gn", 8, 0.01, 180_000, (120_000, 160_000)),
        ("fast/rn101-bcn-ws", 4, 0.005, 360_000, (240_000, 320_000)),
        ("mask/rn50-bcn-ws", 8, 0.01, 360_000, (240_000, 320_000)),
        ("mask/rn101-gn-ws", 4, 0.005, 720_000, (480_000, 640_000)),
    ],
)
def test_the_schedule_is_the_framework_s(name, batch, lr, steps, drops):
    settings = recipes.find(name).settings
    assert (settings.step_batch, settings.steps) == (batch, steps)
    assert settings.optimizer == SGD(lr=lr, momentum=0.9, weight_decay=1e-4)
    factor = partial(settings.schedule.factor, steps_per_epoch=1, total_steps=steps)
    assert factor(0) == pytest.approx(1 / 3, abs=0.002)
    assert [factor(500), factor(drops[0] - 1)] == [1, 1]
    assert [factor(drops[0]), factor(drops[1])] == pytest.approx([0.1, 0.01])


def test_the_paper_s_bcn_is_algorithm_1_and_ours_by_step():
    assert {recipes.find(f"{table}/rn50-bcn-ws").norm.statistics for table in ("mask", "fast")} == {"sequential"}
    assert recipes.find("mask/rn50-bcn-ws-step").norm.statistics == "step"


@pytest.mark.parametrize("builder", [fasterrcnn_mobilenet_v3_large_320_fpn, maskrcnn_resnet50_fpn])
def test_heads_of_torchvision_without_norms_stay_as_they_are(builder):
    recipe = recipes.find("nuclei/bcn-ws")
    with torch.device("meta"):
        network = recipe.equip(builder(weights=None, weights_backbone=None, num_classes=3))
    assert any(isinstance(m, mn.nn.BatchChannelNorm) for m in network.backbone.modules())
    assert not any(isinstance(m, mn.nn.WSConv2d) for m in network.roi_heads.modules())


@pytest.mark.parametrize("masks", [False, True])
def test_torchvision_s_call_knows_the_scales_of_the_features_of_a_padded_image(masks):
    model = build_rcnn((1, 1, 1, 1), classes=3, masks=masks, **{**OPTIONS, "size_divisible": 96}).eval()
    image = torch.rand(3, 48, 48)
    with torch.no_grad():
        (found,) = model([image])
        (expected,) = detect(model, [image])
    assert_close_to_max(found["boxes"], expected["boxes"], tol=0)
    assert model.roi_heads.box_roi_pool.scales[0] == 1 / 4


def test_images_keep_their_size_in_the_detector_of_nuclei():
    network = built("nuclei/gn")
    for mode in (True, False):
        images, _ = network.train(mode).transform([torch.zeros(3, 70, 90)])
        assert images.image_sizes == [(70, 90)]
        assert images.tensors.shape == (1, 3, 96, 96)
    assert network.rpn.anchor_generator.sizes == ((8,), (16,), (32,), (64,), (128,))


def test_all_images_of_coco128_have_one_padded_size_so_that_they_share_a_forward():
    transform = built("coco128/bcn-ws").transform
    images = [torch.rand(3, height, width) for height, width in ((240, 320), (320, 213), (100, 320), (320, 320))]
    assert {transform([image])[0].tensors.shape for image in images} == {(1, 3, 512, 512)}


def test_a_run_counts_only_if_it_started_from_the_recipe_s_weights():
    recipe = recipes.find("nuclei/pretrained-bcn-ws")
    settings = {"epochs": None, "step_batch": 8}
    data = {"name": "nuclei", "train": 519, "test": 145}
    result = RunResult(recipe=recipe.name, seed=0, figures={"AP": 1.0}, settings=settings, data=data, where="runs/a")
    assert fault(result, recipe) == "started from initial weights where the recipe starts from tiny_imagenet/bcn-ws"
    other = fault(replace(result, weights="resnet50.pth"), recipe)
    assert other == "started from the weights of resnet50.pth where the recipe starts from tiny_imagenet/bcn-ws"
    assert fault(replace(result, weights="tiny_imagenet/bcn-ws"), recipe) is None
    scratch = recipes.find("nuclei/bcn-ws")
    assert fault(replace(result, recipe=scratch.name), scratch) is None
    assert "weights of a.pth" in str(fault(replace(result, recipe=scratch.name, weights="a.pth"), scratch))


MINIATURE = "maskrcnn-miniature"


@pytest.fixture
def miniature(tmp_path, monkeypatch):
    """A recipe of a small detector on six images, and the folder of these images."""
    write_nuclei(tmp_path / "data" / "dsb2018")
    options = {**OPTIONS, "anchors": (8, 16, 32, 64, 128)}
    monkeypatch.setitem(NETWORKS, MINIATURE, partial(build_rcnn, (1, 1, 1, 1), masks=True, **options))
    settings = Settings(
        steps=4, step_batch=2, optimizer=SGD(0.01), schedule=recipes.find("nuclei/gn").settings.schedule
    )
    recipe = Recipe(
        table="mini",
        row="bcn-ws",
        title="a miniature",
        network=MINIATURE,
        classes=2,
        norm=mn.BCN(),
        weight=mn.WS(),
        data="nuclei",
        settings=settings,
        micro_batch=1,
        task="instances",
        frozen=recipes.find("nuclei/pretrained-bcn-ws").frozen,
    )
    return recipe, tmp_path / "data"


def train(recipe: Recipe, data: Any, out: Any, *, steps: int | None = None, **options: Any) -> Any:
    execution = Execution(device=torch.device("cpu"), steps=steps, micro_batch=options.pop("micro_batch", 2))
    return run_recipe(recipe, out=out, execution=execution, data=data, **options)


def test_a_detector_takes_a_step_and_is_evaluated(miniature):
    recipe, data = miniature
    outcome = train(recipe, data, None, steps=1)
    assert {"AP", "AP50", "mask_AP", "mask_AR100"} <= outcome.figures.keys()


@pytest.mark.slow
def test_objects_of_ones_own_give_the_detector_as_many_outputs_as_there_are_categories(miniature, tmp_path):
    write_coco(tmp_path / "mine", official=False)
    recipe = replace(recipes.find("objects"), network=miniature[0].network)
    out = tmp_path / "run"
    train(recipe, tmp_path / "mine", out, steps=1)
    names = records.read(out).facts["data"]["names"]
    assert names == ["background", *(c["name"] for c in sorted(COCO_CATEGORIES, key=lambda c: c["id"]))]
    loaded: Any = mn.load(out, model=recipe.build(seed=0, classes=len(names)))
    assert loaded.roi_heads.box_predictor.cls_score.out_features == len(names)


def test_a_detector_trains_is_interrupted_and_resumes_to_the_same_bytes(miniature, tmp_path):
    recipe, data = miniature
    whole = train(recipe, data, tmp_path / "whole")
    assert not train(recipe, data, tmp_path / "cut", steps=1).finished
    resumed = train(recipe, data, tmp_path / "cut", resume=True)
    assert resumed.digest == whole.digest
    assert {"AP", "mask_AP50"} <= resumed.figures.keys() == whole.figures.keys()
    record = records.read(tmp_path / "cut")
    assert {"classifier", "mask", "objectness"} <= record.epochs[-1]["train"].keys()
    assert [example["label"] for example in record.predictions] == ["2 nucleus"] * 3


@pytest.mark.slow
def test_the_weights_of_a_detector_do_not_depend_on_the_micro_batch(miniature):
    recipe, data = miniature
    models = []
    for size in (1, 2):
        model = recipe.build(seed=0)
        train(recipe, data, None, micro_batch=size, model=model, variation=Variation(dtype="float64"))
        models.append(model)
    expected = models[0].state_dict()
    for name, value in models[1].state_dict().items():
        assert_close_to_max(value.double(), expected[name].double(), tol=tolerance("fifty_steps", torch.float64))


@pytest.mark.slow
def test_a_trained_detector_folds_and_exports_its_backbone(miniature, tmp_path):
    recipe, data = miniature
    train(recipe, data, tmp_path / "run")
    model: Any = mn.load(tmp_path / "run", model=recipe.build(seed=1)).double()
    image = torch.rand(3, 48, 48, dtype=torch.float64)
    with torch.no_grad():
        features = model.backbone(image[None])
        folded = mn.fold(model.backbone, example_inputs=image[None])
        for name, value in folded(image[None]).items():
            assert_close_to_max(value, features[name], tol=tolerance("folded", torch.float64))
        (expected,) = detect(model, [image])
        model.backbone = folded
        (found,) = detect(model, [image])
    assert torch.equal(found["labels"], expected["labels"])
    assert_close_to_max(found["boxes"], expected["boxes"], tol=tolerance("folded", torch.float64))
    assert not any(isinstance(m, mn.nn.BatchChannelNorm | mn.nn.WSConv2d) for m in folded.modules())


@pytest.mark.slow
def test_a_pretrained_backbone_is_loaded_and_its_stem_frozen_also_after_a_resumption(miniature, tmp_path):
    recipe, data = miniature
    body = recipe.build(seed=7).backbone.body
    for module in body.modules():
        if isinstance(module, mn.nn.BatchChannelNorm):
            module.running_mean.normal_()
    file = tmp_path / "classifier.safetensors"
    fc = {"fc.weight": torch.zeros(5, 2048), "fc.bias": torch.zeros(5)}
    file.write_bytes(pack_state({**body.state_dict(), **fc}, {"model": "recipe:mini/classifier"}))
    start = Variation(weights=str(file))
    train(recipe, data, tmp_path / "run", steps=1, variation=start)
    train(recipe, data, tmp_path / "run", resume=True)
    facts = records.read(tmp_path / "run").facts["weights"]
    assert facts["recipe"] == "mini/classifier"
    assert facts["unused"] == ["backbone.body.fc.bias", "backbone.body.fc.weight"]
    assert len(facts["loaded"]) == len(body.state_dict())
    trained = mn.load(tmp_path / "run", model=recipe.build(seed=1)).backbone.body.state_dict()
    before = body.state_dict()
    same = {name for name in before if torch.equal(before[name], trained[name])}
    frozen = {name for name in before if name.startswith(("conv1", "bn1", "layer1"))}
    assert frozen <= same
    assert "layer2.0.conv1.weight" not in same
