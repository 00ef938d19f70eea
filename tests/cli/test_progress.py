import io
import math
import re

import pytest
from rich.console import Console

from micronorm.cli.printing import TrainingProgress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    monkeypatch.setenv("TERM", "xterm")  # whatever the tests themselves run in
    return Clock()


def listen(clock: Clock, *, terminal: bool = False, width: int = 140) -> tuple[TrainingProgress, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, highlight=False, color_system=None)
    return TrainingProgress(console, clock=clock), out


def step_row(step: int, **more) -> dict:
    return {"step": step, "epoch": (step - 1) // 10, "loss": 1.23456, "lr": 0.02, "samples": 64, "seconds": 0.5, **more}


def epoch_row(epoch: int, **test) -> dict:
    return {"epoch": epoch, "step": 10 * (epoch + 1), "seconds": 5.0, "train": {"loss": 1.0}, "test": test}


def plain(out: io.StringIO) -> str:
    """What was sent to a terminal, without the sequences that move its cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())


def test_away_from_a_terminal_there_is_a_line_per_epoch_and_no_control_character(clock):
    progress, out = listen(clock)
    progress.on_start(20, 0, "digits")
    for step in range(1, 21):
        clock.now += 1
        progress.on_step(step_row(step, memory=3 * 2**29))
        if step % 10 == 0:
            progress.on_epoch(epoch_row(step // 10 - 1, loss=0.5, error=2.4))
    progress.on_end()
    assert out.getvalue().splitlines() == [
        "digits: step 0/20",
        "digits: epoch 1, step 10/20, loss 1.235, test error 2.4, 0:10 left, 128 samples/s, 1.5 GiB, lr 0.02",
        "digits: epoch 2, step 20/20, loss 1.235, test error 2.4, 128 samples/s, 1.5 GiB, lr 0.02",
    ]


@pytest.mark.parametrize(
    "figure, title", [("miou", "mIoU 41.25 %"), ("AP", "AP 41.25"), ("top1", "top-1 error 41.25 %")]
)
def test_the_first_figure_of_a_task_is_shown_by_its_name(clock, figure, title):
    progress, out = listen(clock)
    progress.on_start(20, 0, "task")
    progress.on_epoch(epoch_row(0, loss=0.5, **{figure: 41.25, "accuracy": 90.0}))
    assert f"test {title}" in out.getvalue()


def test_within_a_long_epoch_there_is_at_most_a_line_per_thirty_seconds(clock):
    progress, out = listen(clock)
    progress.on_start(1000, 0, "imagenet")
    for step in range(1, 101):
        clock.now += 1
        progress.on_step({**step_row(step), "epoch": 0})
    steps = [int(found) for found in re.findall(r"step (\d+)/1000", out.getvalue())]
    assert steps == [0, 30, 60, 90]


def test_an_epochs_line_starts_the_thirty_seconds_anew(clock):
    progress, out = listen(clock)
    progress.on_start(1000, 0, "digits")
    clock.now += 29
    progress.on_epoch(epoch_row(0, error=1.0))
    clock.now += 29
    progress.on_step(step_row(11))
    assert len(out.getvalue().splitlines()) == 2  # that of the start and that of the epoch


def test_a_long_evaluation_shows_how_far_it_is(clock):
    progress, out = listen(clock)
    progress.on_start(20, 0, "boxes")
    for done in range(0, 5000, 100):
        clock.now += 1
        progress.on_test(done, 5000)
    progress.on_epoch(epoch_row(0, AP=41.25))
    assert out.getvalue().splitlines() == [
        "boxes: step 0/20",
        "boxes: step 0/20, 58 % of the test samples scored",
        "boxes: epoch 1, step 10/20, test AP 41.25, 0:50 left",
    ]


def test_the_time_left_counts_from_where_the_run_was_resumed_and_by_the_clock(clock):
    progress, out = listen(clock)
    progress.on_start(1100, 100, "digits")
    clock.now += 100 * 7  # evaluation included, which the steps' own seconds are not
    progress.on_step(step_row(200))
    assert "1:45:00 left" in out.getvalue()  # 900 steps of 7 s


def test_images_per_second_are_those_of_recent_steps(clock):
    progress, out = listen(clock)
    progress.on_start(200, 0, "digits")
    for step in range(1, 101):
        progress.on_step(step_row(step, seconds=100.0 if step <= 50 else 8.0))
    progress.on_epoch(epoch_row(9))
    assert ", 8.0 samples/s" in out.getvalue()


def test_slow_steps_show_the_seconds_of_a_sample(clock):
    progress, out = listen(clock)
    progress.on_start(200, 0, "objects")
    progress.on_step(step_row(1, samples=8, seconds=100.0))
    progress.on_epoch(epoch_row(0))
    assert ", 12 s/sample" in out.getvalue()


def test_what_a_row_lacks_is_not_shown_and_nothing_fails(clock):
    progress, out = listen(clock)
    progress.on_start(None, 0, "")
    clock.now += 30
    progress.on_step({"step": 1, "loss": math.nan, "memory": None, "seconds": 0, "samples": 0})
    progress.on_epoch({"epoch": 0, "step": 1})
    assert out.getvalue().splitlines() == ["step 0", "step 1, loss nan", "epoch 1, step 1, loss nan"]


def test_the_first_figure_is_shown_where_there_is_no_error(clock):
    progress, out = listen(clock)
    progress.on_start(10, 0, "boxes")
    progress.on_epoch(epoch_row(0, box_map=31.25))
    assert "test box map 31.25" in out.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_messages_are_printed_whole_and_as_they_are(clock, terminal):
    progress, out = listen(clock, terminal=terminal)
    text = "out of memory at micro-batch 64 [bold], step repeated with 32"
    progress.on_message("before the run")
    progress.on_start(10, 0, "[red]digits")
    progress.on_message(text)
    progress.on_end()
    assert "before the run" in plain(out)
    assert text in plain(out)
    assert "[red]digits" in plain(out)


def test_away_from_a_terminal_a_long_message_stays_one_line(clock):
    progress, out = listen(clock, width=40)
    progress.on_message("word " * 30)
    assert len(out.getvalue().splitlines()) == 1


@pytest.mark.parametrize("width", [60, 80, 140])
def test_on_a_terminal_there_is_one_live_line_that_fits(clock, width):
    progress, out = listen(clock, terminal=True, width=width)
    progress.on_start(20, 0, "digits")
    for step in range(1, 21):
        clock.now += 1
        progress.on_step(step_row(step, memory=2**30))
    progress.on_epoch(epoch_row(1, error=2.4))
    progress.on_end()
    lines = [line for line in re.split(r"[\r\n]+", plain(out)) if line.strip()]
    assert all(line.startswith("digits") and len(line) <= width for line in lines)
    last = lines[-1]
    assert "epoch 2, step 20/20, loss 1.235, test error 2.4" in last
    assert ("━" in last) is (width == 140)
    assert ("128 samples/s" in last) is (width >= 80)
    assert ("lr 0.02" in last) is (width == 140)
    assert out.getvalue().count("\n") == 1, "the live line is drawn over itself"


def test_a_terminal_without_cursor_movement_gets_plain_lines(clock, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    progress, out = listen(clock, terminal=True)
    progress.on_start(20, 0, "digits")
    progress.on_step(step_row(10))
    progress.on_epoch(epoch_row(0, error=2.4))
    progress.on_end()
    assert out.getvalue().splitlines()[1].startswith("digits: epoch 1, step 10/20, loss 1.235, test error 2.4")
    assert "\x1b" not in out.getvalue()


def test_ending_twice_or_without_a_run_does_no_harm_and_a_new_run_starts_afresh(clock):
    progress, out = listen(clock, terminal=True)
    progress.on_end()
    assert out.getvalue() == ""
    progress.on_start(20, 0, "first")
    progress.on_step(step_row(20))
    progress.on_start(30, 5, "second")
    progress.on_step(step_row(6))
    progress.on_end()
    progress.on_end()
    last = [line for line in re.split(r"[\r\n]+", plain(out)) if line.strip()][-1]
    assert last.startswith("second")
    assert "step 6/30" in last


def test_the_cursor_is_shown_again_at_the_end(clock):
    progress, out = listen(clock, terminal=True)
    progress.on_start(20, 0, "digits")
    progress.on_end()
    assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l")
