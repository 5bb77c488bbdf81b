#!/usr/bin/env python3
"""Trains a small network on the digits of examples/data with PyTorch through heddle, and prints its accuracy.

    python examples/torch/digits.py                                      one process, beside plain PyTorch
    heddle launch -n 2 -s 1 -- python examples/torch/digits.py dist_sync
    heddle launch -n 2 -s 1 -- python examples/torch/digits.py dist_async

Each worker trains on its share of the pictures. Over dist_sync the ranks average their gradients and all keep
the same weights; over dist_async the server updates the weights as each gradient arrives.
"""

import argparse
import pathlib
import time

import numpy
import torch

import heddle as mx
import heddle.torch

DATA = pathlib.Path(__file__).resolve().parents[1] / "data" / "digits.csv"
RATE, MOMENTUM, BATCH = 0.1, 0.9, 32


def load():
    """(pictures, digits) for training and for the test: every fifth picture."""
    table = torch.from_numpy(numpy.loadtxt(DATA, delimiter=",", dtype="float32"))
    pictures, digits = table[:, :64] / 16, table[:, 64].long()
    is_test = torch.arange(len(table)) % 5 == 0
    return (pictures[~is_test], digits[~is_test]), (pictures[is_test], digits[is_test])


def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def train(model, optimizer, pictures, digits, epochs):
    """Returns the seconds that a step took."""
    order = torch.Generator().manual_seed(2)
    begin, steps = time.perf_counter(), 0
    for _ in range(epochs):
        for batch in torch.randperm(len(digits), generator=order).split(BATCH):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(pictures[batch]), digits[batch]).backward()
            optimizer.step()
            steps += 1
    return (time.perf_counter() - begin) / steps


def accuracy(model, pictures, digits):
    with torch.no_grad():
        return (model(pictures).argmax(1) == digits).float().mean().item()


def report(what, model, test, seconds):
    print(f"{what}: {accuracy(model, *test):.1%} of the test pictures right, {seconds * 1e6:.0f} us a step", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", nargs="?", default="device", help="the type of the store (default: device)")
    parser.add_argument("--epochs", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    store = mx.kv.create(arguments.store)  # a server or the scheduler of a job serves here, and ends
    (pictures, digits), test = load()
    begin, count = store.rank, len(digits) // store.num_workers  # as many steps at every rank
    share = pictures[begin::store.num_workers][:count], digits[begin::store.num_workers][:count]
    model = make_model()
    parameters = model.named_parameters()
    if "async" in arguments.store:
        # Several workers' updates add up, so each takes its part of the step.
        optimizer = heddle.torch.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=RATE), parameters, store,
            store_optimizer=mx.optimizer.SGD(momentum=MOMENTUM))
    else:
        heddle.torch.broadcast_parameters(model, store)
        optimizer = heddle.torch.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM), parameters, store)
    seconds = train(model, optimizer, *share, arguments.epochs)
    report(f"heddle, {arguments.store}, worker {store.rank} of {store.num_workers}", model, test, seconds)

    if store.rank == 0:
        plain = make_model()
        seconds = train(plain, torch.optim.SGD(plain.parameters(), lr=RATE, momentum=MOMENTUM), pictures, digits,
                        arguments.epochs)
        report("PyTorch alone, one process", plain, test, seconds)
    store.barrier()


if __name__ == "__main__":
    main()
