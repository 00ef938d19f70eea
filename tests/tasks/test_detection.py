"""Detection: what an image contributes depends on the image alone, and equals torchvision's loss of that image."""

import copy
from typing import Any, cast

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torchvision.models.detection.keypoint_rcnn import KeypointRCNNHeads, KeypointRCNNPredictor
from torchvision.ops import MultiScaleRoIAlign

import micronorm as mn
from micronorm.engine.dropout import key_dropout
from micronorm.ops.keyed import sample_keys
from micronorm.tasks.detection import Detection
from micronorm.tasks.rcnn_losses import KeyedSampler, detect, detection_losses
from tests.laws.ranks import launch
from tests.networks import assert_same_state
from tests.tasks.detectors import cut, scenes, small_detector
from tests.tolerances import assert_close_to_max, tolerance

DOUBLE = torch.float64
TOLERANCE = tolerance("one_step", DOUBLE)
TERMS = {"loss_classifier", "loss_box_reg", "loss_mask", "loss_objectness", "loss_rpn_box_reg"}


def gradients(model: Any, parts: list[slice], dtype: torch.dtype = DOUBLE) -> dict[str, torch.Tensor]:
    """Return the gradients of the sum of losses over a batch that is cut into these parts."""
    batch = scenes(dtype)
    model.zero_grad()
    for part in parts:
        torch.stack(list(detection_losses(model, *cut(batch, part)).values())).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("norm, weight", [(mn.BCN(), mn.WS()), (mn.GN(), None)], ids=["BCN+WS", "GN"])
def test_gradients_do_not_depend_on_how_images_were_cut(norm, weight):
    model = small_detector(norm, weight).double()
    whole = gradients(model, [slice(0, 4)])
    assert_same_state(gradients(model, [slice(0, 1), slice(1, 4)]), whole, tol=TOLERANCE)
    assert all(bool(gradient.any()) for gradient in whole.values())


def interleaved(dtype: torch.dtype) -> tuple[Any, ...]:
    """Return four images of two padded sizes in turn: small, large, small, large."""
    images, targets, keys = scenes(dtype)
    return [*images[:2], *(image.flip(-1) for image in images[:2])], targets[:2] * 2, keys


def test_images_keep_their_order_so_that_algorithm_1_does_not_depend_on_the_cut():
    batch, states = interleaved(DOUBLE), []
    for size in (4, 2, 1):
        model = small_detector(mn.BCN(statistics="sequential", rate=0.5), mn.WS()).double()
        for k in range(0, 4, size):
            detection_losses(model, *cut(batch, slice(k, k + size)))
        states.append({name: value for name, value in model.named_buffers() if "running" in name})
    for other in states[1:]:
        assert_same_state(other, states[0], tol=TOLERANCE)


def test_dropout_in_backbone_and_heads_is_keyed_by_image():
    batch, found = interleaved(DOUBLE), []
    for size in (4, 2, 1):
        model = small_detector(mn.GN()).double()
        model.backbone.body.relu = torch.nn.Sequential(model.backbone.body.relu, torch.nn.Dropout2d(0.5))
        model.roi_heads.box_head = torch.nn.Sequential(model.roi_heads.box_head, torch.nn.Dropout(0.5))
        assert not key_dropout(model)
        losses = [detection_losses(model, *cut(batch, slice(k, k + size))) for k in range(0, 4, size)]
        found.append({name: sum(part[name] for part in losses) for name in TERMS})
    for other in found[1:]:
        assert_same_state(other, found[0], tol=TOLERANCE)


def test_a_keypoint_rcnn_in_float64_does_not_depend_on_the_cut():
    model = small_detector(mn.BCN(), mn.WS(), masks=False)
    model.roi_heads.keypoint_roi_pool = MultiScaleRoIAlign(["0", "1", "2", "3"], output_size=14, sampling_ratio=2)
    model.roi_heads.keypoint_head = KeypointRCNNHeads(16, (16,))
    model.roi_heads.keypoint_predictor = KeypointRCNNPredictor(16, num_keypoints=3)
    images, targets, keys = scenes(DOUBLE)
    for target in targets:
        middle = (target["boxes"][:, :2] + target["boxes"][:, 2:]) / 2
        points = middle[:, None] + torch.tensor([-1.0, 0.0, 1.0])[:, None]  # K×3×2
        target["keypoints"] = torch.cat([points, torch.ones_like(points[..., :1])], 2)
    short = {**targets[0], "keypoints": targets[0]["keypoints"][:1]}
    with pytest.raises(
        ValueError, match=r"shape \(2, 3, 3\); those of target 0 are torch.float64 of shape \(1, 3, 3\)"
    ):
        detection_losses(model, images[:1], [short], keys[:1])
    whole, *parts = (
        detection_losses(model.double(), *cut((images, targets, keys), part))
        for part in (slice(0, 4), slice(0, 1), slice(1, 4))
    )
    assert whole["loss_keypoint"].item() > 0
    for name, value in whole.items():
        assert_close_to_max(sum(part[name] for part in parts), value, tol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("norm, weight", [(mn.BCN(), mn.WS()), (mn.GN(), mn.WS())], ids=["BCN+WS", "GN+WS"])
def test_a_step_of_a_mask_rcnn_passes_check_cuts(norm, weight):
    def loss(model, part):
        return torch.stack(list(detection_losses(model, *part).values())).sum(), len(part[0])

    report = mn.check_cuts(small_detector(norm, weight), scenes(), loss)
    assert report.ok, report
    assert report.worst <= TOLERANCE


def test_the_sum_is_that_of_torchvision_s_losses_of_each_image_alone(monkeypatch):
    model, batch = small_detector(mn.BCN(), mn.WS()).double(), scenes(DOUBLE)
    expected = dict.fromkeys(TERMS, torch.zeros((), dtype=DOUBLE))
    for k in range(4):
        images, targets, key = cut(batch, slice(k, k + 1))
        for part, stream in ((model.rpn, b"anchor"), (model.roi_heads, b"region")):
            sampler = KeyedSampler(part.fg_bg_sampler, key, int.from_bytes(stream, "big"))
            monkeypatch.setattr(part, "fg_bg_sampler", sampler)
        alone = model(images, targets)
        expected = {name: expected[name] + alone[name] for name in TERMS}
        monkeypatch.undo()
    losses = detection_losses(model, *batch)
    assert losses.keys() == TERMS
    for name, value in losses.items():
        # torchvision computes the loss of objectness in float32
        dtype = torch.float32 if name == "loss_objectness" else DOUBLE
        assert_close_to_max(value, expected[name].double(), tol=tolerance("one_step", dtype))


def test_torchvision_s_padding_lets_an_image_change_the_features_of_its_neighbour():
    model, (images, _, _) = small_detector(mn.GN()).double(), scenes(DOUBLE)
    with torch.no_grad():
        alone, together = (model.backbone(model.transform(some)[0].tensors) for some in (images[:1], images))
    finest, other = alone["0"], together["0"][:1, :, : alone["0"].shape[2], : alone["0"].shape[3]]
    assert (finest - other).abs().max() > 0.01 * finest.abs().max()


def test_an_image_without_objects_trains_every_part_that_sees_it():
    model = small_detector(mn.BCN(), mn.WS())
    losses = detection_losses(model, *cut(scenes(), slice(2, 3)))
    assert losses["loss_mask"].item() == losses["loss_box_reg"].item() == losses["loss_rpn_box_reg"].item() == 0
    torch.stack(list(losses.values())).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())  # DDP would wait for them
    assert model.roi_heads.box_head[0][0].weight.grad.any()
    assert not model.roi_heads.mask_head[0][0].weight.grad.any()


def test_what_is_sampled_depends_on_the_key_and_on_nothing_else():
    model, batch = small_detector(mn.GN()).double(), scenes(DOUBLE)
    before = torch.get_rng_state()
    first = detection_losses(model, *batch)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    again = detection_losses(model, *batch)
    assert all(torch.equal(first[name], again[name]) for name in TERMS)
    other = detection_losses(model, *batch[:2], sample_keys(torch.arange(4), seed=0, epoch=1))
    assert not torch.equal(first["loss_objectness"], other["loss_objectness"])
    assert not torch.equal(first["loss_classifier"], other["loss_classifier"])


def test_the_size_of_an_image_is_drawn_from_its_key():
    model, batch = small_detector(mn.GN()).double(), scenes(DOUBLE)
    model.transform.min_size = (32, 48, 64)
    whole = detection_losses(model, *batch)
    parts = [detection_losses(model, *cut(batch, slice(k, k + 1))) for k in range(4)]
    for name, value in whole.items():
        assert_close_to_max(sum(part[name] for part in parts), value, tol=TOLERANCE)
    assert "torch_choice" not in vars(model.transform)


def test_the_scales_of_the_features_do_not_depend_on_the_image_that_comes_first():
    (square, *_), (target, *_), _ = scenes()
    batch = [square, torch.cat([square, square], 1)[:, :80, :40]]
    targets = [target, {**target, "boxes": target["boxes"] / 2, "masks": torch.zeros(2, 80, 40)}]
    key, found = torch.tensor([3]), []
    for order in ((0, 1), (1, 0)):
        model, trained = small_detector(mn.GN()), small_detector(mn.GN()).eval()
        for pool in (model.roi_heads.box_roi_pool, model.roi_heads.mask_roi_pool, trained.roi_heads.box_roi_pool):
            pool.scales = None  # as in a model that torchvision has built
        model.transform.size_divisible = trained.transform.size_divisible = 96  # twice the height of the first image
        losses = {k: detection_losses(model, [batch[k]], [targets[k]], key) for k in order}
        boxes = {k: detect(trained, [batch[k]])[0] for k in order}
        found.append([{**losses[k], **boxes[k]} for k in (0, 1)])
        assert model.roi_heads.mask_roi_pool.scales == [1 / 4, 1 / 8, 1 / 16, 1 / 32]
    for one, other in zip(*found, strict=True):
        assert_same_state(one, other, tol=0)


def test_sampling_takes_the_wanted_share_and_fills_up_with_negatives():
    class Like:
        batch_size_per_image, positive_fraction = 8, 0.25

    labels = torch.tensor([1, 3, 2, 1, -1, *[0] * 20])
    (positive,), (negative,) = KeyedSampler(Like(), torch.tensor([5]), 0)([labels])
    assert (positive.sum().item(), negative.sum().item()) == (2, 6)
    assert (labels[positive] > 0).all()
    assert (labels[negative] == 0).all()
    (positive,), (negative,) = KeyedSampler(Like(), torch.tensor([5]), 0)([torch.tensor([1, 0, 0])])
    assert (positive.tolist(), negative.tolist()) == ([True, False, False], [False, True, True])
    taken = torch.stack([KeyedSampler(Like(), torch.tensor([k]), 0)([labels])[1][0] for k in range(400)])
    share = taken[:, 5:].double().mean(0)  # 6 of 20 each; the deviation of 400 draws is 0.023
    assert (share - 0.3).abs().max() < 5 * 0.023


def test_boxes_stay_in_float32_under_autocast():
    model, batch = small_detector(mn.GN()), scenes()
    seen = []
    hooks = [
        model.rpn.register_forward_hook(lambda m, i, output: seen.append(output[0][0].dtype)),
        model.roi_heads.register_forward_hook(lambda m, i, output: seen.extend(v.dtype for v in output[1].values())),
    ]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = detection_losses(model, *batch)
        found = detect(model.eval(), batch[0][:1])
    for hook in hooks:
        hook.remove()
    assert set(seen) == {torch.float32}
    assert found[0]["boxes"].dtype == torch.float32
    assert all(bool(value.isfinite()) for value in losses.values())
    assert not model.rpn.head._forward_hooks


def test_the_model_is_as_before_afterwards():
    model = small_detector(mn.GN())
    samplers = model.rpn.fg_bg_sampler, model.roi_heads.fg_bg_sampler

    def fail(module, inputs):
        raise RuntimeError("failed in the mask head")

    model.roi_heads.mask_head.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="failed in the mask head"):
        detection_losses(model, *scenes())
    assert (model.rpn.fg_bg_sampler, model.roi_heads.fg_bg_sampler) == samplers
    assert "forward" not in vars(model)
    assert not model.backbone._forward_hooks


def test_wrong_arguments_are_named():
    model = small_detector(mn.GN())
    images, targets, keys = scenes()
    with pytest.raises(TypeError, match=r"keys must be the tensor that sample_keys\(.*got list"):
        detection_losses(model, images, targets, cast(Any, [0, 1, 2, 3]))
    with pytest.raises(ValueError, match="got 4 images, 4 targets and 3 keys"):
        detection_losses(model, images, targets, keys[:3])
    with pytest.raises(ValueError, match=r"needs boxes, labels, masks; target 1 has only \['boxes'\]"):
        detection_losses(model, images, [targets[0], {"boxes": targets[1]["boxes"]}, *targets[2:]], keys)
    for box in ([5.0, 5.0, 5.0, 9.0], [float("nan")] * 4):
        bad = [{**targets[0], "boxes": torch.tensor([[1.0, 1.0, 2.0, 2.0], box])}, *targets[1:]]
        with pytest.raises(ValueError, match="x1 < x2 and y1 < y2, target 0 has"):
            detection_losses(model, images, bad, keys)
    with pytest.raises(ValueError, match="K×4, those of target 0 have"):
        detection_losses(model, images[:1], [{**targets[0], "boxes": torch.zeros(4)}], keys[:1])
    with pytest.raises(ValueError, match=r"at least 1 .*; target 0 has \[0, 1\] for 2 boxes"):
        detection_losses(model, images, [{**targets[0], "labels": torch.tensor([0, 1])}, *targets[1:]], keys)
    with pytest.raises(TypeError, match=r"returns, got torch\.float32"):
        detection_losses(model, images, targets, keys.float())
    with pytest.raises(ValueError, match="eval mode"):
        detection_losses(model.eval(), images, targets, keys)
    with pytest.raises(TypeError, match="R-CNN of torchvision, got Linear"):
        detection_losses(torch.nn.Linear(2, 2), images, targets, keys)


@pytest.mark.parametrize(
    "name, value, error, message",
    [
        ("masks", torch.ones(1, 48, 48), ValueError, r"\(2, 48, 48\); those of target 0 have shape \(1, 48, 48\)"),
        ("masks", torch.ones(2, 10, 10), ValueError, r"\(2, 48, 48\); those of target 0 have shape \(2, 10, 10\)"),
        ("masks", 255 * torch.ones(2, 48, 48), ValueError, "masks must be 0 or 1, those of target 0 reach 255"),
        ("labels", torch.tensor([1, 7]), ValueError, r"number of classes, 3; target 0 has \[1, 7\]"),
        ("labels", torch.tensor([1, 2], dtype=torch.int32), TypeError, r"target 0 are torch.int32; use labels.long"),
        ("boxes", [[1.0, 1.0, 2.0, 2.0]], TypeError, "boxes must be a tensor, target 0 has a list"),
    ],
)
def test_a_wrong_part_of_a_target_is_named(name, value, error, message):
    images, targets, keys = scenes()
    with pytest.raises(error, match=message):
        detection_losses(small_detector(mn.GN()), images, [{**targets[0], name: value}, *targets[1:]], keys)


def test_a_pool_of_one_s_own_is_left_alone():
    model = small_detector(mn.GN(), masks=False)
    pool = model.roi_heads.box_roi_pool
    model.roi_heads.box_roi_pool = Wrapped(pool)
    images, targets, keys = scenes()
    assert detection_losses(model, images, targets, keys)["loss_classifier"] > 0


class Wrapped(torch.nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.inner = pool

    def forward(self, *inputs):
        return self.inner(*inputs)


def step_on_rank(rank: int, world: int, model: Any) -> dict[str, torch.Tensor]:
    """Take a step with DDP; each rank has its share of the four images."""
    network = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)
    batch = cut(scenes(DOUBLE), slice(0, 1) if rank == 0 else slice(1, 4))
    losses = detection_losses(network, *batch)
    (torch.stack(list(losses.values())).sum() * world / 4).backward()  # DDP averages over ranks
    optimizer.step()
    return model.state_dict()


@pytest.mark.slow
def test_a_step_on_two_ranks_with_ddp_is_that_of_one_process():
    model = small_detector(mn.BCN(), mn.WS()).double()
    expected = copy.deepcopy(model)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.02, momentum=0.9)
    (torch.stack(list(detection_losses(expected, *scenes(DOUBLE)).values())).sum() / 4).backward()
    optimizer.step()
    for state in launch(step_on_rank, 2, model):
        assert_same_state(state, expected.state_dict(), tol=TOLERANCE)


class Few:
    """The samples of `scenes`."""

    def __len__(self):
        return 4

    def load(self, shares, *, seed):
        images, targets, keys = scenes()
        for _, indices in shares:
            some = indices.tolist()
            yield [images[k] for k in some], [targets[k] for k in some], keys[indices]


def test_the_task_counts_images_and_records_the_terms():
    task = Detection(Few(), Few(), names=("background", "disc", "square"), masks=True)
    loss = task.loss(small_detector(mn.GN()), scenes())
    assert loss.count == 4
    assert loss.counts.keys() == {name.removeprefix("loss_") for name in TERMS}
    assert sum(value.item() for value in loss.counts.values()) == pytest.approx(loss.sum.item(), rel=1e-6)
    assert task.figures({"loss": 8.0, "mask": 2.0, "count": 4}) == {"loss": 2.0, "mask": 0.5}


def test_examples_show_truth_and_answer():
    task = Detection(Few(), Few(), names=("background", "disc", "square"), masks=True)
    model = small_detector(mn.GN())
    found = task.examples(model, count=2)
    assert [example["label"] for example in found] == [task._describe(scenes()[1][k]["labels"]) for k in (0, 3)]
    assert found[0]["note"].endswith("2 are there")
    assert {"image", "truth", "answer", "prediction", "probability"} <= found[0].keys()
    assert model.training
