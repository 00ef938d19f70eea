"""A run that was killed, wherever and however often, ends as if it had not been."""

import errno
import math
import os
import signal
import time
from itertools import count
from pathlib import Path

import pytest
import torch

import micronorm as mn
from micronorm import records
from micronorm.commit.snapshot import RandomState
from micronorm.data.samples import MemorySamples
from micronorm.engine import journal, loop
from micronorm.engine.checkpoint import CheckpointError, checkpoints, load_run_state, newest, run_state
from micronorm.engine.optimization import SGD, AdamW
from micronorm.engine.parallel import OneRank
from tests.engine.tasks import Toy, make_step
from tests.engine.tiny import STEPS, Heard, Noise, contents, run, tiny_model
from tests.networks import SmallResNet
from tests.processes import finish, start


class Killed(BaseException):
    """A kill at a chosen place, as far as files are concerned."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> records.Record:
    """The record of a run that nothing happened to."""
    out = tmp_path_factory.mktemp("reference")
    run(out)
    return records.read(out)


def without_times(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]


def assert_as_if_nothing_had_happened(out: Path, reference: records.Record) -> None:
    record = records.read(out)
    assert record.outcome == reference.outcome
    assert without_times(record.steps) == without_times(reference.steps)
    assert [row["step"] for row in record.steps] == list(range(1, STEPS + 1))
    assert without_times(record.epochs) == without_times(reference.epochs)
    assert (out / journal.WEIGHTS).read_bytes() == (reference.path / journal.WEIGHTS).read_bytes()
    assert not list(out.rglob(f"*{records.PARTIAL}"))


def kill_at(step: int, out: Path, **options) -> None:
    """A run that is killed when a step has been recorded, and before it could be saved."""

    def kill() -> None:
        raise Killed

    with pytest.raises(Killed):
        run(out, listener=Heard(step, kill), **options)


def shown(out: Path, name: str) -> list[int]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(out / journal.EVENTS)).Reload()
    return [event.step for event in events.Scalars(name)]


# --- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_run_killed_at_any_step_and_resumed_ends_with_the_same_digest(tmp_path, reference, step):
    kill_at(step, tmp_path)
    run(tmp_path, resume=True)
    assert_as_if_nothing_had_happened(tmp_path, reference)


def test_a_run_killed_again_and_again_has_every_row_and_every_event_once(tmp_path, reference, monkeypatch):
    # TensorBoard reads files in the order of their names. Within one second a counter of this process tells them apart,
    # and 10 comes before 9.
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(writer, "_global_uid", writer.AtomicCounter(0))
    for step in (1, 3, 3, 4, 5, 6):  # after 3 and 6 the epochs end; checkpoints are at 2, 3, 4 and 6
        kill_at(step, tmp_path, resume=True)
    run(tmp_path, resume=True)
    assert_as_if_nothing_had_happened(tmp_path, reference)
    resumed_at = [again["step"] for again in records.read(tmp_path).facts["resumptions"]]
    assert resumed_at == [0, 2, 2, 3, 4, 4]
    assert shown(tmp_path, "step/loss") == list(range(1, STEPS + 1))
    assert shown(tmp_path, "test/loss") == [3, 6]


def test_a_run_stopped_at_any_step_and_resumed_ends_with_the_same_digest(tmp_path, reference):
    for step in range(1, STEPS):
        assert not run(tmp_path, steps=step, resume=step > 1).finished
    outcome = run(tmp_path, resume=True)
    assert outcome.finished
    assert outcome.digest == reference.outcome["digest"]
    assert [row["step"] for row in records.read(tmp_path).steps] == list(range(1, STEPS + 1))


def test_the_digest_tells_runs_apart_that_differ_in_chance_alone(tmp_path, reference):
    class Otherwise(Noise):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.rand(1)
            return x

    digests = {reference.outcome["digest"]}
    for layer in (Otherwise(), torch.nn.Identity()):
        model = tiny_model(noise=False)
        model[3] = layer
        digests.add(run(None, model=model, optimizer=SGD(0.0)).digest)
    assert len(digests) == 3


def test_adamw_goes_on_too(tmp_path):
    options = {"optimizer": AdamW(1e-3)}
    expected = run(None, **options).digest
    kill_at(5, tmp_path, **options)
    assert run(tmp_path, resume=True, **options).digest == expected


def test_a_run_out_of_minutes_is_saved_and_resumes_to_the_same_digest(tmp_path, reference):
    outcome = run(tmp_path, minutes=1e-6)
    assert (outcome.finished, outcome.signal, outcome.steps) == (False, None, 1)
    assert run(tmp_path, resume=True).finished
    assert_as_if_nothing_had_happened(tmp_path, reference)


def test_the_micro_batch_may_change_when_a_run_is_resumed(tmp_path):
    expected = run(tmp_path / "whole", model=tiny_model(noise=False))
    run(tmp_path / "cut", model=tiny_model(noise=False), steps=3, micro_batch=3)
    outcome = run(tmp_path / "cut", model=tiny_model(noise=False), micro_batch=1, resume=True)
    assert outcome.steps == expected.steps
    assert outcome.figures == pytest.approx(expected.figures, rel=1e-10)


def test_a_remembered_micro_batch_is_gone_on_with(tmp_path):
    run(tmp_path, steps=2, micro_batch=4)
    run(tmp_path, steps=4, resume=True)
    run(tmp_path, steps=5, micro_batch=8, resume=True)
    (tmp_path / journal.MICRO_BATCH).write_text("2")  # as a sharded run that ended out of memory leaves it
    run(tmp_path, resume=True)
    assert [row["micro_batch"] for row in records.read(tmp_path).steps] == [4, 4, 4, 4, 8, 2]


# --- the moment of the kill ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["replace", "fsync"])
def test_a_kill_at_any_write_changes_nothing_in_the_end(tmp_path, monkeypatch, reference, name):
    """Every rename and every wait for the disk of a whole run is the moment of a kill, one after the other."""
    original, unlink, moment = getattr(os, name), Path.unlink, 0
    for moment in count(1):
        calls = []

        def killed(*args, calls=calls, moment=moment):
            calls.append(args)
            if len(calls) >= moment:
                raise Killed
            return original(*args)

        def left(*args, calls=calls, moment=moment, **kwargs):  # nobody cleans up after a kill
            return unlink(*args, **kwargs) if len(calls) < moment else None

        out = tmp_path / str(moment)
        with monkeypatch.context() as patch:
            patch.setattr(os, name, killed)
            patch.setattr(Path, "unlink", left)
            try:
                run(out)
            except Killed:
                pass
            else:
                break
        run(out, resume=True)
        assert_as_if_nothing_had_happened(out, reference)
    assert moment > 7  # facts, four checkpoints, weights, outcome


def sleep_at(step: int, out: Path) -> None:
    run(out, listener=Heard(step, lambda: time.sleep(60)))


def wait_for_step(out: Path, step: int) -> None:
    end = time.monotonic() + 60
    while not (out / records.STEPS).exists() or f'"step":{step},' not in (out / records.STEPS).read_text():
        assert time.monotonic() < end, f"step {step} did not come"
        time.sleep(0.01)


def record_of(out: Path) -> dict[str, bytes]:
    """What is in a run directory but for its events, which a thread of the living process writes when it likes."""
    return {name: content for name, content in contents(out).items() if not name.startswith(journal.EVENTS)}


@pytest.mark.slow
def test_a_killed_process_leaves_a_folder_that_another_may_write_to_and_a_living_one_does_not(tmp_path, reference):
    out = tmp_path / "run"
    processes = start(sleep_at, 3, out, log=tmp_path / "log")
    wait_for_step(out, 3)
    before = record_of(out)
    with pytest.raises(FileExistsError, match="another process is writing to"):
        run(out, resume=True)
    assert record_of(out) == before
    processes[0].kill()
    assert finish(processes) == [-signal.SIGKILL]
    time.sleep(1.1)  # event files are told apart by the second they were begun in
    run(out, resume=True)
    assert_as_if_nothing_had_happened(out, reference)
    assert shown(out, "step/loss") == list(range(1, STEPS + 1))  # those before the kill were not lost in a buffer


def test_a_folder_can_be_locked_again_once_it_was_released(tmp_path):
    journal.lock_folder(tmp_path).close()
    with journal.lock_folder(tmp_path):
        assert (tmp_path / journal.LOCK).exists()


@pytest.mark.parametrize("absent", ["in this file system", "in this system"])
def test_where_there_are_no_locks_a_run_goes_without(tmp_path, monkeypatch, absent):
    def unsupported(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if absent == "in this system":
        monkeypatch.setattr(journal, "fcntl", None)
    else:
        monkeypatch.setattr(journal.fcntl, "lockf", unsupported)
    run(tmp_path / "run")
    assert records.read(tmp_path / "run").outcome is not None


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_and_saves_it(tmp_path, reference, number):
    handler = signal.getsignal(number)
    outcome = run(tmp_path, listener=Heard(1, lambda: os.kill(os.getpid(), number)), save_steps=None)
    assert (outcome.signal, outcome.steps, outcome.finished) == (number, 2, False)
    assert outcome.checkpoint == newest(tmp_path / journal.CHECKPOINTS)
    assert outcome.checkpoint.name.startswith("step-00000002.")
    assert signal.getsignal(number) is handler
    run(tmp_path, resume=True)
    assert_as_if_nothing_had_happened(tmp_path, reference)


@pytest.mark.parametrize("which", ["first", "last"])
def test_a_signal_stops_an_evaluation_which_is_made_when_the_run_is_resumed(tmp_path, monkeypatch, reference, which):
    evaluations = count(1)
    chosen = {"first": 1, "last": len([row for row in reference.epochs if "test" in row])}[which]

    def evaluate(step, **options):
        if next(evaluations) == chosen:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate_all(step, **options)

    evaluate_all = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", evaluate)
    outcome = run(tmp_path, save_steps=None)
    assert (outcome.signal, outcome.finished) == (signal.SIGTERM, False)
    assert len([row for row in records.read(tmp_path).epochs if "test" in row]) == chosen - 1
    run(tmp_path, resume=True)
    assert_as_if_nothing_had_happened(tmp_path, reference)


def test_a_second_signal_does_not_wait(tmp_path, reference):
    def interrupt_twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, listener=Heard(3, interrupt_twice))
    run(tmp_path, resume=True)
    assert_as_if_nothing_had_happened(tmp_path, reference)


# --- what is refused -------------------------------------------------------------------------------------------------


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content if how == "flipped" else content[: len(content) // 2])


@pytest.mark.parametrize("how", ["flipped", "truncated"])
def test_a_damaged_checkpoint_stops_the_run_untouched_and_the_one_before_it_can_be_used(tmp_path, reference, how):
    kill_at(5, tmp_path)
    newer, older = checkpoints(tmp_path / journal.CHECKPOINTS)
    damage(newer, how)
    before, model = contents(tmp_path), tiny_model()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=rf"is damaged.*; delete it to resume from .* {older.name}$"):
        run(tmp_path, resume=True, model=model)
    assert contents(tmp_path) == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    newer.unlink()
    run(tmp_path, resume=True)
    assert_as_if_nothing_had_happened(tmp_path, reference)


@pytest.mark.parametrize("step", [1, 5])
def test_other_settings_are_refused_by_name_before_and_after_the_first_checkpoint(tmp_path, step):
    kill_at(step, tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"other settings: optimizer\.lr: 0\.02 → 0\.01, seed: 3 → 4;"):
        run(tmp_path, resume=True, optimizer=SGD(0.01), seed=4)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("step", [1, 5])
def test_a_recipe_that_changed_is_refused_with_what_changed_before_and_after_the_first_checkpoint(tmp_path, step):
    facts = {"recipe": "mine", "definition": {"norm": "BCN(eps=1e-05, rate='lr')", "weight": "WS()", "lr": 0.02}}
    kill_at(step, tmp_path, facts=facts)
    before = contents(tmp_path)
    changed = {"recipe": "mine", "definition": {"norm": "BCN(eps=0.001, rate='lr')", "weight": None, "lr": 0.02}}
    with pytest.raises(
        ValueError, match=r"from before mine changed: norm: BCN\(eps=1e-05, .*001, .*, weight: WS\(\) → "
    ):
        run(tmp_path, resume=True, facts=changed)
    assert contents(tmp_path) == before
    assert run(tmp_path, resume=True, facts=facts).finished


@pytest.mark.parametrize("other", ["wider", "longer"])
def test_another_model_is_refused_and_left_as_it_is(tmp_path, other):
    kill_at(5, tmp_path)
    before = contents(tmp_path)
    model = tiny_model(channels=6) if other == "wider" else tiny_model().append(torch.nn.Linear(3, 3))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    names = r"'0.bias': \(4,\) in the checkpoint, \(6,\) in" if other == "wider" else "'7.bias': absent in"
    with pytest.raises(ValueError, match=f"is of another model: .* the first is {names}"):
        run(tmp_path, resume=True, model=model)
    assert contents(tmp_path) == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("step", [1, 5])
def test_a_model_that_trains_otherwise_is_refused_before_and_after_the_first_checkpoint(tmp_path, step):
    kill_at(step, tmp_path)
    before, others = contents(tmp_path), [tiny_model() for _ in range(3)]
    others[0][1] = mn.nn.BatchChannelNorm(4, 2, statistics="batch")
    others[1][1].rate = 0.1
    others[2][5].p = 0.5
    for model, name in zip(others, ("statistics='batch'", "rate=0.1", "p=0.5"), strict=True):
        with pytest.raises(ValueError, match=rf"a model with other layers: .*{name}.*: None → 1; build the model"):
            run(tmp_path, resume=True, model=model)
    assert contents(tmp_path) == before
    assert run(tmp_path, resume=True).finished


def test_a_model_of_the_same_tensors_and_another_function_is_refused(tmp_path):
    kill_at(5, tmp_path)
    before, model = contents(tmp_path), tiny_model()
    model[0].center = False
    with pytest.raises(
        ValueError, match=r"^step-\S+ is of another model: .*center=True.* but the model has .*center=False"
    ):
        run(tmp_path, resume=True, model=model)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("step", [1, 5])
def test_other_samples_are_refused_before_and_after_the_first_checkpoint(tmp_path, monkeypatch, step):
    kill_at(step, tmp_path)
    before = contents(tmp_path)
    monkeypatch.setattr(MemorySamples, "__len__", lambda samples: 19)
    with pytest.raises(ValueError, match="other training samples: 20, but the data set has 19"):
        run(tmp_path, resume=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "key, was, now, message",
    [
        ("data", {"train": 20, "test": 7}, {"train": 20, "test": 6}, "other test samples: 7, but the data set has 6"),
        (
            "data",
            {"names": ["cat", "dog"]},
            {"names": ["dog", "yak"]},
            "classes by label: cat, dog, but .* has dog, yak",
        ),
        ("variation", {"size": 32}, {"size": 48}, "a run of --size 32, not 48"),
    ],
)
def test_other_classes_test_samples_and_sizes_are_refused(key, was, now, message):
    with pytest.raises(ValueError, match=message):
        journal._check_facts(
            {"settings": {}, "data": {}, key: was}, {"settings": {}, "layers": {}, "data": {}, key: now}
        )


def test_ranks_that_see_different_checkpoints_do_not_go_on(tmp_path, monkeypatch):
    kill_at(5, tmp_path)
    before = contents(tmp_path)
    # as on a machine of its own, where the run directory is empty
    monkeypatch.setattr(OneRank, "gather", lambda self, value: [value, None if isinstance(value, str) else value])
    with pytest.raises(CheckpointError, match=r"rank 0: step-00000004\.\w+\.pt, rank 1: none"):
        run(tmp_path, resume=True)
    assert contents(tmp_path) == before


def test_a_rank_that_is_new_draws_what_no_other_does():
    step = make_step(SmallResNet(), Toy(), 4)
    state = run_state(step, done=2, seed=0)
    drawn = []
    for rank in range(2):
        step.parallel.rank, step.parallel.world = rank, 2
        RandomState.seed(2**20 * rank, step.device)
        load_run_state(step, state)
        drawn.append(torch.rand(()).item())
    assert drawn[0] != drawn[1]


def test_a_folder_that_holds_a_run_is_refused_without_resume(tmp_path):
    kill_at(3, tmp_path)
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match="already holds a run"):
        run(tmp_path)
    (tmp_path / records.FACTS).unlink()
    (tmp_path / records.STEPS).unlink()
    with pytest.raises(FileExistsError, match=r"holds step-00000002\.\w+\.pt of another run"):
        run(tmp_path)
    left = contents(tmp_path)
    assert all(left[name] == before[name] for name in left)


@pytest.mark.parametrize("text", [b"", b"x", b"-1", b"1" * 400, b"\xff"])
def test_a_remembered_micro_batch_that_is_no_number_is_refused_by_name(tmp_path, text):
    run(tmp_path, steps=2)
    (tmp_path / journal.MICRO_BATCH).write_bytes(text)
    with pytest.raises(ValueError, match=r"micro_batch must hold a number of samples, got .*; delete it"):
        run(tmp_path, resume=True)


def test_rows_of_steps_without_a_loss_are_resumed_from(tmp_path):
    run(tmp_path, steps=2)
    (tmp_path / records.STEPS).write_text('{"step": 1, "samples": 8}\n{"step": 2, "loss": 1.0}\n')
    assert run(tmp_path, resume=True).finished


# --- the edges -------------------------------------------------------------------------------------------------------


def test_there_is_nothing_to_resume_in_an_empty_folder_and_the_run_begins(tmp_path, reference):
    (tmp_path / journal.CHECKPOINTS).mkdir()
    run(tmp_path, resume=True)
    assert_as_if_nothing_had_happened(tmp_path, reference)
    assert "resumptions" not in records.read(tmp_path).facts


def test_a_finished_run_is_left_as_it_is_and_says_so(tmp_path, reference):
    run(tmp_path)
    before, heard = contents(tmp_path), Heard()
    outcome = run(tmp_path, resume=True, listener=heard)
    assert contents(tmp_path) == before
    assert heard.messages[-1] == "nothing is left to do: 6 of 6 steps are done"
    assert (outcome.digest, outcome.finished) == (reference.outcome["digest"], True)
    assert math.isfinite(outcome.figures["loss"])


def test_fewer_steps_than_are_done_take_nothing_back(tmp_path, reference):
    run(tmp_path, steps=4)
    heard = Heard()
    assert run(tmp_path, resume=True, steps=2, listener=heard).steps == 4
    assert "nothing is left to do: 4 of 6 steps are done" in heard.messages
    run(tmp_path, resume=True)
    assert records.read(tmp_path).outcome == reference.outcome


def test_a_run_killed_before_its_outcome_was_written_writes_it_when_resumed(tmp_path, reference, monkeypatch):
    def killed(*args: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(loop._TrainingRun, "_end", killed)
        with pytest.raises(Killed):
            run(tmp_path)
    assert records.read(tmp_path).outcome is None
    run(tmp_path, resume=True)
    assert_as_if_nothing_had_happened(tmp_path, reference)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to(path.parent.parent / "elsewhere")])
def test_a_lock_that_is_a_pipe_or_a_link_is_refused(tmp_path, make):
    (tmp_path / "run").mkdir()
    make(tmp_path / "run/.lock")
    with pytest.raises(ValueError, match="must be a file of its own"):
        journal.lock_folder(tmp_path / "run")
    assert not (tmp_path / "elsewhere").exists()
