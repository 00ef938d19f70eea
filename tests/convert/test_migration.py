"""What scripts written for BatchNorm do to a converted model, and the line that does it right: docs/migration.md."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import micronorm as mn
from tests.networks import SmallResNet, assert_same_state, samples
from tests.tolerances import assert_close_to_max, tolerance

timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")


def batch_norm_net(*, zero_last: bool = False) -> SmallResNet:
    """A BatchNorm network with an affine and statistics that are not the identity."""
    torch.manual_seed(0)
    net = SmallResNet(norm=mn.BN())
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.3)
            module.running_mean.normal_(std=0.3)
            module.running_var.uniform_(0.5, 2)
    if zero_last:
        nn.init.zeros_(net.block1.norm2.weight)
        nn.init.zeros_(net.block1.norm2.bias)
    return net


def converted(**options) -> nn.Module:
    return mn.convert(batch_norm_net(), mn.BCN(groups=4), **options)


def norms_of(model: nn.Module) -> list[mn.nn.BatchChannelNorm]:
    return [m for m in model.modules() if isinstance(m, mn.nn.BatchChannelNorm)]


def estimates(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items() if "running" in k}


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    x, labels = samples(torch.float32, count=4)
    F.cross_entropy(model(x), labels).backward()
    optimizer.step()


def batches() -> list[tuple[Tensor, Tensor]]:
    x, labels = samples(torch.float32)
    return list(zip(x.split(6), labels.split(6), strict=True))


# --- weight decay ----------------------------------------------------------------------------------------------------

NORM_CLASSES = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)


def norm_parameters_by_class(model: nn.Module, classes: tuple[type[nn.Module], ...]) -> set[Tensor]:
    """As set_weight_decay of torchvision's references/classification finds them."""
    return {p for m in model.modules() if isinstance(m, classes) for p in m.parameters(recurse=False)}


def test_weight_decay_by_class_misses_our_norms_and_by_dimension_finds_them():
    model = mn.convert(torchvision.models.resnet18())
    ours = {p for norm in norms_of(model) for p in norm.parameters()}
    assert norm_parameters_by_class(model, NORM_CLASSES) == set()
    assert norm_parameters_by_class(model, (*NORM_CLASSES, mn.nn.BatchChannelNorm)) == ours
    assert {p for p in model.parameters() if p.ndim <= 1} == ours | {model.fc.bias}
    assert len(ours) == 4 * 20  # group_weight and group_bias among them


def test_torchvisions_split_misses_our_norms_unless_told_and_those_with_activation_even_then():
    from torchvision.ops._utils import split_normalization_params as split

    model = mn.convert(torchvision.models.resnet18())
    assert len(split(model)[0]) == 0
    assert len(split(model, [mn.nn.BatchChannelNorm])[0]) == 80
    with_activation = mn.convert(timm.create_model("mobilenetv2_100"))
    assert len(norms_of(with_activation)) == 52
    assert len(split(with_activation, [mn.nn.BatchChannelNorm])[0]) == 0  # it takes them for containers


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2_100"])
def test_timms_weight_decay_groups_find_all_of_our_norms(name):
    from timm.optim import param_groups_weight_decay

    model = mn.convert(timm.create_model(name))
    free, decayed = (set(group["params"]) for group in param_groups_weight_decay(model, weight_decay=1e-4))
    assert all(p in free for norm in norms_of(model) for p in norm.parameters())
    assert all(p.ndim == 4 or p is model.get_classifier().weight for p in decayed)


def test_the_rate_is_the_learning_rate_of_the_group_that_holds_the_weight():
    model = converted()
    flat = [p for p in model.parameters() if p.ndim <= 1]
    rest = [p for p in model.parameters() if p.ndim > 1]
    optimizer = torch.optim.SGD([{"params": flat, "lr": 0.0}, {"params": rest, "lr": 0.1}])
    before = estimates(model)
    take_step(model, optimizer)
    assert_same_state(estimates(model), before, tol=0)


# --- freezing --------------------------------------------------------------------------------------------------------


def test_freezing_by_class_freezes_nothing():
    model = converted()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    timm.layers.freeze_batch_norm_2d(model)
    before = estimates(model)
    take_step(model)
    assert all(not torch.equal(v, before[k]) for k, v in estimates(model).items())


@pytest.mark.parametrize("how", ["requires_grad", "eval"])
def test_a_frozen_layer_gathers_nothing_and_keeps_its_estimates(how):
    model = converted()
    for norm in norms_of(model):
        norm.requires_grad_(False) if how == "requires_grad" else norm.eval()
    before = copy.deepcopy(model.state_dict())
    handle = mn.attach(model)
    x, _ = samples(torch.float32, count=4)
    model(x)
    assert {row.elements for row in handle.report()} == {0}
    take_step(model)
    after = model.state_dict()
    moved = {k for k in after if not torch.equal(after[k], before[k])}
    norm_parameters = {
        f"{n}.{k}" for n, m in model.named_modules() if m in norms_of(model) for k, _ in m.named_parameters()
    }
    assert not any("running" in k for k in moved)
    # eval leaves the affine to the optimizer, as it does in a BatchNorm
    assert (moved & norm_parameters == set()) == (how == "requires_grad")


def test_train_undoes_eval_but_not_requires_grad():
    model = converted()
    model.norm.requires_grad_(False)
    model.down_norm.eval()
    model.train()
    before = estimates(model)
    take_step(model)
    after = estimates(model)
    assert torch.equal(after["norm.running_mean"], before["norm.running_mean"])
    assert not torch.equal(after["down_norm.running_mean"], before["down_norm.running_mean"])


def test_a_frozen_batch_norm_stays_frozen_in_conversion_and_each_parameter_keeps_its_flag():
    net = batch_norm_net()
    net.norm.requires_grad_(False)
    net.down_norm.bias.requires_grad_(False)
    net.down_norm.eval()
    model = mn.convert(net)
    assert not any(p.requires_grad for p in model.norm.parameters())
    flags = {name: p.requires_grad for name, p in model.down_norm.named_parameters()}
    assert flags == {"weight": True, "bias": False, "group_weight": True, "group_bias": True}
    assert not model.down_norm.training
    assert model.norm.training


def test_the_activation_of_a_frozen_norm_keeps_its_own_flag():
    norm = timm.layers.BatchNormAct2d(16, act_layer=nn.PReLU)
    norm.weight.requires_grad_(False)
    model = mn.convert(nn.Sequential(nn.Conv2d(3, 16, 3), norm))
    assert model[1].act.weight.requires_grad
    assert not model[1].group_weight.requires_grad


# --- statistics ------------------------------------------------------------------------------------------------------


def test_update_bn_changes_nothing_and_calibrate_sets_every_estimate():
    model = converted()
    before = estimates(model)
    update_bn(batches(), model)
    assert_same_state(estimates(model), before, tol=0)
    assert mn.calibrate(model, batches()) == 4
    seen = []
    model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    for x, _ in batches():
        model(x)
    everything = torch.cat(seen).double()
    tol = tolerance("output", torch.float32)
    assert_close_to_max(model.norm.running_mean, everything.mean((0, 2, 3)), tol=tol)
    assert_close_to_max(model.norm.running_var, everything.var((0, 2, 3), correction=0), tol=tol)


@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_averaged_model_takes_the_estimates_and_steps_of_the_original_do_not_move_them(use_buffers):
    model = converted()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=use_buffers)
    average.update_parameters(model)  # the first is a copy
    before = estimates(model)
    take_step(model)
    assert_same_state(estimates(average.module), before, tol=0)
    average.update_parameters(model)
    now = estimates(model)
    expected = {k: (before[k] + now[k]) / 2 for k in now} if use_buffers else now
    assert_same_state(estimates(average.module), expected, tol=tolerance("output", torch.float32))


@pytest.mark.parametrize("warm_steps", [0, 4])
def test_timms_moving_average_averages_the_estimates_and_the_warm_start(warm_steps):
    model = converted(warm_steps=warm_steps)
    ema = timm.utils.ModelEmaV3(model, decay=0.5)
    before = copy.deepcopy(model.state_dict())
    take_step(model)
    ema.update(model)
    now, averaged = model.state_dict(), ema.module.state_dict()
    expected = {k: (before[k] + now[k]) / 2 if now[k].is_floating_point() else now[k] for k in now}
    assert_same_state(averaged, expected, tol=tolerance("output", torch.float32))
    if warm_steps:
        assert ema.module.norm.blend == 0.125


def test_an_averaged_model_left_in_training_mode_says_so_after_its_guard():
    average = AveragedModel(converted())
    mn.attach(average, max_forwards=2)
    x, _ = samples(torch.float32, count=2)
    average(x)
    average(x)
    with pytest.raises(RuntimeError, match=r"mn\.attach"):
        average(x)
    average.eval()
    for _ in range(4):
        average(x)


def test_sync_batch_norm_conversion_leaves_our_layers_alone_and_its_layers_convert():
    model = converted()
    types = [type(m) for m in model.modules()]
    assert nn.SyncBatchNorm.convert_sync_batchnorm(model) is model
    assert [type(m) for m in model.modules()] == types
    synced = mn.convert(nn.SyncBatchNorm.convert_sync_batchnorm(batch_norm_net()), mn.BCN(groups=4))
    assert_same_state(synced.state_dict(), model.state_dict(), tol=0)


def test_momentum_is_not_carried_and_the_rate_takes_its_place():
    net = batch_norm_net()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.01
    model = mn.convert(net)
    assert {norm.rate for norm in norms_of(model)} == {"lr"}
    assert not hasattr(model.norm, "momentum")
    for norm in norms_of(model):
        norm.rate = 0.25
    x, _ = samples(torch.float32, count=4)
    with torch.no_grad():
        seen = model.stem(x)
    expected = model.norm.running_mean + 0.25 * (seen.mean((0, 2, 3)) - model.norm.running_mean)
    take_step(model, torch.optim.SGD(model.parameters(), lr=0.01))
    assert_close_to_max(model.norm.running_mean, expected, tol=tolerance("gradient", torch.float32))
    assert {norm.rate for norm in norms_of(mn.convert(batch_norm_net(), mn.BCN(rate=0.01)))} == {0.01}


def test_a_batch_norm_that_kept_no_statistics_gets_estimates():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False))
    plan = mn.plan(net)
    assert "no statistics to carry" in plan.decisions[1].reason
    model = plan.apply()
    assert torch.equal(model[1].running_var, torch.ones(8))
    assert mn.calibrate(model, batches()) == 4
    assert not torch.equal(model[1].running_var, torch.ones(8))


def test_a_warm_start_without_statistics_to_start_from_is_named_in_the_plan():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    plan = mn.plan(net, warm_steps=3)
    reasons = {d.name: d.reason for d in plan.decisions}
    assert "no warm start" in reasons["1"]
    assert "no warm start" not in reasons["3"]
    model = plan.apply()
    assert (model[1].blend, model[3].blend) == (1, 0)


# --- initialization --------------------------------------------------------------------------------------------------


def gradient_of_the_branch(model: nn.Module) -> float:
    """How hard the first step pulls on the norm at the end of block1."""
    x, labels = samples(torch.float32)
    F.cross_entropy(model(x), labels).backward()
    return max(p.grad.abs().max().item() for p in model.block1.norm2.parameters())


def test_a_zeroed_group_weight_starts_a_branch_at_zero_with_gradients_of_a_batch_norms_size():
    reference = batch_norm_net(zero_last=True)
    plain = gradient_of_the_branch(reference)
    by_convert = mn.convert(batch_norm_net(zero_last=True), mn.BCN(groups=4), weight=None)
    last = by_convert.block1.norm2
    assert (last.weight == 1).all()
    assert not last.group_weight.any()
    by_hand, wrong = (mn.convert(batch_norm_net(), mn.BCN(groups=4), weight=None) for _ in range(2))
    nn.init.zeros_(by_hand.block1.norm2.group_weight)
    nn.init.zeros_(by_hand.block1.norm2.group_bias)
    nn.init.zeros_(wrong.block1.norm2.weight)  # what an init function written for BatchNorm does
    nn.init.zeros_(wrong.block1.norm2.bias)
    assert gradient_of_the_branch(by_convert) < 10 * plain
    assert gradient_of_the_branch(by_hand) < 10 * plain
    assert gradient_of_the_branch(wrong) > 50 * plain


@pytest.mark.parametrize(
    "build",
    [
        lambda **norm: timm.create_model("resnet18", num_classes=4, **norm),
        lambda **norm: torchvision.models.resnet18(num_classes=4, zero_init_residual=True, **norm),
    ],
    ids=["timm", "torchvision"],
)
def test_networks_that_zero_their_last_norms_are_right_when_converted_and_mended_when_built_with_ours(build):
    model = mn.convert(build())
    assert all(norm.weight.all() for norm in norms_of(model))
    assert sum(not norm.group_weight.any() for norm in norms_of(model)) == 8
    model = build(norm_layer=mn.nn.BatchChannelNorm)
    assert sum(not norm.weight.any() for norm in norms_of(model)) == 8
    for norm in norms_of(model):
        if not norm.weight.any():
            nn.init.ones_(norm.weight)
            nn.init.zeros_(norm.group_weight)
    assert sum(not norm.group_weight.any() for norm in norms_of(model)) == 8


# --- gradient accumulation -------------------------------------------------------------------------------------------


def accumulated(cut: list[int], *, by: str) -> dict[str, Tensor]:
    model = converted().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, labels = samples(torch.float64, count=8)
    for xs, ys in zip(x.split(cut), labels.split(cut), strict=True):
        if by == "mean":
            (F.cross_entropy(model(xs), ys) / len(cut)).backward()
        else:
            (F.cross_entropy(model(xs), ys, reduction="sum") / len(x)).backward()
    optimizer.step()
    return model.state_dict()


def test_a_mean_over_micro_batches_weighs_samples_by_their_cut_and_a_sum_does_not():
    tol = tolerance("one_step", torch.float64)
    whole = accumulated([8], by="sum")
    assert_same_state(accumulated([8], by="mean"), whole, tol=tol)
    assert_same_state(accumulated([4, 4], by="mean"), whole, tol=tol)
    assert_same_state(accumulated([5, 3], by="sum"), whole, tol=tol)
    with pytest.raises(AssertionError, match="relative error"):
        assert_same_state(accumulated([5, 3], by="mean"), whole, tol=1e-3)


# --- wrappers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap, message",
    [(nn.DataParallel, "DataParallel: convert first"), (torch.compile, "OptimizedModule: convert first")],
    ids=["DataParallel", "compile"],
)
def test_a_wrapped_model_is_refused_with_the_order_that_works(wrap, message):
    with pytest.raises(ValueError, match=message):
        mn.convert(wrap(batch_norm_net()))


def test_a_converted_model_compiles_and_commits_as_before():
    torch.manual_seed(0)
    plain = mn.convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(1))).double()
    compiled = copy.deepcopy(plain)
    for model, run in ((plain, plain), (compiled, torch.compile(compiled, backend="eager"))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, _ = samples(torch.float64, count=4)
        run(x).square().mean().backward()
        optimizer.step()
    assert compiled[1].running_mean.any()
    assert_same_state(compiled.state_dict(), plain.state_dict(), tol=tolerance("one_step", torch.float64))


def test_a_converted_model_is_wrapped_in_ddp_and_a_wrapped_one_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="DistributedDataParallel: convert first"):
            mn.convert(nn.parallel.DistributedDataParallel(batch_norm_net()))
        model = converted()
        before = estimates(model)
        take_step(nn.parallel.DistributedDataParallel(model))
        assert all(not torch.equal(v, before[k]) for k, v in estimates(model).items())
    finally:
        dist.destroy_process_group()


# --- checkpoints and optimizers --------------------------------------------------------------------------------------


def test_a_batch_norm_checkpoint_loads_before_and_after_a_plain_conversion_alike():
    state = batch_norm_net().state_dict()
    torch.manual_seed(1)
    first, second = SmallResNet(norm=mn.BN()), SmallResNet(norm=mn.BN())
    first.load_state_dict(state)
    before = mn.convert(first, mn.BCN(groups=4))
    after = mn.convert(second, mn.BCN(groups=4))
    assert after.load_state_dict(state) == ([], [])
    assert_same_state(after.state_dict(), before.state_dict(), tol=0)


def test_a_batch_norm_checkpoint_does_not_load_after_a_warm_conversion():
    state = batch_norm_net().state_dict()
    missing = pytest.raises(RuntimeError, match=r"Missing key.*absorbed_mean")
    with missing, pytest.warns(UserWarning, match="load the weights first"):
        converted(warm_steps=5).load_state_dict(state)


def test_a_zeroed_batch_norm_loaded_after_conversion_is_not_mended():
    state = batch_norm_net(zero_last=True).state_dict()
    model = converted()
    with pytest.warns(UserWarning, match="zero"):
        model.load_state_dict(state)
    assert not model.block1.norm2.weight.any()
    assert model.block1.norm2.group_weight.all()


@pytest.mark.parametrize("options", [{}, {"warm_steps": 5}, {"absorb": True}], ids=str)
def test_a_converted_checkpoint_loads_into_a_model_converted_alike_and_into_no_other(options):
    trained, fresh = converted(**options), mn.convert(SmallResNet(norm=mn.BN()), mn.BCN(groups=4), **options)
    take_step(trained)
    assert fresh.load_state_dict(trained.state_dict()) == ([], [])
    assert_same_state(fresh.state_dict(), trained.state_dict(), tol=0)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*group_weight"):
        batch_norm_net().load_state_dict(trained.state_dict())


def test_an_optimizer_made_before_conversion_commits_but_lacks_the_new_parameters():
    net = batch_norm_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = mn.convert(net)
    held = {p for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in model.named_parameters() if p not in held]
    assert missing == [n for n, _ in model.named_parameters() if "group_" in n]
    before = estimates(model)
    with pytest.warns(UserWarning, match="no optimizer holds group_weight and group_bias"):
        take_step(model, optimizer)
    assert all(not torch.equal(v, before[k]) for k, v in estimates(model).items())
    assert all((norm.group_weight == 1).all() for norm in norms_of(model))
    optimizer.add_param_group({"params": [p for p in model.parameters() if p not in held]})
    optimizer.zero_grad()
    take_step(model, optimizer)
    assert not any((norm.group_weight == 1).all() for norm in norms_of(model))


def test_an_optimizer_made_before_conversion_does_not_hold_the_weight_of_a_norm_that_was_zero():
    net = batch_norm_net(zero_last=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = mn.convert(net)
    before = estimates(model)
    with pytest.warns(UserWarning, match="no optimizer holds group_weight and group_bias"):
        take_step(model, optimizer)
    still = {name for name, value in estimates(model).items() if torch.equal(value, before[name])}
    assert still == {"block1.norm2.running_mean", "block1.norm2.running_var"}
    held = {p for group in optimizer.param_groups for p in group["params"]}
    optimizer.add_param_group({"params": [p for p in model.parameters() if p not in held]})
    take_step(model, optimizer)
    assert all(not torch.equal(value, before[name]) for name, value in estimates(model).items())
