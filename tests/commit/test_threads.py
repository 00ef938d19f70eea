"""Threads may build, train and delete models at the same time."""

import gc
import sys
import threading
import time

import torch

import micronorm as mn
from micronorm.commit.idle import find_objects
from micronorm.nn.window import live_windows


def test_a_layer_that_an_optimizer_step_looks_at_lives_until_its_end():
    norm = mn.nn.BatchChannelNorm(2, 1)
    alive = live_windows()
    window = norm._window
    del norm
    gc.collect()
    assert any(found is window and layer is window.layer for found, layer in alive)


def test_steps_of_one_model_do_not_mind_layers_made_and_deleted_in_other_threads():
    stop = threading.Event()
    errors: list[BaseException] = []
    x = torch.randn(1, 2, 2, 2)

    def make_and_delete():
        while not stop.is_set():
            torch.nn.Sequential(*(mn.nn.BatchChannelNorm(2, 1, device="meta") for _ in range(20)))

    def train():
        norm = mn.nn.BatchChannelNorm(2, 1)
        optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
        try:
            while not stop.is_set():
                norm(x)
                optimizer.step()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=target) for target in (make_and_delete, make_and_delete, train, train)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads change often, so that a race shows within a second
    try:
        for thread in threads:
            thread.start()
        end = time.monotonic() + 1.5
        while time.monotonic() < end and not errors:
            time.sleep(0.05)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not errors, errors[0]


def test_the_search_for_optimizers_does_not_disturb_what_other_threads_build():
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(3)]
    stop = threading.Event()
    errors: list[BaseException] = []

    def build_tuples():
        try:
            while not stop.is_set():
                tuple(str(i) for i in range(2000))  # fails if anyone else refers to the unfinished tuple
        except SystemError as error:
            errors.append(error)

    thread = threading.Thread(target=build_tuples)
    thread.start()
    try:
        for _ in range(5):
            assert {id(optimizer) for optimizer in optimizers} <= {id(o) for o in find_objects(torch.optim.Optimizer)}
    finally:
        stop.set()
        thread.join()
    assert not errors, errors[0]
